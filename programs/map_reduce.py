"""Ask every section of a document at once, then make one answer of what they said.

    python -m rapid_sgl.programs.map_reduce book.md -q "Which access code is named?" --section-tokens 2000

For documents beyond the model's context, or where every part has to be looked at. The sections are branches of one
fork: the server works on them in one batch, each drafted from its own passages.
"""

from __future__ import annotations

from collections.abc import Sequence

import sglang as sgl
from rapid_sgl.programs.common import Answer, asked, backend_for, command_line, finished, join, read, until
from sglang.lang.interpreter import ProgramState

from rapid_sgl.lang import RapidBackend, rapid_options
from rapid_sgl.retrieval.chunking import chunk, tokenize


@sgl.function
def program(s, sections, question, max_tokens=48, regex=None):
    branches = s.fork(len(sections))
    for branch, section in zip(branches.states, sections, strict=True):
        branch += sgl.user(asked(section, question))
        with rapid_options(rapid_query=question):
            branch += sgl.assistant(sgl.gen("note", max_tokens=max_tokens, temperature=0, regex=regex))
    join(branches)
    notes = "\n".join(f"Section {n}: {note.strip()}" for n, note in enumerate(s["note"], 1))
    s += sgl.user(asked(notes, question))
    # A beginning that speaks of all of them: small models would answer with one section's note.
    s += sgl.assistant(
        "All sections together say:" + sgl.gen("answer", max_tokens=max_tokens * 2, temperature=0)
    )
    return branches.states


def map_reduce(
    backend: RapidBackend,
    sections: Sequence[str],
    question: str,
    *,
    max_tokens: int = 48,
    regex: str | None = None,
) -> tuple[ProgramState, list[Answer]]:
    """The state with variables ``note`` (one per section) and ``answer``, and the sections' answers, each cited
    in the coordinates of its own branch.

    Args:
        sections: at least one; ``split`` cuts them from a document.
        max_tokens: of a section's answer at most; the final one may have twice as many.
        regex: that a section's answer has to match; None: free text.

    Raises:
        ServerError: the server refused a prompt.
    """
    state = program.run(list(sections), question, max_tokens=max_tokens, regex=regex, backend=backend)
    return state, [
        finished(backend, branch, "note", question, until(section, branch.text()))
        for branch, section in zip(state.ret_value, sections, strict=True)
    ]


def split(backend: RapidBackend, document: str, section_tokens: int) -> list[str]:
    """``document`` in sections of at most that many tokens, cut at the strongest boundaries."""
    tokens = tokenize(document, backend.passages.tokenizer)
    return [section.text for section in chunk(tokens, size=section_tokens)]


def main() -> None:
    parser = command_line("map_reduce", __doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="the document: text, Markdown or PDF")
    parser.add_argument("-q", "--question", required=True, help="what to ask every section")
    parser.add_argument("--section-tokens", type=int, default=2000, metavar="N", help="(default: 2000)")
    args = parser.parse_args()
    with backend_for(args) as backend:
        sections = split(backend, read(args.files), args.section_tokens)
        state, notes = map_reduce(backend, sections, args.question, max_tokens=args.max_tokens)
        print(*notes, f"A: {state['answer'].strip()}", sep="\n\n")


if __name__ == "__main__":
    main()
