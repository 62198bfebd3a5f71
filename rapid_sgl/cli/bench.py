"""``rapid-sgl bench``: decoding methods side by side on one server; ``bench steps``: its forward passes."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapid_sgl.bench import DRAFTING, METHODS
from rapid_sgl.cli import options
from rapid_sgl.cli.numbers import at_least, int_list, name_list
from rapid_sgl.config import DRAFTER_WEIGHTS, RapidConfig, RapidOptionError

if TYPE_CHECKING:
    from rapid_sgl.bench.runner import Side, Sizes
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.http_client import ServerInfo

DESCRIPTION = """\
Compare decoding methods on one server, by request option, so that both sides share weights and
prefix cache. Starts a server of its own and stops it afterwards, or uses --server; nobody else
should use the server or the machine meanwhile. `rapid-sgl bench steps` times the forward passes
alone, without a server.

methods:
  target        the full context, no drafts (rapid_drafter=off)
  view          drafts from a view of the target's own KV cache, verified by the target
  rag           drafts from a re-encoded short prompt: head, spans and recent window
  torch_native  no drafts, on a second server with SGLang's own torch_native attention; slow

examples:
  rapid-sgl bench
  rapid-sgl bench --contexts 3500 --batch 8 --draft-length 6 --server http://127.0.0.1:30000
  rapid-sgl bench --methods target,view,rag --drafter-weights same,int8
  rapid-sgl bench --contexts 16000 --repeats 3 --model-path Qwen/Qwen2.5-7B-Instruct -- --dtype bfloat16
  rapid-sgl bench --json | tail -1 | jq '.rows[] | [.method, .context, .speedup_vs_target]'

