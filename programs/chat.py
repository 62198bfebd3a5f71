"""Talk about documents over many turns; the context grows, and every turn looks at passages of its own.

    python -m rapid_sgl.programs.chat report.pdf          # questions from standard input, one a line
    python -m rapid_sgl.programs.chat report.pdf notes.md -q "Who signed it?" -q "And when?"

A turn's prompt begins with the whole conversation before it. The server keeps that prefix in its radix cache, so a
turn costs the prefill of what is new; how much was reused is printed with every answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import sglang as sgl
from rapid_sgl.programs.common import Answer, backend_for, command_line, finished, instruction, read
from sglang.lang.interpreter import ProgramState

from rapid_sgl.lang import RapidBackend, rapid_options


@sgl.function
def turn(s, history, added, question, max_tokens=64, regex=None):
    s += history
    s += sgl.user("\n\n".join([*added, instruction(question)]))
    with rapid_options(rapid_query=question):
        s += sgl.assistant(sgl.gen("answer", max_tokens=max_tokens, temperature=0, regex=regex))


class Chat:
    """One conversation.

    Args:
        backend: what answers.
        documents: that the first question is about; ``add`` brings more.
    """

    def __init__(self, backend: RapidBackend, *documents: str) -> None:
        self.backend = backend
        self.text = ""  # the conversation so far, as the model sees it
        self._added = list(documents)

    def add(self, document: str) -> None:
        """Put a document in front of the next question."""
        self._added.append(document)

    def ask(
        self, question: str, *, max_tokens: int = 64, regex: str | None = None
    ) -> tuple[ProgramState, Answer]:
        """The state with variable ``answer``, and the answer, cited from anywhere in the conversation before it.

        A turn that fails leaves the conversation as it was.

        Args:
            max_tokens: of the answer at most.
            regex: that the answer has to match; None: free text.

        Raises:
            ServerError: the server refused the prompt, for example because it has grown too long.
        """
        state = turn.run(
            self.text, self._added, question, max_tokens=max_tokens, regex=regex, backend=self.backend
        )
        text = state.text()
        answer = finished(self.backend, state, "answer", question, text[: text.rindex(instruction(question))])
        self.text, self._added = text, []
        return state, answer


def main() -> None:
    parser = command_line("chat", __doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="documents: text, Markdown or PDF")
    parser.add_argument("-q", "--question", action="append", help="a turn; default: ask on standard input")
    args = parser.parse_args()
    with backend_for(args) as backend:
        chat = Chat(backend, *([read(args.files)] if args.files else []))
        for question in args.question or _typed():
            _, answer = chat.ask(question, max_tokens=args.max_tokens)
            print(answer, end="\n\n", flush=True)


def _typed() -> Iterator[str]:
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


if __name__ == "__main__":
    main()
