"""``rapid-sgl eval``: long-context quality suites, decoding methods side by side."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapid_sgl.cli import options
from rapid_sgl.cli.numbers import at_least, int_list
from rapid_sgl.cli.serving import command_server
from rapid_sgl.config import RapidOptionError
from rapid_sgl.eval import SUITES, EvalError

if TYPE_CHECKING:
    from rapid_sgl.cli.eval_report import Bar
    from rapid_sgl.eval.session import Plan

DESCRIPTION = """\
Score decoding methods on RULER, InfiniteBench and LongBench, with the official prompts and scores.
Starts a server of its own and stops it afterwards, or uses --server; for speeds that mean something
nobody else should use the server or the machine meanwhile.

suites:
  ruler          13 tasks at any length; all but qa_1 and qa_2 are generated
  infinitebench  passkey, number_string and kv_retrieval are generated; book tasks from --data
  longbench      v1 and LongBench-E (names ending in _e), from --data
  longbench2     v2, from --data

methods:
  target         the long prompt, no drafts
  rag-only       a short prompt of --rapid-budget tokens with the retrieved chunks, no drafts
  view, rag      the long prompt, drafted by RAPID; the same answers as target's when greedy
  rag:distill:10, view:mixture:0.1, rag:logits:0.3
                 the same with a transfer and its weight (eta, lambda, lambda): other answers, on purpose

examples:
  rapid-sgl eval --suite ruler --tasks niah_single_2,vt --lengths 2048,4096 --samples 50 --methods target,view
  rapid-sgl eval --suite ruler --methods target,rag-only,view,rag:distill:5,rag:distill:20 --output runs/sweep
  rapid-sgl eval --suite longbench --data ~/LongBench/data --tasks hotpotqa,qasper --server http://127.0.0.1:30000
  rapid-sgl eval --suite infinitebench --lengths 8000 --json | tail -1 | jq '.rows[] | [.task, .method, .score]'

The table and, last, one JSON line {"suite": ..., "rows": [...]} go to stdout. Every answer is kept in
OUTPUT/predictions.jsonl; the same command goes on where a killed run stopped, and more tasks, lengths,
samples or methods may be asked for in the same folder. docs/eval.md has tasks, files and definitions.

  score          percent, with a 95 % interval (Wilson for right or wrong, else bootstrap)
  to target      difference to long context over the same samples, with a paired bootstrap interval
  changed        answers whose text is not the target's
  ms/token       decode time from an answer's first event to its last, by the tokens in between
  speedup        ms/token of target / ms/token
  accept         tokens committed per target pass, the target's own token included
"""
# Same as retrieval.pipeline.SCORERS, which is not imported to keep --help instant (a test compares).
SCORERS = ("bm25", "dense", "hybrid")
# What a method says itself.
OF_METHODS = ("drafter", "transfer", "lam", "eta", "preset")


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when the evaluation failed, 2 on a wrong command line."""
    parser = _parser()
    args, server_args = _parse(parser, list(argv))
    given = options.given_rapid_options(args)
    # A terminated eval must still stop its server, which only an exception does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    from rapid_sgl.bench import BenchError
    from rapid_sgl.cli.asking import AskError
    from rapid_sgl.cli.eval_report import Bar, print_report
    from rapid_sgl.eval.session import SUITE_TYPES, choose_tasks
    from rapid_sgl.http_client import ServerError
    from rapid_sgl.models import ModelError
    from rapid_sgl.retrieval.chunking import TokenizerError
    from rapid_sgl.retrieval.embedding import EmbeddingError

    failures = (AskError, BenchError, EmbeddingError, EvalError, ModelError, RapidOptionError, ServerError)
    try:
        plan = _plan(args, given)
        choose_tasks(SUITE_TYPES[plan.suite](), plan.tasks)  # before a server is started for it
        with Bar() as bar:
            report = _run(plan, args, given, server_args, bar)
    except (*failures, TokenizerError) as error:
        print(f"rapid-sgl eval: {error}", file=sys.stderr)
        return 1
    if not args.json:
        print_report(report)
    print(json.dumps(report, ensure_ascii=False))
    return 0


