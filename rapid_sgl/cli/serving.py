"""The server of a command: the one that ``--server`` names, or one that lives as long as the command."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rapid_sgl.http_client import Client


@contextlib.contextmanager
def command_server(
    args: argparse.Namespace, flags: Sequence[str], update: Callable[[str], None]
) -> Iterator[Client]:
    """A client of the named server (key: OPENAI_API_KEY), or of one started for the block.

    Args:
        args: with ``server`` and ``model_path``, both may be None.
        flags: of ``rapid-sgl serve``, besides the model.
        update: told what runs now.

    Raises:
        ServerError: the server did not start; its last lines are in the text.
        ModelError: the embedded model cannot be prepared.
    """
    from rapid_sgl.client import Client, Server
    from rapid_sgl.models import embedded_model_path

    if args.server:
        yield Client(args.server, os.environ.get("OPENAI_API_KEY"))
        return
    if not args.model_path:
        embedded_model_path(update)
    model = ["--model-path", args.model_path] if args.model_path else []
    update("starting the server")
    with (
        tempfile.TemporaryDirectory(prefix="rapid-sgl-") as folder,
        Server.start([*model, *flags], log_path=Path(folder) / "server.log") as server,
    ):
        yield server.client
        update("stopping the server")
