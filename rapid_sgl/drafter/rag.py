"""RAGDrafter: the served model, run over short draft rows, proposes the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from rapid_sgl.drafter.backend import draft_attention_backend
from rapid_sgl.drafter.rows import DraftRows
from rapid_sgl.state import RequestState
from rapid_sgl.verify.law import Law, draft_probs, sample
from rapid_sgl.verify.rules import GrammarWalk, LogitRules


@dataclass(frozen=True)
class Drafts:
    """Drafts of one step, for every request of the batch."""

    chains: list[list[int]]  # per request; empty where it is not drafted
    w: torch.Tensor | None  # float [bs, n, vocab] draft logits; only when a transfer mixes logits
    q: torch.Tensor | None  # float [bs, n, vocab] draft laws; None when all are greedy without transfer

    @property
    def width(self) -> int:
        """Longest chain, n."""
        return max(map(len, self.chains), default=0)


class RAGDrafter:
    """Drafts a batch of requests from their rows.

    The keys and values of drafts go into the slots that the verify pass will fill with the
    target's own, so drafting needs no memory and leaves nothing behind.

    Args:
        runner: the target's ``ModelRunner``, whose weights and KV pool the drafter shares.
        rows: the draft rows.
    """

    def __init__(self, runner: Any, rows: DraftRows):
        self.runner = runner
        self.rows = rows
        self.attn_backend = draft_attention_backend(runner, rows.req_to_token)
        # padded rows may run past the model's last position; they are never committed
        self.last_position = runner.model_config.context_len - 1

    def draft(
        self,
        batch: Any,
        states: Sequence[RequestState],
        lengths: Sequence[int],
        law: Law,
        rules: LogitRules,
        uniforms: torch.Tensor,
    ) -> Drafts:
        """Draft ``lengths[b]`` tokens for request b.

        Args:
            batch: SGLang's ``ScheduleBatch`` in decode mode.
            states: one per request; those with ``lengths[b] > 0`` have a view.
            lengths: drafts wanted per request, 0 for none.
            law: one entry per request.
            rules: penalties, grammars and biases of this step.
            uniforms: float [bs, n], one per draft position.
        """
        loop = _Loop(self, batch, states, lengths, law, rules, uniforms)
        try:
            for step in range(max(lengths)):
                loop.advance(step)
        finally:
            loop.walk.rewind()
        # grammars may have ended every chain early
        width = max(map(len, loop.chains))
        w, q = (None if laws is None else laws[:, :width] for laws in (loop.w, loop.q))
        return Drafts(loop.chains, w, q)

    def forward(
        self,
        input_ids: torch.Tensor,  # int64 [m]
        positions: torch.Tensor,  # int64 [m], in the target's numbering
        rows: torch.Tensor,  # int64 [m]
        row_lens: torch.Tensor,  # int64 [m], entries of each row, this token included
        slots: torch.Tensor,  # int64 [m], where this token's keys and values go
    ) -> torch.Tensor:
        """One decode step of the model over draft rows; returns logits, float [m, vocab]."""
        row_lens_cpu = row_lens.cpu()
        forward_batch = ForwardBatch(
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
        self.attn_backend.init_forward_metadata(forward_batch)
        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            output = self.runner.model.forward(input_ids, forward_batch.positions, forward_batch)
        return output.next_token_logits


class _Loop:
    """The state of one draft loop: chains so far and, where the law needs them, their logits and laws."""

    def __init__(
        self,
        drafter: RAGDrafter,
        batch: Any,
        states: Sequence[RequestState],
        lengths: Sequence[int],
        law: Law,
        rules: LogitRules,
        uniforms: torch.Tensor,
    ):
        self.drafter, self.law, self.rules, self.uniforms = drafter, law, rules, uniforms
        self.walk = GrammarWalk(rules)
        self.open = list(lengths)
        self.chains: list[list[int]] = [[] for _ in states]
        self.device = batch.seq_lens.device
        self.last = [req.output_ids[-1] for req in batch.reqs]
        drafted = [b for b, length in enumerate(lengths) if length > 0]
        self.where = {b: i for i, b in enumerate(drafted)}
        index = torch.tensor(drafted, device=self.device)
        shift = torch.tensor([states[b].view.shift for b in drafted], device=self.device)  # type: ignore[union-attr]
        self.pool_idx = batch.req_pool_indices[index]
        self.seq_lens = batch.seq_lens[index]
        self.row_lens = self.seq_lens - shift
        width = max(lengths)
        self.slots = drafter.rows.extend(self.pool_idx, self.seq_lens, shift, width)
        vocab = drafter.runner.model_config.vocab_size
        keep_q = law.any_sampled or law.any_transfer
        self.q = torch.empty(len(states), width, vocab, device=self.device) if keep_q else None
        self.w = torch.empty(len(states), width, vocab, device=self.device) if law.logits else None

    def advance(self, step: int) -> None:
        """Draft one more token for every request whose chain is still open."""
        rows = [b for b in self.where if self.open[b] > step]
        if not rows:
            return
        ids = torch.tensor([self.chains[b][-1] if step else self.last[b] for b in rows], device=self.device)
        pick: Any = slice(None)
        if len(rows) < len(self.where):
            pick = torch.tensor([self.where[b] for b in rows], device=self.device)
        logits = self.drafter.forward(
            ids,
            self.seq_lens[pick] + step,
            self.pool_idx[pick],
            self.row_lens[pick] + step + 1,
            self.slots[pick, step],
        )
        self.rules.apply_to_draft_(logits, rows, self.chains)
        for b, token in zip(rows, self._choose(logits, rows, step).tolist(), strict=True):
            self.chains[b].append(token)
            if not self.walk.accept(b, token):
                self.open[b] = 0

    def _choose(self, logits: torch.Tensor, rows: list[int], step: int) -> torch.Tensor:
        choice = logits.argmax(-1)
        if self.q is None:
            return choice
        index = torch.tensor(rows)
        law = self.law if len(rows) == len(self.law) else self.law.select(index)
        q = draft_probs(logits, law)
        where = index.to(self.device)
        self.q[where, step] = q
        if self.w is not None:
            self.w[where, step] = logits
        if not law.any_sampled:
            return choice
        return torch.where(law.greedy, choice, sample(q, self.uniforms[where, step]))
