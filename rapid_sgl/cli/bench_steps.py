"""``rapid-sgl bench steps``: how long the forward passes take that a decode step is made of."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rapid_sgl.cli import options, serve
from rapid_sgl.cli.numbers import at_least, int_list

if TYPE_CHECKING:
    from rapid_sgl.cli.progress import Status

DESCRIPTION = """\
Time the forward passes that decoding is made of, with the model, attention backend, KV pool and
threads that `rapid-sgl serve` would use, in a process like a server's, but without requests. The
passes take turns in every repeat; the report shows medians.

  decode_ms        one new token over n cached ones, by SGLang's decode mode
  decode_eager_ms  the same without replay from tape (portable CPU platform only)
  extend1_ms       one new token by extension of n cached ones, as a cached prompt takes it
  verify1_ms       a verify pass without drafts, as a RAPID server runs it for an undrafted request
  verify5_ms       a verify pass of five tokens: the last committed one and four drafts
  linears_ms       the bare linear layers and the head of the model, on 1 and on 5 rows

examples:
  rapid-sgl bench steps
  rapid-sgl bench steps --contexts 128,1024,16000 --repeats 9 -- --dtype bfloat16
  rapid-sgl bench steps --json | jq .ratios

A table goes to stdout and, last, one JSON line: for each pass its medians by size, the ratios that
show what a pass costs beside a decode step, and range_ms, smallest and largest.
Flags behind `--` are those of `rapid-sgl serve`.
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when the measurement failed, 2 on a wrong command line."""
    args, server_args = _parse(_parser(), list(argv))
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.models import ModelError

    try:
        with Status("preparing") as status:
            from rapid_sgl.bench import BenchError

            report = _measure(args, server_args, status)
    except (BenchError, ModelError) as error:
        print(f"rapid-sgl bench steps: {error}", file=sys.stderr)
        return 1
    if not args.json:
        from rapid_sgl.bench.table import print_steps

        print_steps(report)
    print(json.dumps(report))
    return 0


def _measure(args: argparse.Namespace, server_args: Sequence[str], status: Status) -> dict[str, Any]:
    if not serve.has_model(server_args):
        from rapid_sgl.models import embedded_model_path

        embedded_model_path(status.update)
    command, env = serve.plan(server_args)
    os.environ.update(env)  # before SGLang and transformers are imported: they read it once
    status.update("loading the model")
    from rapid_sgl.bench.process import measure_steps_in_child

    launch = command[command.index("sglang.launch_server") + 1 :]
    if not options.has_flag(launch, "--log-level"):
        launch += ["--log-level", "error"]
    report = measure_steps_in_child(launch, args.contexts, args.repeats, status.update)
    report["environment"]["flags"] = server_args
    return report


def _parse(parser: options.Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The parsed command line and what follows ``--``, refused here if `rapid-sgl serve` would refuse it."""
    own, server_args = options.split_server_args(argv)
    args, extra = parser.parse_known_args(own)
    if extra:
        parser.error(f"unknown option {extra[0]}; flags for the server go behind `--`")
    serve.plan(server_args)
    return args, server_args


def _parser() -> options.Parser:
    parser = options.Parser(
        prog="rapid-sgl bench steps",
        usage="rapid-sgl bench steps [options] [-- server flags]",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "--contexts", type=int_list, default=[128, 1024, 7000], metavar="N,N", help="(default: 128,1024,7000)"
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=15, metavar="N", help="timed rounds (default: 15)"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    return parser