Every cell (context x batch) is warmed up, so its prompts lie in the prefix cache, then measured
--repeats times with the methods taking turns; the report shows medians. Prompts are different
parts of Python's language reference under the model's chat template, other ones in each repeat. A table goes to stdout and,
last, one JSON line {"environment": ..., "rows": [...]} with one row per method and cell:

  ms_per_token       decode time per token of one request, prefill left out. Measured from the moment
                     when the whole batch has first tokens until one request has --new-tokens; each
                     request counts from its first to its last stream event in between, and the times
                     of all requests are divided by all their tokens
  accept_length      tokens committed per request and step, the target's own token included
  accept_rate        accepted drafts / proposed drafts
  draft_ms           all draft passes of a step; 0 where the prompt fits the budget and nothing is drafted
  verify_ms          the target's pass of a step
  step_ms            a whole step; outside_share is the part of it that is neither draft nor verify
  decode_ms          a whole step of method target in the same cell: one token per request
  predicted_speedup  accept_length * decode_ms / (draft_ms + verify_ms)
  speedup_vs_target  ms_per_token of target / ms_per_token; measured_over_predicted compares the two
  *_range            smallest and largest over the repeats (speedup_range: of pairs in one repeat)
  ttft_ms            request sent to first token, prompt cached; mean over the batch. ttft_over_target
                     compares it with method target
  drafter_weights    what drafts ran on: the served weights (same), a quantised twin, or the draft model's name
  cached_share       part of the prompt tokens that came from the prefix cache
  mean_batch         requests per step; other than batch when they did not all run together, or when
                     somebody else used the server
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when the measurement failed, 2 on a wrong command line."""
    if list(argv[:1]) == ["steps"]:
        from rapid_sgl.cli import bench_steps

        return bench_steps.main(argv[1:])
    parser = _parser()
    args, server_args = _parse(parser, list(argv))
    # A terminated bench must still stop its servers, which only an exception does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    from rapid_sgl.bench import BenchError
    from rapid_sgl.cli.asking import AskError
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.http_client import ServerError
    from rapid_sgl.models import ModelError
    from rapid_sgl.retrieval.chunking import TokenizerError

    try:
        with Status("preparing") as status:
            report = _measure(args, server_args, status)
    except (AskError, BenchError, ModelError, RapidOptionError, ServerError, TokenizerError) as error:
        print(f"rapid-sgl bench: {error}", file=sys.stderr)
        return 1
    if not args.json:
        from rapid_sgl.bench.table import print_rows

        print_rows(report["rows"])
    print(json.dumps(report))
    return 0


def _measure(args: argparse.Namespace, server_args: Sequence[str], status: Status) -> dict[str, Any]:
    from rapid_sgl.bench.servers import draft_model_side, torch_native_side
    from rapid_sgl.bench.session import measure
    from rapid_sgl.cli.asking import load_builder

    given = options.given_rapid_options(args)
    with contextlib.ExitStack() as servers:
        url, info = servers.enter_context(_server(args, given, server_args, status))
        sizes = _sizes(args, info, given)
        builder = load_builder(args.model_path or info.tokenizer_path)
        sides = []
        for method in args.methods:
            if method == "torch_native":
                sides.append(torch_native_side(servers, args, info, sizes, status.update))
                continue
            for weights in args.drafter_weights if method in DRAFTING else ["same"]:
                sides.append(_side(method, url, sizes, weights))
        if args.draft_model:
            sides.append(draft_model_side(servers, args, given, sizes, status.update))
        return measure(
            sides, builder, args.contexts, args.batch, sizes, repeats=args.repeats, update=status.update
        )


def _sizes(args: argparse.Namespace, info: ServerInfo, given: dict[str, Any]) -> Sizes:
    from rapid_sgl.bench.runner import Sizes
    from rapid_sgl.bench.session import drafting_config

    # Without drafts no option of RAPID matters, and any SGLang server will do.
    drafting = any(method in DRAFTING for method in args.methods)
    config = drafting_config(info, given) if drafting else RapidConfig()
    return Sizes(args.new_tokens, args.temperature, config)


def _side(method: str, url: str, sizes: Sizes, weights: str = "same") -> Side:
    from rapid_sgl.bench.runner import Side, new_client

    return Side(method, url, new_client(url).info(), sizes, weights)


@contextlib.contextmanager
def _server(
    args: argparse.Namespace, given: dict[str, Any], server_args: Sequence[str], status: Status
) -> Iterator[tuple[str, ServerInfo]]:
    """Address of the named server, or of one that lives as long as the block, and what it says of itself."""
    from rapid_sgl.bench.runner import new_client
    from rapid_sgl.client import Server
    from rapid_sgl.models import embedded_model_path

    if args.server:
        yield args.server, new_client(args.server).info()
        return
    if not args.model_path:
        embedded_model_path(status.update)
    model = ["--model-path", args.model_path] if args.model_path else []
    status.update("starting the server")
    with tempfile.TemporaryDirectory(prefix="rapid-sgl-") as folder:
        twin = [f"--rapid-drafter-weights={name}" for name in args.drafter_weights if name != "same"]
        flags = [*model, *options.rapid_flags(given), *twin, *server_args]
        with Server.start(flags, log_path=Path(folder) / "server.log") as server:
            yield server.url, server.client.info()
            status.update("stopping the server")


def _parse(parser: options.Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The parsed command line and what follows ``--``."""
    own, server_args = options.split_server_args(argv)
    args, extra = parser.parse_known_args(own)
    options.refuse_unknown_rapid_flags(parser, extra)
    if extra:
        parser.error(f"unknown option {extra[0]}; flags for the server go behind `--`")
    if args.server and server_args:
        parser.error("flags behind `--` are for a server that bench starts; leave out --server or the flags")
    if args.rapid_drafter is not None:
        parser.error("--rapid-drafter has no effect here; --methods says which drafters are compared")
    if args.rapid_drafter_weights is not None:
        parser.error("--rapid-drafter-weights has no effect here; use --drafter-weights")
    if len(set(args.drafter_weights) - {"same"}) > 1:
        parser.error("--drafter-weights takes one twin besides same: a server holds one")
    if args.temperature < 0:
        parser.error(f"--temperature {args.temperature:g} is negative; use 0 (greedy) or more")
    try:
        options.rapid_config(options.given_rapid_options(args))
    except RapidOptionError as error:
        parser.error(str(error))
    return args, server_args


def _parser() -> options.Parser:
    parser = options.Parser(
        prog="rapid-sgl bench",
        usage="rapid-sgl bench [options] [-- server flags]\n       rapid-sgl bench steps --help",
        description=DESCRIPTION,
    )
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
        help="measure rag on a second server too, with this model (folder or hub id) as its draft model",
    )
    add("--new-tokens", type=at_least(2), default=64, metavar="N", help="tokens per answer (default: 64)")
    add("--repeats", type=at_least(1), default=5, metavar="N", help="measured runs per method (default: 5)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--server", metavar="URL", help="use this running SGLang server (key: OPENAI_API_KEY)")
    add(
        "--model-path",
        metavar="MODEL",
        help="model to serve (default: the embedded one); with --server: where to load its tokenizer from",
    )
    add("--json", action="store_true", help="print the JSON line only")
    options.add_rapid_flags(parser)
    add(
        "--draft-length",
        dest="rapid_draft_length",
        type=int,
        metavar="N",
        help="same as --rapid-draft-length",
    )
    return parser
