"""The command line of ``rapid-sgl bench``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

from rapid_sgl.bench import METHODS, RETRIEVALS, WORKLOADS
from rapid_sgl.cli import options
from rapid_sgl.cli.numbers import at_least, int_list, name_list
from rapid_sgl.config import AUTO, DRAFTER_WEIGHTS, RapidConfig, RapidOptionError, parse_text, public_name

DESCRIPTION = """\
Compare decoding methods: most of them on one server, by request option, so that they share weights
and prefix cache. Starts servers of its own and stops them afterwards, or uses --server; nobody else
should use the server or the machine meanwhile. `rapid-sgl bench steps` times the forward passes
alone, without a server. docs/benchmark.md says more.

methods:
  target        the full context, no drafts (rapid_drafter=off)
  rag-only      plain RAG: the answer from a short prompt of --rapid-budget tokens, no target
  view          drafts from a view of the target's own KV cache, verified by the target
  recent        the same without spans: head and recent window, as MagicDec drafts
  rag           drafts from a re-encoded short prompt: head, spans and recent window
  copy          drafts copied from the prompt and the answer, no draft passes
  ngram         SGLang's NGRAM, on a server of its own
  standalone    SGLang's STANDALONE, on a server of its own; drafts with --draft-model, else with the
                served model
  torch_native  no drafts, on a server of its own with SGLang's torch_native attention; slow

examples:
  rapid-sgl bench
  rapid-sgl bench --contexts 3500 --batch 8 --draft-length 6 --server http://127.0.0.1:30000
  rapid-sgl bench --methods target,view,rag --drafter-weights same,int8
  rapid-sgl bench --workload quote,rewrite --methods target,view,copy,ngram --plots charts
  rapid-sgl bench --methods target,view --vary draft-length=2,4,8 --vary budget=512,1024
  rapid-sgl bench --methods target,view,rag-only --workload extract --retrieval oracle,hybrid,random
  rapid-sgl bench --contexts 16000 --repeats 3 --model-path Qwen/Qwen2.5-7B-Instruct -- --dtype bfloat16
  rapid-sgl bench --json | tail -1 | jq '.rows[] | [.method, .context, .speedup_vs_target]'

Every cell (workload x temperature x context x batch) is warmed up, so its prompts lie in the prefix
cache, then measured --repeats times with the methods taking turns; the report shows medians.
Prompts are different parts of Python's language reference under the model's chat template, other
ones in each repeat. Contexts beyond the embedded model's 8192 positions stretch its rotary
embedding; the report says so (rope_scaling). A table goes to stdout and, last, one JSON line
{"environment": ..., "rows": [...]} with one row per method and cell:

  ms_per_token       decode time per token of one request, prefill left out. Measured from the moment
                     when the whole batch has first tokens until one request has --new-tokens; each
                     request counts from its first to its last stream event in between, and the times
                     of all requests are divided by all their tokens
  tokens_per_s       of the whole batch: batch / ms_per_token
  inter_token_p50_ms, inter_token_p99_ms
                     over all tokens of all repeats; an event of k tokens counts k times with a k-th
                     of its wait
  accept_length      tokens committed per request and step, the target's own token included
  accept_rate        accepted drafts / proposed drafts
  accept_by_position of the drafts reached at each place of a chain, the share that was kept
  copied_share       of the proposed drafts, those that were copied
  draft_ms           all draft passes of a step; 0 where nothing is drafted
  verify_ms          the target's pass of a step
  step_ms            a whole step; outside_share is the part of it that is neither draft nor verify
  decode_ms          a whole step of method target in the same cell: one token per request
  predicted_speedup  accept_length * decode_ms / (draft_ms + verify_ms)
  speedup_vs_target  ms_per_token of target / ms_per_token; measured_over_predicted compares the two
  *_range            smallest and largest over the repeats (speedup_range: of pairs in one repeat)
  ttft_ms            request sent to first token, prompt cached; mean over the batch. ttft_over_target
                     compares it with method target
  cold_ttft_ms       the same with nothing cached, measured once per cell and server
  retrieval_ms       choosing the spans of a document that was not seen before
  end_to_end_ms      retrieval_ms + cold_ttft_ms + the rest of --new-tokens at ms_per_token
  kv_mb              KV memory of the cell, from the model's shape: prompts, answers, reserved slots,
                     and what drafts hold besides
  drafter_weights    what drafts ran on: the served weights (same), a quantised twin, or the draft model's name
  workload, temperature, retrieval, draft_length, budget, varied, new_tokens
                     what the row was measured with; varied has the values of --vary
  cached_share       part of the prompt tokens that came from the prefix cache
  mean_batch         requests per step; other than batch when they did not all run together, or when
                     somebody else used the server
"""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The parsed command line and what follows ``--``; ends the program with one line where it is wrong."""
    parser = _parser()
    args, server_args = options.parse_with_server_args(parser, argv, "bench")
    if args.rapid_drafter is not None:
        parser.error("--rapid-drafter has no effect here; --methods says which drafters are compared")
    if args.rapid_drafter_weights is not None:
        parser.error("--rapid-drafter-weights has no effect here; use --drafter-weights")
    if len(set(args.drafter_weights) - {"same"}) > 1:
        parser.error("--drafter-weights takes one twin besides same: a server holds one")
    for temperature in args.temperature:
        if temperature < 0:
            parser.error(f"--temperature {temperature:g} is negative; use 0 (greedy) or more")
    if "oracle" in args.retrieval and "answer" in args.workload:
        parser.error(
            "--retrieval oracle needs a source that is known; use --workload quote, extract or rewrite"
        )
    try:
        config = options.rapid_config(options.given_rapid_options(args))
        args.vary = combinations(args.vary, config)
    except RapidOptionError as error:
        parser.error(str(error))
    return args, server_args


