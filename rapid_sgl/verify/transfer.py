"""p, q and p̂ of one position per row: what drafts are drawn from and what verification should emit.

``law.py`` says what the names mean; ``schedule.py`` how a transfer's weight changes over a request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_sgl.verify.filters import floor, truncate
from rapid_sgl.verify.request_law import Law
from rapid_sgl.verify.schedule import confident, faded


def draft_probs(w: Tensor, law: Law) -> Tensor:
    """q: what the drafter samples from.

    Args:
        w: float [bs, V], draft logits of one step, penalties and masks applied.
        law: bs entries.

    Returns:
        [bs, V], rows sum to 1; at T = 1 and unfiltered for greedy rows.
    """
    return _distribution(_wide(w) / law.scale, law)


def target_probs(z: Tensor, law: Law) -> Tensor:
    """p: what the target samples from; as ``draft_probs`` for target logits."""
    return _distribution(_wide(z) / law.scale, law)


def target_law(
    z: Tensor, w: Tensor | None, q: Tensor | None, law: Law, position: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """p and p̂ of one position per row.

    Args:
        z, w: float [n, V], target and draft logits; w is read for LOGITS rows only.
        q: float [n, V] from ``draft_probs``, read for rows with a transfer only.
        law: n entries.
        position: int64 [n], tokens that each request has generated before this one; read for LINEAR rows only.

    Returns:
        (p, p̂), both [n, V]; one and the same tensor when no row has a transfer.

    Raises:
        ValueError: a row needs w, q or position and it is None.
    """
    scores = _wide(z) / law.scale
    p = _distribution(scores, law)
    if not law.any_transfer:
        return p, p
    if q is None:
        raise ValueError("q is None but a row's transfer depends on it: pass the draft distributions")
    weight = _weight(q, law, position).unsqueeze(-1)
    p_hat = p.clone()
    if group := law.mixture:
        rows, share = group.rows, weight[group.rows]
        p_hat[rows] = (1 - share) * p[rows] + share * q[rows]
    if group := law.logits:
        if w is None:
            raise ValueError("w is None but a row's transfer is LOGITS: pass the draft logits")
        rows, part = group.rows, law.only(group)
        p_hat[rows] = _distribution(
            _mix_scores(scores[rows], _wide(w[rows]) / part.scale, weight[rows]), part
        )
    if group := law.distill:
        rows, part = group.rows, law.only(group)
        trusted = q[rows] >= part.alpha.unsqueeze(-1) * q[rows].amax(-1, keepdim=True)
        push = weight[rows] * trusted * (q[rows] - p[rows])
        p_hat[rows] = _distribution(scores[rows] + push, part)
    return p, p_hat


def _weight(q: Tensor, law: Law, position: Tensor | None) -> Tensor:
    """float32 [n]: λ or η of each row where it stands."""
    weight = law.weight
    if law.any_fading:
        if position is None:
            raise ValueError(
                "position is None but a row's schedule is LINEAR: pass how many tokens each row has generated"
            )
        weight = faded(weight, law.horizon, position)
    if group := law.gated:
        weight = weight.clone()
        weight[group.rows] *= confident(q[group.rows], law.min_confidence[group.rows])
    return weight


def _distribution(scores: Tensor, law: Law) -> Tensor:
    """filter(softmax(scores)) for scores [n, V] that are divided by T already."""
    probs = torch.softmax(scores, dim=-1)
    ranked, floored = law.filter_groups(probs.shape[-1])
    if ranked:
        part = law.only(ranked)
        probs[ranked.rows] = truncate(probs[ranked.rows], part.top_k, part.top_p, part.min_p)
    if floored:
        probs[floored.rows] = floor(probs[floored.rows], law.only(floored).min_p)
    return probs


def _mix_scores(z: Tensor, w: Tensor, share: Tensor) -> Tensor:
    """(1-λ)z + λw for [n, V] scores and λ [n, 1] in [0, 1]; a token masked in either stays masked.

    Falls back to z in a row whose two masks leave no common token, and where λ = 0.
    """
    mixed = ((1 - share) * z + share * w).masked_fill_(z == -torch.inf, -torch.inf)
    usable = (share > 0) & (mixed.amax(-1, keepdim=True) > -torch.inf)
    return torch.where(usable, mixed, z)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
