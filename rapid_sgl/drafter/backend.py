"""An attention backend whose rows are draft rows: a second instance of the served backend's class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class RunnerOverRows:
    """The served ``ModelRunner`` with another ``req_to_token`` table, as backends read it on construction."""

    def __init__(self, runner: Any, req_to_token: torch.Tensor):
        self._runner = runner
        pool = runner.req_to_token_pool
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=req_to_token,  # int32 [rows, max_len]
            size=pool.size,
            max_context_len=pool.max_context_len,
            device=pool.device,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def draft_attention_backend(runner: Any, req_to_token: torch.Tensor) -> Any:
    """Build the draft pass's backend (SGLang's ``ATTENTION_BACKENDS`` registry) over ``req_to_token``."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    name = runner.decode_attention_backend_str
    return ATTENTION_BACKENDS[name](RunnerOverRows(runner, req_to_token))