def variation(text: str) -> tuple[str, list[Any]]:
    """An argparse type: ``NAME=V,V``, a request option and the values that it takes in turn."""
    name, given, values = text.partition("=")
    known = {public_name(spec.name).replace("_", "-"): spec.name for spec in fields(RapidConfig)}
    fixed = {spec.name for spec in fields(RapidConfig) if not spec.metadata["per_request"]}
    name = known.get(name.removeprefix("rapid_").replace("_", "-"), "")
    if not given or not name or name in fixed or name in ("drafter", "drafter_weights"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a request option with its values; for example draft-length=2,4 or copy=on,off"
        )
    try:
        return name, [parse_text(name, value) for value in values.split(",")]
    except RapidOptionError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def combinations(varied: Sequence[tuple[str, list[Any]]], config: RapidConfig) -> list[dict[str, Any]]:
    """Every combination of the varied options; one without any where nothing varies.

    Raises:
        RapidOptionError: a combination is not a valid configuration.
    """
    names = [name for name, _ in varied]
    found = [dict(zip(names, values, strict=True)) for values in product(*(values for _, values in varied))]
    for form in found:
        replace(config, **form)
    return found


def float_list(text: str) -> list[float]:
    """An argparse type: numbers, separated by commas, without repetitions."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1") from None
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} has a number twice; leave one out")
    return values


def _parser() -> options.Parser:
    parser = options.Parser(
        prog="rapid-sgl bench",
        usage="rapid-sgl bench [options] [-- server flags]\n       rapid-sgl bench steps --help",
        description=DESCRIPTION,
    )
    _add_cells(parser)
    _add_methods(parser)
    _add_running(parser)
    options.add_rapid_flags(parser)
    parser.add_argument(
        "--draft-length",
        dest="rapid_draft_length",
        type=options.number_or(int, AUTO),
        metavar="N|auto",
        help="same as --rapid-draft-length",
    )
    return parser


def _add_cells(parser: options.Parser) -> None:
    """What makes a cell."""
    add = parser.add_argument
    add(
        "--contexts",
        type=int_list,
        default=[1000, 3500, 7000],
        metavar="N,N",
        help="(default: 1000,3500,7000)",
    )
    add("--batch", type=int_list, default=[1, 8], metavar="N,N", help="requests at once (default: 1,8)")
    add(
        "--temperature",
        type=float_list,
        default=[0.0],
        metavar="T,T",
        help="0 is greedy (default: 0)",
    )
    add(
        "--workload",
        type=name_list(WORKLOADS, "workload"),
        default=["answer"],
        metavar="W,W",
        help="what is asked for: an answer, or to quote, extract or rewrite a part of the text (default: answer)",
    )


def _add_methods(parser: options.Parser) -> None:
    """What is compared in a cell."""
    add = parser.add_argument
    add(
        "--methods",
        type=name_list(METHODS, "method"),
        default=["target", "view"],
        metavar="M,M",
        help="(default: target,view)",
    )
    add(
        "--drafter-weights",
        type=name_list(DRAFTER_WEIGHTS, "kind of weights"),
        default=["same"],
        metavar="W,W",
        help="what view and rag draft with, each measured: same and one of int8, fp8, int4 (default: same)",
    )
    add(
        "--draft-model",
        metavar="MODEL",
        help="measure rag on a second server too, with this model (folder or hub id) as its draft model; with "
        "method standalone it is that one's instead",
    )
    add(
        "--retrieval",
        type=name_list(RETRIEVALS, "kind of retrieval"),
        default=["bm25"],
        metavar="R,R",
        help="how the spans of view, rag and rag-only are chosen: oracle, random, or by bm25, dense or hybrid (default: bm25)",
    )
    add(
        "--vary",
        type=variation,
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="measure the drafting methods with each value of a request option; may be repeated",
    )


def _add_running(parser: options.Parser) -> None:
    """How it is measured, where, and what becomes of it."""
    add = parser.add_argument
    add("--new-tokens", type=at_least(2), default=64, metavar="N", help="tokens per answer (default: 64)")
    add("--repeats", type=at_least(1), default=5, metavar="N", help="measured runs per method (default: 5)")
    add(
        "--keep-cache",
        action="store_true",
        help="do not empty the prefix cache before each cell: many cells take less time, and those whose prompts "
        "were in others have no cold_ttft_ms and end_to_end_ms",
    )
    add(
        "--plots",
        metavar="DIR",
        help="save charts (PNG and SVG), table.md and report.json into this folder; needs matplotlib",
    )
    add("--server", metavar="URL", help="use this running SGLang server (key: OPENAI_API_KEY)")
    add(
        "--model-path",
        metavar="MODEL",
        help="model to serve (default: the embedded one); with --server: where to load its tokenizer from",
    )
    add("--json", action="store_true", help="print the JSON line only")
