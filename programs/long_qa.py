"""Answer a question about a long document and cite the passage that the answer comes from.

    python -m rapid_sgl.programs.long_qa report.pdf -q "Who signed it?"

The whole document is the prompt. Retrieval finds the passages that fit the question, drafts look at those, and the
full-context pass verifies them: the answer is the model's own.
"""

from __future__ import annotations

import sglang as sgl
from rapid_sgl.programs.common import Answer, asked, backend_for, command_line, finished, read, until
from sglang.lang.interpreter import ProgramState

from rapid_sgl.lang import RapidBackend, rapid_options


@sgl.function
def program(s, document, question, max_tokens=64, regex=None):
    s += sgl.user(asked(document, question))
    with rapid_options(rapid_query=question):
        s += sgl.assistant(sgl.gen("answer", max_tokens=max_tokens, temperature=0, regex=regex))


def long_qa(
    backend: RapidBackend, document: str, question: str, *, max_tokens: int = 64, regex: str | None = None
) -> tuple[ProgramState, Answer]:
    """The state with variable ``answer``, and the answer with its citation.

    Args:
        max_tokens: of the answer at most.
        regex: that the answer has to match; None: free text.

    Raises:
        ServerError: the server refused the prompt, for example because it is too long.
    """
    state = program.run(document, question, max_tokens=max_tokens, regex=regex, backend=backend)
    return state, finished(backend, state, "answer", question, until(document, state.text()))


def main() -> None:
    parser = command_line("long_qa", __doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="the document: text, Markdown or PDF")
    parser.add_argument("-q", "--question", required=True, help="what to ask")
    args = parser.parse_args()
    with backend_for(args) as backend:
        _, answer = long_qa(backend, read(args.files), args.question, max_tokens=args.max_tokens)
        print(answer)


if __name__ == "__main__":
    main()
