"""Output-token penalties, exact for every position of a draft chain.

SGLang's speculative path applies penalties as they stood before the chain and sees only
the last token of each step. Here each position sees every token before it, so decoding
with drafts keeps the law of decoding without (SGLang: ``sampling/penaltylib``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Penalties:
    """Penalty settings of one request (SGLang's ``SamplingParams`` fields of the same names)."""

    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    stop_ids: tuple[int, ...]  # tokens that may not appear before min_new_tokens

    @property
    def active(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.min_new_tokens > 0
        )

    def apply_(self, logits: torch.Tensor, output: Sequence[int], chain: Sequence[int]) -> None:
        """Penalise ``logits`` in place.

        Args:
            logits: float [n, vocab]; row i predicts the token after ``output + chain[:i]``.
            output: tokens generated so far.
            chain: at least n - 1 draft tokens that follow ``output``.
        """
        rows = logits.shape[0]
        seen = set(output)
        first_seen = [0] * len(seen)  # row from which each token of ``order`` counts as seen
        order = list(seen)
        if self.frequency_penalty or self.presence_penalty:
            self._add(logits, output, 0, seen=())
        for i, token in enumerate(chain[: rows - 1], start=1):
            self._add(logits, [token], i, seen=seen)
            if token not in seen:
                seen.add(token)
                order.append(token)
                first_seen.append(i)
        if self.repetition_penalty != 1.0:
            self._scale(logits, order, first_seen)
        banned = max(0, min(rows, self.min_new_tokens - len(output)))
        if banned and self.stop_ids:
            logits[:banned, list(self.stop_ids)] = -torch.inf

    def _add(self, logits: torch.Tensor, tokens: Sequence[int], first_row: int, seen: Iterable[int]) -> None:
        """Frequency and presence penalties of ``tokens`` for rows ``first_row`` and after."""
        if not tokens:
            return
        ids, counts = torch.tensor(tokens, device=logits.device).unique(return_counts=True)
        amount = self.frequency_penalty * counts.to(logits.dtype)
        new = torch.tensor([token not in seen for token in ids.tolist()], device=logits.device)
        amount += self.presence_penalty * new.to(logits.dtype)
        logits[first_row:, ids] -= amount

    def _scale(self, logits: torch.Tensor, order: Sequence[int], first_seen: Sequence[int]) -> None:
        """Repetition penalty: positive logits of seen tokens are divided, negative ones multiplied."""
        if not order:
            return
        ids = torch.tensor(order, device=logits.device)
        since = torch.tensor(first_seen, device=logits.device)
        values = logits[:, ids]
        scaled = torch.where(values < 0, values * self.repetition_penalty, values / self.repetition_penalty)
        applies = torch.arange(logits.shape[0], device=logits.device)[:, None] >= since
        logits[:, ids] = torch.where(applies, scaled, values)


def penalties_of(req: object) -> Penalties:
    """Read a request's penalties (``req``: SGLang's ``Req``)."""
    params = req.sampling_params  # type: ignore[attr-defined]
    stop_ids: set[int] = set()
    if params.min_new_tokens > 0:
        tokenizer = req.tokenizer  # type: ignore[attr-defined]
        stop_ids = set(params.stop_token_ids or ()) | set(req.eos_token_ids or ())  # type: ignore[attr-defined]
        if tokenizer is not None:
            stop_ids |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
            if tokenizer.eos_token_id is not None:
                stop_ids.add(tokenizer.eos_token_id)
    return Penalties(
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
        stop_ids=tuple(sorted(stop_ids)),
    )