def _run(
    plan: Plan, args: argparse.Namespace, given: dict[str, Any], server_args: Sequence[str], bar: Bar
) -> dict[str, Any]:
    from rapid_sgl.cli.asking import load_builder
    from rapid_sgl.eval.session import evaluate

    with command_server(args, [*options.rapid_flags(given), *server_args], bar.update) as client:
        info = client.info()
        tokenizer = load_builder(args.model_path or info.tokenizer_path).tokenizer
        return evaluate(plan, client.url, info, tokenizer, bar.update, bar.started, bar.advance)


def _plan(args: argparse.Namespace, given: dict[str, Any]) -> Plan:
    from rapid_sgl.eval.methods import parse_methods
    from rapid_sgl.eval.session import Plan

    return Plan(
        suite=args.suite,
        tasks=tuple(args.tasks.split(",")) if args.tasks else (),
        lengths=tuple(args.lengths),
        samples=args.samples,
        methods=tuple(parse_methods(args.methods)),
        output=args.output or Path(f"rapid-eval-{args.suite}"),
        data=args.data,
        haystack=args.haystack,
        seed=args.seed,
        chat=None if args.template is None else args.template == "chat",
        temperature=args.temperature,
        max_prompt=args.max_prompt,
        scorer=args.scorer,
        concurrency=args.concurrency,
        rapid=given,
    )


def _parse(parser: options.Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The parsed command line and what follows ``--``."""
    args, server_args = options.parse_with_server_args(parser, argv, "eval")
    for name in OF_METHODS:
        if getattr(args, f"rapid_{name}") is not None:
            flag = "--rapid-lambda" if name == "lam" else f"--rapid-{name}"
            parser.error(f"{flag} has no effect here; --methods says it, for example rag:distill:10")
    if args.temperature is not None and args.temperature < 0:
        parser.error(f"--temperature {args.temperature:g} is negative; use 0 (greedy) or more")
    for flag, path in (("--data", args.data), ("--haystack", args.haystack)):
        if path is not None and not path.exists():
            parser.error(f"{flag} {path} does not exist")
    try:
        options.rapid_config(options.given_rapid_options(args))
    except RapidOptionError as error:
        parser.error(str(error))
    return args, server_args


def _parser() -> options.Parser:
    parser = options.Parser(
        prog="rapid-sgl eval",
        usage="rapid-sgl eval --suite SUITE [options] [-- server flags]",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("--suite", required=True, choices=SUITES)
    add("--tasks", metavar="T,T", help="(default: all that need no data, or all)")
    add(
        "--lengths",
        type=int_list,
        default=[4096],
        metavar="N,N",
        help="tokens of prompt and answer, for generated tasks (default: 4096)",
    )
    add("--samples", type=at_least(1), default=50, metavar="N", help="per task and length (default: 50)")
    add(
        "--methods",
        default="target,rag-only,view,rag:distill:10",
        metavar="M,M",
        help="(default: %(default)s)",
    )
    add("--output", type=Path, metavar="DIR", help="where answers are kept (default: rapid-eval-SUITE)")
    add("--data", type=Path, metavar="PATH", help="file, or folder with files, of the official data")
    add(
        "--haystack",
        type=Path,
        metavar="FILE",
        help="ruler: essay text (default: CPython's language reference)",
    )
    add("--template", choices=["chat", "plain"], help="(default: chat, where the model has a chat template)")
    add("--temperature", type=float, metavar="T", help="(default: the suite's, 0 but for longbench2: 0.1)")
    add(
        "--max-prompt",
        type=at_least(16),
        metavar="N",
        help="cut longer prompts in the middle (default: server's limit)",
    )
    add(
        "--seed",
        type=int,
        default=42,
        metavar="N",
        help="of generated samples and sampled answers (default: 42)",
    )
    add("--concurrency", type=at_least(1), default=1, metavar="N", help="requests at once (default: 1)")
    add("--scorer", choices=SCORERS, default="bm25", help="what chunks are retrieved by (default: bm25)")
    add("--server", metavar="URL", help="use this running SGLang server (key: OPENAI_API_KEY)")
    add(
        "--model-path",
        metavar="MODEL",
        help="model to serve (default: the embedded one); with --server: where to load its tokenizer from",
    )
    add("--json", action="store_true", help="print the JSON line only")
    options.add_rapid_flags(parser)
    return parser
