"""Put one question to several documents and say whether they agree.

    python -m rapid_sgl.programs.compare_documents offer-a.md offer-b.md -q "What is the delivery time?"

Each document is a branch of one fork with passages of its own; their answers, side by side, are what the last call
reads. Its verdict is a ``select`` between two words.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import sglang as sgl
from rapid_sgl.programs.common import Answer, asked, backend_for, command_line, finished, join, read, until
from sglang.lang.interpreter import ProgramState

from rapid_sgl.lang import RapidBackend, rapid_options

VERDICTS = ("agree", "differ")


@sgl.function
def program(s, documents, question, max_tokens=48, regex=None):
    branches = s.fork(len(documents))
    for branch, text in zip(branches.states, documents.values(), strict=True):
        branch += sgl.user(asked(text, question))
        with rapid_options(rapid_query=question):
            branch += sgl.assistant(sgl.gen("found", max_tokens=max_tokens, temperature=0, regex=regex))
    join(branches)
    found = "\n".join(f"{name}: {text.strip()}" for name, text in zip(documents, s["found"], strict=True))
    s += sgl.user(f"{found}\n\nThese are answers to the question: {question} Do they agree or differ?")
    s += sgl.assistant("The answers " + sgl.select("verdict", VERDICTS) + ".")
    return branches.states


def compare_documents(
    backend: RapidBackend,
    documents: Mapping[str, str],
    question: str,
    *,
    max_tokens: int = 48,
    regex: str | None = None,
) -> tuple[ProgramState, dict[str, Answer]]:
    """The state with variables ``found`` (one per document) and ``verdict`` (one of ``VERDICTS``), and the answers
    by document, each cited in the coordinates of its own branch.

    Args:
        documents: name to text, two or more.
        max_tokens: of an answer at most.
        regex: that an answer has to match; None: free text.

    Raises:
        ValueError: fewer than two documents.
        ServerError: the server refused a prompt.
    """
    if len(documents) < 2:
        raise ValueError(f"{len(documents)} document is nothing to compare; name two or more")
    state = program.run(dict(documents), question, max_tokens=max_tokens, regex=regex, backend=backend)
    return state, {
        name: finished(backend, branch, "found", question, until(text, branch.text()))
        for branch, (name, text) in zip(state.ret_value, documents.items(), strict=True)
    }


def main() -> None:
    parser = command_line("compare_documents", __doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="two or more: text, Markdown or PDF")
    parser.add_argument("-q", "--question", required=True, help="what to ask each of them")
    args = parser.parse_args()
    with backend_for(args) as backend:
        documents = {Path(file).name: read([file]) for file in args.files}
        state, answers = compare_documents(backend, documents, args.question, max_tokens=args.max_tokens)
        for name, answer in answers.items():
            print(f"{name}\n{answer}\n")
        print(f"The answers {state['verdict']}.")


if __name__ == "__main__":
    main()
