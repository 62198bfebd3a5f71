"""What the programs share: the wording of a question, citations, and their command lines."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.lang.interpreter import ProgramState, ProgramStateGroup

from rapid_sgl.cli.serving import command_server
from rapid_sgl.http_client import ServerError
from rapid_sgl.lang import RapidBackend, RapidEndpoint
from rapid_sgl.request import SPANS_KEY
from rapid_sgl.retrieval.chunking import chunk
from rapid_sgl.retrieval.scorers import Bm25Scorer
from rapid_sgl.retrieval.spans import Span

# A citation is a few lines; the chunks that drafts look at are twice as long.
CITED_TOKENS = 64


@dataclass(frozen=True)
class Citation:
    """Where the context says something: a token range of the prompt, and its text."""

    span: Span
    text: str

    def __str__(self) -> str:
        return f"[{self.span[0]:,}-{self.span[1]:,}] {' '.join(self.text.split())}"


@dataclass(frozen=True)
class Answer:
    """An answer of a program and what it rests on."""

    question: str
    text: str
    citation: Citation | None  # the passage that fits question and answer best; None: none fits
    spans: list[Span]  # token ranges of the prompt that drafts looked at, head and recent window apart
    meta_info: dict[str, Any]  # of the call: SGLang's, with the accept statistics

    def __str__(self) -> str:
        lines = [f"Q: {self.question}", f"A: {self.text}"]
        if self.citation:
            lines.append(f"   cited {self.citation}")
        return "\n".join([*lines, f"   {self.statistics}"])

    @property
    def statistics(self) -> str:
        meta = self.meta_info
        return (
            f"prompt {meta['prompt_tokens']:,} tokens, {meta['cached_tokens']:,} from cache; "
            f"{meta['completion_tokens']} new, {meta.get('spec_accept_length', 1):.2f} per target pass"
        )


def asked(document: str, question: str) -> str:
    """The user message for a question about a document. Documents first: prompts about one share its cache."""
    return f"{document}\n\n{instruction(question)}"


def instruction(question: str) -> str:
    return f"Answer from the text above. Question: {question}"


def until(document: str, text: str) -> str:
    """A program's text up to the end of ``document``."""
    return text[: text.index(document) + len(document)]


def finished(backend: RapidBackend, state: ProgramState, name: str, question: str, context: str) -> Answer:
    """The variable ``name`` of a program that has run, with its citation.

    Args:
        question: that the variable answers.
        context: the beginning of the program's text in which to look for the citation.

    Raises:
        ServerError: the program failed; see ``check``.
    """
    check(state)
    meta = state.get_meta_info(name)
    text = state[name].strip()
    flat = meta.get(SPANS_KEY, [])
    spans = list(zip(flat[::2], flat[1::2], strict=True))
    return Answer(question, text, cite(backend, context, f"{question} {text}"), spans, meta)


def cite(backend: RapidBackend, context: str, claim: str) -> Citation | None:
    """The passage of ``context`` that fits ``claim`` best, by words.

    ``context`` has to be the beginning of a prompt for the span to be a range of that prompt's tokens.
    """
    passages = chunk(backend.passages.tokens(context), size=CITED_TOKENS)
    scores = Bm25Scorer().scores([passage.text for passage in passages], claim)
    best = max(range(len(passages)), key=lambda index: scores[index], default=None)
    if best is None or scores[best] <= 0:
        return None
    return Citation((passages[best].start, passages[best].end), passages[best].text)


def check(state: ProgramState) -> None:
    """Wait for a program's calls; SGLang itself only warns of one that fails.

    Raises:
        ServerError: one did; the text is its error's.
    """
    error = state.error()
    if error is not None:
        raise ServerError(f"the program stopped: {error}") from error


def join(branches: ProgramStateGroup) -> None:
    """Wait for all branches and gather their variables.

    Raises:
        ServerError: one failed; see ``check``.
    """
    branches.join()
    for branch in branches.states:
        check(branch)


def command_line(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every program has; the program adds its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m rapid_sgl.programs.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--server", metavar="URL", help="use this running server (key: OPENAI_API_KEY); else one is started"
    )
    parser.add_argument("--model-path", metavar="MODEL", help="model to serve (default: the embedded one)")
    parser.add_argument(
        "--rapid-drafter", default="view", choices=["view", "rag", "auto", "off"], help="(default: view)"
    )
    parser.add_argument("--rapid-budget", type=int, default=1024, metavar="N", help="(default: 1024)")
    parser.add_argument("--rapid-recent", type=int, default=512, metavar="N", help="(default: 512)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="per call (default: 64)")
    return parser


@contextlib.contextmanager
def backend_for(args: argparse.Namespace) -> Iterator[RapidEndpoint]:
    """The backend that the command line names; a server of its own lives as long as the block.

    What goes wrong in the block ends the program with one line.
    """
    options = {key: getattr(args, key) for key in ("rapid_drafter", "rapid_budget", "rapid_recent")}
    try:
        with warnings.catch_warnings(), command_server(args, (), _say) as client:
            # SGLang's traceback of a failed call; the one line below has its reason
            warnings.filterwarnings("ignore", "Error in stream_executor")
            yield RapidEndpoint(client.url, os.environ.get("OPENAI_API_KEY"), **options)
    except (RuntimeError, ValueError) as error:  # ServerError, DocumentError, RapidOptionError, …
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr)


def read(files: Sequence[str]) -> str:
    """The files as one document; with more than one, each is headed by its name."""
    from rapid_sgl.cli.asking import read_documents

    return read_documents(files)
