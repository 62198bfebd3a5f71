"""SGLang ``SpecInput`` records of RAPID: what travels between steps and what the verify pass reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


class RapidDraftInput(SpecInput):
    """Between steps nothing travels: the last token, the row and the options are found by request."""

    def __init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Nothing to filter."""

    def merge_batch(self, spec_info: RapidDraftInput) -> None:
        """Nothing to merge."""


def verify_input(runner: Any, batch: Any, tokens: torch.Tensor) -> EagleVerifyInput:
    """Describe a chain verify to SGLang's attention backends.

    Args:
        runner: the target's ``ModelRunner``.
        batch: ``ScheduleBatch`` in decode mode; ``seq_lens`` counts tokens with KV.
        tokens: int64 [bs, width], last committed token then drafts.
    """
    bs, width = tokens.shape
    positions = batch.seq_lens[:, None] + torch.arange(width, device=tokens.device)
    needs_mask = getattr(runner.attn_backend, "needs_chain_mask", True)
    return EagleVerifyInput(
        draft_token=tokens.flatten(),
        custom_mask=chain_mask(batch.seq_lens, width) if needs_mask else None,
        positions=positions.flatten().clamp_max(runner.model_config.context_len - 1),
        retrieve_index=torch.arange(bs * width, device=tokens.device).view(bs, width),
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=width - 1,
        topk=1,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=batch.seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu,
    )


def chain_mask(seq_lens: torch.Tensor, width: int) -> torch.Tensor:
    """Full attention mask of a chain verify, as SGLang's tree-mask backends read it.

    Returns:
        bool, flat: per request [width, seq_len + width], true where a query may attend.
    """
    lower = torch.ones(width, width, dtype=torch.bool, device=seq_lens.device).tril()
    parts = []
    for length in seq_lens.tolist():
        prefix = lower.new_ones(width, length)
        parts.append(torch.cat([prefix, lower], dim=1).flatten())
    return torch.cat(parts)


def verify_tokens(batch: Any, chains: Sequence[Sequence[int]]) -> torch.Tensor:
    """int64 [bs, width + 1]: each request's last committed token, its drafts, then padding."""
    width = max(map(len, chains), default=0)
    rows = [
        [req.output_ids[-1], *chain, *[0] * (width - len(chain))]
        for req, chain in zip(batch.reqs, chains, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=batch.seq_lens.device)


def generated(batch: Any) -> torch.Tensor:
    """int64 [bs]: tokens that each request has generated, which is the position of its first draft."""
    return torch.tensor([len(req.output_ids) for req in batch.reqs], device=batch.seq_lens.device)
