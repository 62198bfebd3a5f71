"""``rapid-sgl bench``: decoding methods side by side on one server; ``bench steps``: its forward passes."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rapid_sgl.bench import DRAFTING, OWN_SERVER
from rapid_sgl.cli import bench_options, options
from rapid_sgl.cli.serving import command_server
from rapid_sgl.config import RapidOptionError

if TYPE_CHECKING:
    from rapid_sgl.bench.limits import Sizes
    from rapid_sgl.bench.runner import Side
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.http_client import ServerInfo

# SGLang keeps a few positions of the context for itself and for drafts under way.
POSITIONS_IN_RESERVE = 64


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when the measurement failed, 2 on a wrong command line."""
    if list(argv[:1]) == ["steps"]:
        from rapid_sgl.cli import bench_steps

        return bench_steps.main(argv[1:])
    args, server_args = bench_options.parse(list(argv))
    # A terminated bench must still stop its servers, which only an exception does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    from rapid_sgl.bench import BenchError
    from rapid_sgl.cli.asking import AskError
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.http_client import ServerError
    from rapid_sgl.models import ModelError
    from rapid_sgl.retrieval.chunking import TokenizerError
    from rapid_sgl.retrieval.embedding import EmbeddingError

    expected = (
        AskError,
        BenchError,
        EmbeddingError,
        ModelError,
        RapidOptionError,
        ServerError,
        TokenizerError,
    )
    try:
        with Status("preparing") as status:
            report = _measure(args, server_args, status)
    except expected as error:
        print(f"rapid-sgl bench: {error}", file=sys.stderr)
        return 1
    if not args.json:
        from rapid_sgl.bench.table import print_rows

        print_rows(report["rows"])
    print(json.dumps(report))
    return 0


def _measure(args: argparse.Namespace, server_args: Sequence[str], status: Status) -> dict[str, Any]:
    from rapid_sgl.bench.plots import check_matplotlib, save_plots
    from rapid_sgl.bench.servers import OwnServers, override_flags, rope_scaling
    from rapid_sgl.bench.session import Axes, Measurement, shared_sides
    from rapid_sgl.cli.asking import load_builder

    if args.plots:
        check_matplotlib()
    given = options.given_rapid_options(args)
    if any("draft_length" in form for form in args.vary):
        config = options.rapid_config(given)
        given.setdefault(
            "max_draft_length", max(replace(config, **form).reserved_length for form in args.vary)
        )
    with contextlib.ExitStack() as servers:
        override = rope_scaling(args, _longest(args, given)) if not args.server else None
        twin = [f"--rapid-drafter-weights={name}" for name in args.drafter_weights if name != "same"]
        flags = [*options.rapid_flags(given), *twin, *override_flags(override), *server_args]
        client = servers.enter_context(command_server(args, flags, status.update))
        url, info = client.url, client.info()
        sizes = _sizes(args, info, given)
        builder = load_builder(args.model_path or info.tokenizer_path)
        own = OwnServers(servers, args, info, sizes, override, status.update)
        forms = {"weights": args.drafter_weights, "retrievals": args.retrieval, "variants": args.vary}
        sides: list[Side] = []
        for method in args.methods:
            if method in OWN_SERVER:
                sides.append(own.side(method))
            else:
                sides += shared_sides(method, url, info, sizes, **forms)
        if args.draft_model and "standalone" not in args.methods:
            sides.append(own.draft_model_side(given))
        axes = Axes(args.contexts, args.batch, args.repeats, args.workload, args.temperature, args.keep_cache)
        report = Measurement(sides, builder, axes, status.update).report(
            {"rope_scaling": override["rope_parameters"]} if override else None
        )
    if args.plots:
        for path in save_plots(report, args.plots):
            status.update(f"wrote {path}")
    return report


def _longest(args: argparse.Namespace, given: dict[str, Any]) -> int:
    """Positions that the longest prompt and its answer take; the server keeps some in reserve."""
    from rapid_sgl.bench.limits import Sizes

    sizes = Sizes(args.new_tokens, options.rapid_config(given))
    return max(args.contexts) + sizes.max_new_tokens("view") + POSITIONS_IN_RESERVE


def _sizes(args: argparse.Namespace, info: ServerInfo, given: dict[str, Any]) -> Sizes:
    from rapid_sgl.bench.limits import Sizes
    from rapid_sgl.bench.session import drafting_config

    # Without drafts only the budget of rag-only matters, and any SGLang server will do.
    drafting = any(method in DRAFTING for method in args.methods)
    config = drafting_config(info, given) if drafting else options.rapid_config(given)
    return Sizes(args.new_tokens, config)
