"""The servers of a measurement: the one that most methods share, and those that a method needs for itself."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.limits import Sizes, kv_slots
from rapid_sgl.bench.runner import Side, new_client
from rapid_sgl.cli import options
from rapid_sgl.client import Server
from rapid_sgl.config import AUTO
from rapid_sgl.http_client import ServerInfo
from rapid_sgl.models import offline_env

RAPID_SERVER = ("-m", "rapid_sgl.cli", "serve")
PLAIN_SGLANG = ("-m", "sglang.launch_server")
# Drafts of SGLang's own algorithms, whose number is fixed, where RAPID's is not.
FIXED_DRAFTS = 4


class OwnServers:
    """Starts a server for each method that cannot share the first one; they stop when ``stack`` ends.

    Args:
        stack: keeps the servers and their logs.
        args: the command line of ``rapid-sgl bench``.
        first: what the shared server says of itself; the others serve the same model in the same type.
        override: of the model's configuration, as for the first server.
        update: told what runs now.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        args: argparse.Namespace,
        first: ServerInfo,
        sizes: Sizes,
        override: dict[str, Any] | None,
        update: Callable[[str], None],
    ) -> None:
        self._stack, self._args, self._first, self._sizes, self._update = stack, args, first, sizes, update
        self._override = override_flags(override)

    def side(self, method: str) -> Side:
        """``ngram``, ``standalone`` or ``torch_native``, on plain SGLang.

        Raises:
            BenchError: the platform serves another attention backend than asked for.
            ServerError: the server did not start; its last lines are in the text.
        """
        flags = getattr(self, f"_{method}")()
        flags += ["--model-path", self._first.model_path, "--dtype", self._first.raw["dtype"]]
        server = self._start(
            f"for {method}",
            flags,
            method,
            offline_env(self._first.model_path),
            PLAIN_SGLANG,
        )
        draft_model = None
        if method == "standalone":
            draft_model = Path(self._args.draft_model or self._first.model_path).name
        side = Side(method, server.url, new_client(server.url).info(), self._sizes, draft_model=draft_model)
        serving = side.info.raw.get("attention_backend")
        if method == "torch_native" and serving != method:
            raise BenchError(
                f"the platform serves --attention-backend torch_native with {serving}, so it cannot be compared; "
                "leave torch_native out of --methods"
            )
        return side

    def draft_model_side(self, given: dict[str, Any]) -> Side:
        """Method rag, whose drafts come from another model."""
        flags = ["--model-path", self._args.model_path] if self._args.model_path else []
        flags += [*options.rapid_flags(given), f"--speculative-draft-model-path={self._args.draft_model}"]
        server = self._start(f"with draft model {self._args.draft_model}", flags, "rag")
        name = Path(self._args.draft_model).name
        return Side("rag", server.url, new_client(server.url).info(), self._sizes, draft_model=name)

    def _start(
        self,
        what: str,
        flags: Sequence[str],
        method: str,
        env: dict[str, str] | None = None,
        command: Sequence[str] = RAPID_SERVER,
    ) -> Server:
        self._update(f"starting a server {what}")
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rapid-sgl-"))
        # Just large enough for the prompts of all repeats, since the first server has already taken its share of the memory.
        prompts = max(*self._args.batch, self._args.repeats)
        pool = 5 * kv_slots(method, max(self._args.contexts), prompts, self._sizes) // 4
        server = Server.start(
            [*flags, *self._override, f"--max-total-tokens={pool}"],
            env,
            Path(folder) / "server.log",
            command=command,
        )
        return self._stack.enter_context(server)

    def _torch_native(self) -> list[str]:
        return ["--attention-backend", "torch_native"]

    def _ngram(self) -> list[str]:
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(self._drafts() + 1)]

    def _standalone(self) -> list[str]:
        """A chain; without ``--draft-model`` the served model drafts for itself."""
        drafts = self._drafts()
        return [
            "--speculative-algorithm", "STANDALONE", "--speculative-eagle-topk", "1",
            "--speculative-draft-model-path", self._args.draft_model or self._first.model_path,
            "--speculative-num-steps", str(drafts), "--speculative-num-draft-tokens", str(drafts + 1),
        ]  # fmt: skip

    def _drafts(self) -> int:
        length = self._sizes.config.draft_length
        return FIXED_DRAFTS if length == AUTO else int(length)


def rope_scaling(args: argparse.Namespace, tokens: int) -> dict[str, Any] | None:
    """Model override that lets the embedded model read ``tokens``; None where it can, or another model serves.

    YaRN (Peng et al. 2023) by the least whole factor. The model was not trained for it: costs per token are right,
    what it writes is not worth reading, and acceptance is that of such text.
    """
    if args.server or args.model_path:
        return None
    from transformers import AutoConfig

    from rapid_sgl.models import embedded_checkpoint

    config = AutoConfig.from_pretrained(embedded_checkpoint())
    positions = config.max_position_embeddings
    if tokens <= positions:
        return None
    factor = -(-tokens // positions)
    rope = {**config.rope_parameters, "rope_type": "yarn", "factor": float(factor)}
    rope["original_max_position_embeddings"] = positions
    return {"max_position_embeddings": factor * positions, "rope_parameters": rope}


def override_flags(override: dict[str, Any] | None) -> list[str]:
    """An override as SGLang's flag."""
    return [f"--json-model-override-args={json.dumps(override)}"] if override else []
