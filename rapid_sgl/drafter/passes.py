"""Draft passes: one model run over the rows of one table and the KV pool that belongs to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context


class DraftPasses:
    """Decode and extend passes whose rows are draft rows.

    Args:
        model: ``nn.Module`` as SGLang builds it; not always the runner's own (a quantised twin).
        attn_backend: reads the rows and the KV pool.
        last_position: the model's last position; padded rows may run past it and are never committed.
        vocab_size: of the target; logits are cut or padded to it.
    """

    def __init__(self, model: torch.nn.Module, attn_backend: Any, last_position: int, vocab_size: int):
        self.model = model
        self.attn_backend = attn_backend
        self.last_position = last_position
        self.vocab_size = vocab_size

    def decode(
        self,
        input_ids: torch.Tensor,  # int64 [m]
        positions: torch.Tensor,  # int64 [m]
        rows: torch.Tensor,  # int64 [m]
        row_lens: torch.Tensor,  # int64 [m], entries of each row, this token included
        slots: torch.Tensor,  # int64 [m], where this token's keys and values go
    ) -> torch.Tensor:
        """One token per row; returns its logits, float [m, vocab]."""
        row_lens_cpu = row_lens.cpu()
        return self._run(
            ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                batch_size=len(input_ids),
                input_ids=input_ids,
                req_pool_indices=rows,
                seq_lens=row_lens,
                out_cache_loc=slots,
                seq_lens_sum=int(row_lens_cpu.sum()),
                seq_lens_cpu=row_lens_cpu,
                positions=positions.clamp_max(self.last_position),
                capture_hidden_mode=CaptureHiddenMode.NULL,
            )
        )

    def extend(
        self,
        input_ids: torch.Tensor,  # int64 [sum(counts)]
        rows: torch.Tensor,  # int64 [m]
        prefixes: Sequence[int],  # [m], entries of each row that have keys and values already
        counts: Sequence[int],  # [m], new tokens of each row
        slots: torch.Tensor,  # int64 [sum(counts)]
    ) -> torch.Tensor:
        """New tokens at the ends of rows, positions counted in the row; returns logits of each row's
        last token, float [m, vocab]."""
        device = input_ids.device
        ends = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
        positions = torch.cat([torch.arange(a, b) for a, b in zip(prefixes, ends, strict=True)]).to(device)
        starts = [0, *accumulate(counts)][:-1]
        return self._run(
            ForwardBatch(
                forward_mode=ForwardMode.EXTEND,
                batch_size=len(counts),
                input_ids=input_ids,
                req_pool_indices=rows,
                seq_lens=torch.tensor(ends, device=device),
                out_cache_loc=slots,
                seq_lens_sum=sum(ends),
                seq_lens_cpu=torch.tensor(ends),
                positions=positions.clamp_max(self.last_position),
                extend_num_tokens=len(input_ids),
                extend_seq_lens=torch.tensor(counts, dtype=torch.int32, device=device),
                extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32, device=device),
                extend_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
                extend_seq_lens_cpu=list(counts),
                extend_prefix_lens_cpu=list(prefixes),
                capture_hidden_mode=CaptureHiddenMode.NULL,
            )
        )

    def _run(self, forward_batch: Any) -> torch.Tensor:
        self.attn_backend.init_forward_metadata(forward_batch)
        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            output = self.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)
        logits: torch.Tensor = output.next_token_logits
        width = logits.shape[1]
        if width == self.vocab_size:
            return logits
        # models of one family pad their embeddings differently; the extra rows are no tokens
        if width > self.vocab_size:
            return logits[:, : self.vocab_size].contiguous()
        return torch.nn.functional.pad(logits, (0, self.vocab_size - width), value=-torch.inf)
