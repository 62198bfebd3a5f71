"""RAGDrafter: a model, run over short draft rows, proposes the next tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rapid_sgl.control.step import DraftPass
from rapid_sgl.control.stop import ChainStop
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

    chains: list[list[int]]  # per request, copied or from a model; empty where it is not drafted
    w: torch.Tensor | None  # float [bs, n, vocab] draft logits; only when a transfer mixes logits
    q: torch.Tensor | None  # float [bs, n, vocab] draft laws; None when all are greedy without transfer
    passes: list[DraftPass]  # that made them
    confidence: list[
        list[float]
    ]  # drafts' own probabilities, of the first drafts of chains that may end early


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
        copies: Sequence[Sequence[int]],
        law: Law,
        rules: LogitRules,
        uniforms: torch.Tensor | None,
        stop: ChainStop | None = None,
        keep_q: bool = False,
    ) -> Drafts:
        """Draft ``lengths[b]`` tokens for request b, or take its copy.

        Args:
            batch: SGLang's ``ScheduleBatch`` in decode mode.
            rows: one per request; read where ``lengths[b] > 0``.
            lengths: model drafts wanted per request, 0 for none.
            copies: copied tokens per request; used where ``lengths[b]`` is 0, as far as a grammar allows.
            law: one entry per request.
            rules: penalties, grammars and biases of this step.
            uniforms: float [bs, n], one per position of the longest chain; None when no row is sampled.
            stop: ends chains early.
            keep_q: also where the law does not need it.
        """
        lanes = self._lanes(batch, rows, lengths)
        keep_q = keep_q or law.any_sampled or law.any_transfer
        longest = max(*lengths, *map(len, copies))
        shape = (len(lengths), longest, self.vocab_size) if keep_q else None
        loop = _Loop(lanes, lengths, law, rules, uniforms, shape, stop)
        try:
            loop.copy(copies)
            for step in range(max(lengths)):
                loop.advance(step)
        finally:
            loop.close()
        # grammars may have ended every chain early
        width = max(map(len, loop.chains))
        w, q = (None if laws is None else laws[:, :width] for laws in (loop.w, loop.q))
        return Drafts(loop.chains, w, q, loop.passes, loop.confidence)

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
        uniforms: torch.Tensor | None,
        shape: tuple[int, int, int] | None,  # of the draft laws; None: they are not kept
        stop: ChainStop | None,
    ):
        self.stop, self.passes = stop, list[DraftPass]()
        self.lanes, self.law, self.rules, self.uniforms = lanes, law, rules, uniforms
        self.walk = GrammarWalk(rules)
        self.open = list(lengths)
        self.chains: list[list[int]] = [[] for _ in lengths]
        self.confidence: list[list[float]] = [[] for _ in lengths]
        self.members = [list(lane.members if isinstance(lane, ViewLane) else lane.rows) for lane in lanes]
        device = law.greedy.device
        self.q = torch.empty(shape, device=device) if shape else None
        self.w = torch.empty(shape, device=device) if shape and law.logits else None

    def copy(self, copies: Sequence[Sequence[int]]) -> None:
        """Chains of the requests that copy; their draft law is a point mass at each copied token."""
        for b, tokens in enumerate(copies):
            if not tokens or self.open[b]:
                continue
            self.chains[b] = chain = self.walk.follow(b, tokens)
            if self.q is not None and chain:
                self.q[b, : len(chain)] = 0
                self.q[b, torch.arange(len(chain)), chain] = 1

    def advance(self, step: int) -> None:
        """Draft one more token for every request whose chain is still open."""
        began = time.perf_counter()
        rows, logits, run = [], [], []
        for lane, members in zip(self.lanes, self.members, strict=True):
            still = [b for b in members if self.open[b] > step]
            if still:
                logits.append(lane.advance(still, self.chains, step))
                run.append((lane.key, len(still), lane.tokens(still, step)))
                rows += still
        if not rows:
            return
        joined = logits[0] if len(logits) == 1 else torch.cat(logits)
        self.rules.apply_to_draft_(joined, rows, self.chains)
        chosen = self._choose(joined, rows, step)
        tokens = chosen.tolist()  # by now the passes are done on any device
        seconds = time.perf_counter() - began
        self.passes += [DraftPass(*one, step, seconds) for one in run]
        for b, token in zip(rows, tokens, strict=True):
            self.chains[b].append(token)
            if not self.walk.accept(b, token):
                self.open[b] = 0
        self._end_early(joined, chosen, rows, step)

    def _end_early(self, logits: torch.Tensor, chosen: torch.Tensor, rows: list[int], step: int) -> None:
        """Close the chains whose next draft would not be worth its pass."""
        if self.stop is None or not any(self.open[b] > step + 1 for b in rows):
            return
        index = torch.tensor(rows, device=logits.device)
        if self.q is not None:
            probs = self.q[index, step, chosen]
        else:
            probs = (logits.gather(-1, chosen[:, None])[:, 0] - logits.logsumexp(-1)).exp()
        for b, prob in zip(rows, probs.tolist(), strict=True):
            self.confidence[b].append(prob)
        still = [b for b in rows if self.open[b] > step + 1]
        keep = self.stop.keep(step, still, [self.confidence[b][-1] for b in still])
        for b, goes_on in zip(still, keep, strict=True):
            if not goes_on:
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
        where = index.to(q.device)
        self.q[where, step] = q
        if self.w is not None:
            self.w[where, step] = logits
        if not law.any_sampled:
            return choice
        assert self.uniforms is not None
        return torch.where(law.greedy, choice, sample(q, self.uniforms[where, step]))
