"""RAGDrafter: a model, run over short draft rows, proposes the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rapid_sgl.drafter.lanes import ReencodedLane, ViewLane
from rapid_sgl.drafter.passes import DraftPasses
from rapid_sgl.drafter.reencoded import ReencodedRow, Reencoder
from rapid_sgl.drafter.rows import DraftRows, View
from rapid_sgl.verify.law import Law, draft_probs, sample
from rapid_sgl.verify.rules import GrammarWalk, LogitRules

DraftRow = View | ReencodedRow


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

    Args:
        rows: views of the target's KV cache.
        view_passes: those that read them, by weights.
        reencoder: re-encoded rows; None where the server has set no memory apart for them.
        vocab_size: of the target.
    """

    def __init__(
        self,
        rows: DraftRows,
        view_passes: dict[str, DraftPasses],
        reencoder: Reencoder | None,
        vocab_size: int,
    ):
        self.rows, self.view_passes, self.reencoder, self.vocab_size = (
            rows,
            view_passes,
            reencoder,
            vocab_size,
        )

    def draft(
        self,
        batch: Any,
        rows: Sequence[DraftRow | None],
        lengths: Sequence[int],
        law: Law,
        rules: LogitRules,
        uniforms: torch.Tensor,
    ) -> Drafts:
        """Draft ``lengths[b]`` tokens for request b.

        Args:
            batch: SGLang's ``ScheduleBatch`` in decode mode.
            rows: one per request; read where ``lengths[b] > 0``.
            lengths: drafts wanted per request, 0 for none.
            law: one entry per request.
            rules: penalties, grammars and biases of this step.
            uniforms: float [bs, n], one per draft position.
        """
        loop = _Loop(self._lanes(batch, rows, lengths), lengths, law, rules, uniforms, self.vocab_size)
        try:
            for step in range(max(lengths)):
                loop.advance(step)
        finally:
            loop.close()
        # grammars may have ended every chain early
        width = max(map(len, loop.chains))
        w, q = (None if laws is None else laws[:, :width] for laws in (loop.w, loop.q))
        return Drafts(loop.chains, w, q)

    def _lanes(
        self, batch: Any, rows: Sequence[DraftRow | None], lengths: Sequence[int]
    ) -> list[ViewLane | ReencodedLane]:
        groups: dict[tuple[type, str], dict[int, Any]] = {}
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length and row is not None:
                groups.setdefault((type(row), row.weights), {})[b] = row
        lanes: list[ViewLane | ReencodedLane] = []
        for (kind, weights), members in groups.items():
            if kind is View:
                width = max(lengths[b] for b in members)
                lanes.append(ViewLane(self.view_passes[weights], self.rows, batch, members, width))
            else:
                assert self.reencoder is not None, "a re-encoded row without memory for it"
                lanes.append(ReencodedLane(self.reencoder, batch, members))
        return lanes


class _Loop:
    """The state of one draft loop: chains so far and, where the law needs them, their logits and laws."""

    def __init__(
        self,
        lanes: Sequence[ViewLane | ReencodedLane],
        lengths: Sequence[int],
        law: Law,
        rules: LogitRules,
        uniforms: torch.Tensor,
        vocab: int,
    ):
        self.lanes, self.law, self.rules, self.uniforms = lanes, law, rules, uniforms
        self.walk = GrammarWalk(rules)
        self.open = list(lengths)
        self.chains: list[list[int]] = [[] for _ in lengths]
        self.members = [list(lane.members if isinstance(lane, ViewLane) else lane.rows) for lane in lanes]
        shape, device = (len(lengths), max(lengths), vocab), uniforms.device
        keep_q = law.any_sampled or law.any_transfer
        self.q = torch.empty(shape, device=device) if keep_q else None
        self.w = torch.empty(shape, device=device) if law.logits else None

    def advance(self, step: int) -> None:
        """Draft one more token for every request whose chain is still open."""
        rows, logits = [], []
        for lane, members in zip(self.lanes, self.members, strict=True):
            still = [b for b in members if self.open[b] > step]
            if still:
                logits.append(lane.advance(still, self.chains, step))
                rows += still
        if not rows:
            return
        joined = logits[0] if len(logits) == 1 else torch.cat(logits)
        self.rules.apply_to_draft_(joined, rows, self.chains)
        for b, token in zip(rows, self._choose(joined, rows, step).tolist(), strict=True):
            self.chains[b].append(token)
            if not self.walk.accept(b, token):
                self.open[b] = 0

    def close(self) -> None:
        self.walk.rewind()
        for lane in self.lanes:
            lane.close(self.chains)

    def _choose(self, logits: torch.Tensor, rows: list[int], step: int) -> torch.Tensor:
        choice = logits.argmax(-1)
        if self.q is None:
            return choice
        index = torch.tensor(rows)
        ordered = rows == list(range(len(self.law)))
        law = self.law if ordered else self.law.select(index)
        q = draft_probs(logits, law)
        where = index.to(self.uniforms.device)
        self.q[where, step] = q
        if self.w is not None:
            self.w[where, step] = logits
        if not law.any_sampled:
            return choice
        return torch.where(law.greedy, choice, sample(q, self.uniforms[where, step]))
