"""Where each token of an answer came from: per-token provenance, for requests that ask for it (``rapid_trace``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rapid_sgl.drafter.rag import Drafts
from rapid_sgl.verify.law import Law, Verdict, target_law
from rapid_sgl.verify.transfer import target_probs

# Of a record's fields, in order; ``meta_info`` carries plain lists.
FIELDS = ("origin", "p", "q", "p_hat")
MODEL, COPY, CORRECTION, BONUS, PLAIN = "model", "copy", "correction", "bonus", "plain"

Record = tuple[str, float, float | None, float]


def trace_step(
    row: int, z: torch.Tensor, drafts: Drafts, verdict: Verdict, law: Law, position: int, *, copied: bool
) -> list[Record]:
    """Records of the tokens that one step committed for one request, in order.

    Args:
        row: of the request in the batch.
        z: float [bs, n + 1, vocab], target logits as they were verified.
        drafts, verdict, law: of the step; ``drafts.q`` was kept.
        position: tokens that the request had generated before the step.
        copied: its chain was a copy.

    Returns:
        (origin, p, q, p̂) of each token: an accepted draft of the model or of a copy, the correction of a rejected
        draft, the bonus after a chain kept whole, or a plain token of a step without drafts. q is None where
        nothing was drafted.
    """
    proposed, kept = len(drafts.chains[row]), int(verdict.accept_lens[row])
    own = law.select(torch.tensor([row]))
    records: list[Record] = []
    for i, token in enumerate(verdict.tokens[row, : kept + 1].tolist()):
        drafted = i < proposed
        q = drafts.q[row, i][None] if drafted and drafts.q is not None else None
        w = drafts.w[row, i][None] if drafted and drafts.w is not None else None
        at = torch.tensor([position + i], device=z.device)
        p, p_hat = _laws(z[row, i][None], w, q, own, at)
        records.append(
            (
                _origin(i, kept, proposed, copied),
                float(p[0, token]),
                None if q is None else float(q[0, token]),
                float(p_hat[0, token]),
            )
        )
    return records


def _laws(z: Any, w: Any, q: Any, law: Law, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """p and p̂; the same where there is no draft to transfer from."""
    if q is None:
        p = target_probs(z, law)
        return p, p
    return target_law(z, w, q, law, at)


def _origin(i: int, kept: int, proposed: int, copied: bool) -> str:
    if i < kept:
        return COPY if copied else MODEL
    if proposed == 0:
        return PLAIN
    return BONUS if kept == proposed else CORRECTION


def trace_batch(
    traces: Sequence[list[Record] | None],
    positions: Sequence[int],
    copied: Sequence[int],
    z: torch.Tensor,
    drafts: Drafts,
    verdict: Verdict,
    law: Law,
) -> None:
    """Extend the traces of those requests of a batch that keep one; arguments as for ``trace_step``."""
    for row, trace in enumerate(traces):
        if trace is not None:
            trace += trace_step(row, z, drafts, verdict, law, positions[row], copied=bool(copied[row]))
