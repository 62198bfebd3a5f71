"""An attention backend whose rows are draft rows: a second instance of the served backend's class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class RunnerOverRows:
    """A ``ModelRunner`` with another row table and KV pool, as attention backends read it on construction.

    Args:
        runner: the ``ModelRunner`` that is stood in for.
        req_to_token: int32 [rows, max_len], the draft rows.
        token_to_kv_pool, token_to_kv_pool_allocator: where those rows' slots lie; default the runner's own.
    """

    def __init__(
        self,
        runner: Any,
        req_to_token: torch.Tensor,
        token_to_kv_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ):
        self._runner = runner
        pool = runner.req_to_token_pool
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=req_to_token,
            size=pool.size,
            max_context_len=pool.max_context_len,
            device=pool.device,
        )
        self.token_to_kv_pool = token_to_kv_pool or runner.token_to_kv_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator or runner.token_to_kv_pool_allocator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def draft_attention_backend(runner: Any) -> Any:
    """Build the draft pass's backend (SGLang's ``ATTENTION_BACKENDS`` registry) over a ``RunnerOverRows``."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS[runner.decode_attention_backend_str](runner)
