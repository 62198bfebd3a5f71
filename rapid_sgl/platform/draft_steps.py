"""Attention for SGLang's own draft worker (STANDALONE) on the portable CPU platform."""

from __future__ import annotations

import copy
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from rapid_sgl.platform.attention import PortableCpuAttnBackend


class ChainDraftBackend:
    """One backend per draft step of a chain, planned at once, as SGLang's multi-step backends are.

    Args:
        model_runner: of the draft model; it shares the target's row table.
        topk: branches per step.
        speculative_num_steps: drafts of a chain; the first one comes from the pass before.

    Raises:
        ValueError: branches, whose tokens would need rows of their own.
    """

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        if topk != 1:
            raise ValueError(
                f"--speculative-eagle-topk {topk} is not supported on the portable CPU platform; use 1"
            )
        self.attn_backends = [PortableCpuAttnBackend(model_runner) for _ in range(speculative_num_steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan all steps: in step i a request has i + 1 tokens more than are committed."""
        step_batch = copy.copy(forward_batch)
        for step, backend in enumerate(self.attn_backends):
            step_batch.seq_lens = forward_batch.seq_lens + step + 1
            backend.init_forward_metadata(step_batch)
