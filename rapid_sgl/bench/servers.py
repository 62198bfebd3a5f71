"""Methods that need a server of their own beside the one that is measured."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.runner import Side, Sizes, kv_slots, new_client
from rapid_sgl.cli import options
from rapid_sgl.client import Server
from rapid_sgl.http_client import ServerInfo
from rapid_sgl.models import offline_env


def draft_model_side(
    servers: contextlib.ExitStack,
    args: argparse.Namespace,
    given: dict[str, Any],
    sizes: Sizes,
    update: Callable[[str], None],
) -> Side:
    """Method rag on a second server, whose drafts come from another model."""

    update(f"starting a server with draft model {args.draft_model}")
    folder = servers.enter_context(tempfile.TemporaryDirectory(prefix="rapid-sgl-"))
    pool = 5 * kv_slots("rag", max(args.contexts), max(args.batch), sizes) // 4
    flags = ["--model-path", args.model_path] if args.model_path else []
    flags += [*options.rapid_flags(given), f"--speculative-draft-model-path={args.draft_model}"]
    server = servers.enter_context(
        Server.start([*flags, f"--max-total-tokens={pool}"], log_path=Path(folder) / "server.log")
    )
    name = Path(args.draft_model).name
    return Side("rag", server.url, new_client(server.url).info(), sizes, draft_model=name)


def torch_native_side(
    servers: contextlib.ExitStack,
    args: argparse.Namespace,
    info: ServerInfo,
    sizes: Sizes,
    update: Callable[[str], None],
) -> Side:
    """A second server, of plain SGLang: same model and dtype, SGLang's portable attention."""

    update("starting a server with torch_native attention")
    folder = servers.enter_context(tempfile.TemporaryDirectory(prefix="rapid-sgl-"))
    # Just large enough, since the first server has already taken its share of the memory.
    pool = 5 * kv_slots("target", max(args.contexts), max(args.batch), sizes) // 4
    flags = ["--model-path", info.model_path, "--attention-backend", "torch_native"]
    flags += ["--dtype", info.raw["dtype"], "--max-total-tokens", str(pool)]
    server = servers.enter_context(
        Server.start(
            flags,
            offline_env(info.model_path),
            Path(folder) / "server.log",
            command=("-m", "sglang.launch_server"),
        )
    )
    side = Side("torch_native", server.url, new_client(server.url).info(), sizes)
    serving = side.info.raw.get("attention_backend")
    if serving != "torch_native":
        raise BenchError(
            f"the platform serves --attention-backend torch_native with {serving}, so it cannot be compared; "
            "leave torch_native out of --methods"
        )
    return side
