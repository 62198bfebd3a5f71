"""The ``rapid-sgl`` command. Each subcommand is a module with ``main(argv) -> exit status``,
imported only when it is the one that was asked for, so that ``--help`` is instant."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "ask": "answer a question about a document, drafted by retrieval (starts a server if needed)",
    "serve": "start an SGLang server with RAPID decoding; takes every SGLang flag",
    "index": "embed documents once and keep them in a Chroma store",
    "search": "find passages of indexed documents",
    "recall": "measure what each scorer retrieves, and how fast",
    "top": "watch what a running server drafts, live",
    "bench": "compare decoding methods on one running server",
    "eval": "score decoding methods on RULER, InfiniteBench and LongBench",
    "model": "prepare the embedded model and print its path",
    "doctor": "check versions, plugin, platform and model; say what to fix",
}

USAGE = """usage: rapid-sgl COMMAND [options]

Retrieval-augmented speculative decoding (RAPID) for SGLang.

commands:
{commands}

examples:
  rapid-sgl ask report.pdf -q "What did the auditors object to?"
  rapid-sgl serve --model-path Qwen/Qwen2.5-7B-Instruct --port 30000
  rapid-sgl doctor

`rapid-sgl COMMAND --help` explains a command with an example."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status (2 for a wrong command line, 130 for Ctrl-C)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] in ([], ["-h"], ["--help"], ["help"]):
        print(USAGE.format(commands="\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())))
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"rapid-sgl {version('rapid-sgl')}")
        return 0
    if args[0] not in COMMANDS:
        print(f"rapid-sgl: unknown command {args[0]!r}; use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"rapid_sgl.cli.{args[0]}")
    try:
        return int(command.main(args[1:]))
    except KeyboardInterrupt:
        return 130  # the shell's status for a command ended by Ctrl-C
