"""``rapid-sgl ask``: answer a question about documents, drafted from the parts that matter."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rapid_sgl.cli import options
from rapid_sgl.cli.serving import command_server
from rapid_sgl.config import RapidOptionError

if TYPE_CHECKING:
    from rapid_sgl.cli.asking import Question
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.client import Client

DESCRIPTION = """\
Answer a question about one or more documents (text, Markdown, PDF). The whole document is
the prompt; retrieval finds the parts of it that the drafter looks at. Starts a server of its own
and stops it afterwards, or uses a running one with --server.

examples:
  rapid-sgl ask report.pdf -q "What did the auditors object to?"
  rapid-sgl ask notes.md log.txt -q "When did the disk fail?" --server http://127.0.0.1:30000
  rapid-sgl ask report.pdf -q "Who signed it?" --method target --json
  rapid-sgl ask report.pdf -q "Who signed it?" -- --mem-fraction-static 0.5

What follows `--` goes to the server that ask starts (see `rapid-sgl serve --help`).
"""
# Same as retrieval.pipeline.SCORERS, which is not imported to keep --help instant (a test compares).
SCORERS = ("bm25", "dense", "hybrid")
METHODS = {
    "rapid": "the whole document is the prompt, drafted from retrieved parts",
    "target": "the whole document is the prompt, no drafts",
    "rag": "only the retrieved parts are the prompt, no drafts",
}


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when the question could not be answered, 2 on a wrong command line."""
    parser = _parser()
    args, server_args = _parse(parser, list(argv))
    given = options.given_rapid_options(args)
    try:
        config = options.rapid_config(given)
    except RapidOptionError as error:
        parser.error(str(error))
    # A terminated ask must still stop its server, which only an exception does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    from rapid_sgl.cli.asking import AskError, Question, read_documents
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.client import ServerError
    from rapid_sgl.models import ModelError
    from rapid_sgl.retrieval.chunking import TokenizerError
    from rapid_sgl.retrieval.documents import DocumentError
    from rapid_sgl.retrieval.embedding import EmbeddingError
    from rapid_sgl.retrieval.pipeline import RetrievalOptions
    from rapid_sgl.retrieval.prompt import PromptTooLong
    from rapid_sgl.retrieval.store import StoreError

    failures = (
        AskError,
        DocumentError,
        EmbeddingError,
        ModelError,
        PromptTooLong,
        ServerError,
        StoreError,
        TokenizerError,
    )

    try:
        question = Question(
            document=read_documents(args.files, args.python_topic),
            text=args.question,
            method=args.method,
            max_new_tokens=args.max_new_tokens,
            truncate_middle=args.truncate == "middle",
            config=config,
            rapid=given,
            retrieval=RetrievalOptions(args.scorer, store=args.store),
        )
        flags = [*options.rapid_flags(given), *server_args]
        with Status("preparing") as status, command_server(args, flags, status.update) as client:
            _answer(question, args, client, status)
    except failures as error:
        print(f"rapid-sgl ask: {error}", file=sys.stderr)
        return 1
    return 0


def _answer(question: Question, args: argparse.Namespace, client: Client, status: Status) -> None:
    """Ask, stream the answer, print the summary."""
    from rapid_sgl.cli.asking import load_builder, make_plan
    from rapid_sgl.cli.report import Report

    status.update("reading the document")
    info = client.info()
    plan = make_plan(question, load_builder(args.model_path or info.tokenizer_path), info)
    for note in Report.notes_before(question, plan, info):
        print(f"note: {note}", file=sys.stderr)
    status.update(f"prefilling {len(plan.ids):,} tokens")

    def show(text: str) -> None:
        status.stop()
        sys.stdout.write(text)
        sys.stdout.flush()

    completion = client.complete(
        on_text=None if args.json else show,
        incremental=info.incremental_stream,
        input_ids=plan.ids,
        sampling_params={
            "temperature": args.temperature,
            "max_new_tokens": args.max_new_tokens,
            "custom_params": plan.custom_params,
        },
    )
    status.stop()
    report = Report(question, plan, info, completion)
    print(json.dumps(report.as_json(), ensure_ascii=False) if args.json else f"\n\n{report.as_text()}")


def _parse(parser: options.Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The parsed command line and what follows ``--``."""
    args, server_args = options.parse_with_server_args(parser, argv, "ask")
    if not args.files and not args.python_topic:
        parser.error("name at least one FILE")
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {args.max_new_tokens} is too small; use 1 or more")
    if args.temperature < 0:
        parser.error(f"--temperature {args.temperature:g} is negative; use 0 (greedy) or more")
    return args, server_args


def _parser() -> options.Parser:
    parser = options.Parser(
        prog="rapid-sgl ask",
        usage="rapid-sgl ask FILE... -q QUESTION [options] [-- server flags]",
        description=DESCRIPTION,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="a document: text, Markdown or PDF")
    parser.add_argument("-q", "--question", required=True, help="what to ask")
    parser.add_argument(
        "--server", metavar="URL", help="use this running SGLang server (key: OPENAI_API_KEY)"
    )
    parser.add_argument(
        "--model-path",
        metavar="MODEL",
        help="model to serve (default: the embedded one); with --server: where to load its tokenizer from",
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="rapid",
        help="; ".join(f"{name}: {text}" for name, text in METHODS.items()) + " (default: rapid)",
    )
    parser.add_argument(
        "--scorer",
        choices=SCORERS,
        default="bm25",
        help="what finds the parts: words, embeddings, or both (default: bm25)",
    )
    parser.add_argument(
        "--store",
        metavar="PLACE",
        help="keep embeddings in this folder or Chroma server (default: in memory only)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="(default: 256)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    parser.add_argument(
        "--truncate", choices=["middle"], help="cut the middle out of a document that is too long"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    parser.add_argument(
        "--python-topic",
        action="append",
        default=[],
        metavar="NAME",
        help="a section of Python's own language reference as a document, for example string-methods",
    )
    options.add_rapid_flags(parser)
    return parser
