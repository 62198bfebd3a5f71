r"""Answer a question in hops: each answer becomes part of the next query, and retrieval runs again for it.

    python -m rapid_sgl.programs.multi_hop report.pdf \
        -q "Who leads the Larkspur project? => It is led by" \
        -q "In which city does {answer} live? => {answer} lives in the city of"

``{answer}`` stands for the answer before; what follows ``=>`` is how the model's sentence begins, which keeps
answers short enough to ask on with. All hops are turns of one conversation about the document, so its keys and
values are computed once; what changes per hop are the passages that drafts look at.
"""

from __future__ import annotations

from collections.abc import Sequence

import sglang as sgl
from rapid_sgl.programs.common import (
    Answer,
    asked,
    backend_for,
    check,
    command_line,
    finished,
    instruction,
    read,
    until,
)
from sglang.lang.interpreter import ProgramState

from rapid_sgl.lang import RapidBackend, rapid_options

BEGINS = "=>"


@sgl.function
def program(s, document, hops, max_tokens=16):
    answer, questions = "", []
    for number, hop in enumerate(hops):
        question, _, begin = (part.strip() for part in hop.replace("{answer}", answer).partition(BEGINS))
        questions.append(question)
        s += sgl.user(instruction(question) if number else asked(document, question))
        with rapid_options(rapid_query=question), s.assistant():
            s += begin + sgl.gen(f"answer_{number}", max_tokens=max_tokens, temperature=0, stop=[".", "\n"])
        check(s)
        answer = s[f"answer_{number}"].strip()
    return questions


def multi_hop(
    backend: RapidBackend, document: str, hops: Sequence[str], *, max_tokens: int = 16
) -> tuple[ProgramState, list[Answer]]:
    """The state with variables ``answer_0``, ``answer_1``, …, and one answer per hop, each up to the end of its
    sentence.

    Args:
        hops: ``question`` or ``question => beginning of the answer``; from the second on ``{answer}`` stands for
            the answer to the one before.
        max_tokens: of each answer at most.

    Raises:
        ServerError: the server refused a prompt.
    """
    state = program.run(document, list(hops), max_tokens=max_tokens, backend=backend)
    context = until(document, state.text())
    return state, [
        finished(backend, state, f"answer_{number}", question, context)
        for number, question in enumerate(state.ret_value)
    ]


def main() -> None:
    parser = command_line("multi_hop", __doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="the document: text, Markdown or PDF")
    parser.add_argument(
        "-q", "--question", required=True, action="append", help="one hop; give several, in order"
    )
    args = parser.parse_args()
    with backend_for(args) as backend:
        _, answers = multi_hop(backend, read(args.files), args.question, max_tokens=args.max_tokens)
        print(*answers, sep="\n\n")


if __name__ == "__main__":
    main()
