"""The law of RAPID verification: which tokens to commit, given target and draft logits. Pure torch.

Names, at one position of one request: z and w are the target's and the drafter's logits, T the temperature,
p = filter(softmax(z/T)) and q = filter(softmax(w/T)), where *filter* is the request's top-k/top-p/min-p with
renormalisation. The drafter draws x ~ q. What verification should emit is the target law p̂:

    NONE      p                                         speculative sampling (Leviathan et al., Chen et al.)
    MIXTURE   (1-λ)p + λq                               λ in [0, 1]
    LOGITS    filter(softmax(((1-λ)z + λw)/T))          λ in [0, 1]
    DISTILL   filter(softmax(z/T + η·m·(q-p))),         η >= 0, m = [q >= α·max q]; RAPID (arXiv 2502.20330) eq. 6

x is accepted with probability min(1, p̂(x)/q(x)). A rejection emits a token from the residual:

    EXACT     norm(max(p̂-q, 0))                         what is emitted then follows p̂ exactly
    PAPER     norm(max(p-p̂, p-q, 0))                    RAPID's Algorithm 1; follows neither p nor p̂ when η > 0

When every draft of a chain was accepted, one more token comes from p. A greedy request commits argmax p̂, with
p̂ formed at T = 1 without filters, and accepts x iff x is that token.

Logits may be -inf (grammar masks) as long as each row has a finite one; float64 logits are computed in float64,
everything else in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rapid_sgl.verify.filters import floor, sample, truncate
from rapid_sgl.verify.request_law import TOP_K_OFF, Law, LawRow, Residual, Transfer

__all__ = [
    "TOP_K_OFF",
    "Law",
    "LawRow",
    "Residual",
    "Transfer",
    "Verdict",
    "accept_prob",
    "draft_probs",
    "residual_law",
    "sample",
    "target_law",
    "verify_chain",
]

# Elements of one [rows, V] working tensor when several positions are judged at once on an accelerator. With 2^22
# float32 (16 MiB) the temporaries of the costliest law, DISTILL under top-p, stay under 0.25 GiB.
BLOCK_ELEMENTS = 1 << 22


class Verdict(NamedTuple):
    """What one verification commits."""

    accept_lens: Tensor  # int64 [bs], accepted drafts, the token after them excluded
    tokens: Tensor  # int64 [bs, n+1]: accepted drafts, then the correction or bonus, then 0


def draft_probs(w: Tensor, law: Law) -> Tensor:
    """q: what the drafter samples from.

    Args:
        w: float [bs, V], draft logits of one step, penalties and masks applied.
        law: bs entries.

    Returns:
        [bs, V], rows sum to 1; at T = 1 and unfiltered for greedy rows.
    """
    return _distribution(_wide(w) / law.scale, law)


def target_law(z: Tensor, w: Tensor | None, q: Tensor | None, law: Law) -> tuple[Tensor, Tensor]:
    """p and p̂ of one position per row.

    Args:
        z, w: float [n, V], target and draft logits; w is read for LOGITS rows only.
        q: float [n, V] from ``draft_probs``, read for rows with a transfer only.
        law: n entries.

    Returns:
        (p, p̂), both [n, V]; one and the same tensor when no row has a transfer.

    Raises:
        ValueError: a row needs w or q and it is None.
    """
    scores = _wide(z) / law.scale
    p = _distribution(scores, law)
    if not law.any_transfer:
        return p, p
    if q is None:
        raise ValueError("q is None but a row's transfer depends on it: pass the draft distributions")
    p_hat = p.clone()
    if group := law.mixture:
        rows, share = group.rows, law.only(group).weight.unsqueeze(-1)
        p_hat[rows] = (1 - share) * p[rows] + share * q[rows]
    if group := law.logits:
        if w is None:
            raise ValueError("w is None but a row's transfer is LOGITS: pass the draft logits")
        rows, part = group.rows, law.only(group)
        p_hat[rows] = _distribution(_mix_scores(scores[rows], _wide(w[rows]) / part.scale, part.weight), part)
    if group := law.distill:
        rows, part = group.rows, law.only(group)
        trusted = q[rows] >= part.alpha.unsqueeze(-1) * q[rows].amax(-1, keepdim=True)
        push = part.weight.unsqueeze(-1) * trusted * (q[rows] - p[rows])
        p_hat[rows] = _distribution(scores[rows] + push, part)
    return p, p_hat


def accept_prob(p_hat_x: Tensor, q_x: Tensor) -> Tensor:
    """min(1, p̂(x)/q(x)) elementwise; 1 where q(x) = 0 < p̂(x), 0 where both are 0."""
    return (p_hat_x / q_x.clamp_min(torch.finfo(q_x.dtype).tiny)).clamp_max(1)


def residual_law(p: Tensor, p_hat: Tensor, q: Tensor, law: Law) -> Tensor:
    """Weights, not normalised, of the token that replaces a rejected draft.

    Where the residual has no mass (p̂ = q, so that only rounding can have rejected) they are p̂'s.

    Args:
        p, p_hat, q: float [n, V].
        law: n entries.

    Returns:
        [n, V], non-negative, each row with a positive sum.
    """
    weights = (p_hat - q).clamp_min(0)
    if group := law.paper:
        rows = group.rows
        weights[rows] = torch.maximum(p[rows] - p_hat[rows], p[rows] - q[rows]).clamp_min(0)
    return torch.where(weights.amax(-1, keepdim=True) > 0, weights, p_hat)


def verify_chain(
    z: Tensor,
    w: Tensor | None,
    q: Tensor | None,
    drafts: Tensor,
    draft_lens: Tensor,
    law: Law,
    uniforms: Tensor | None,
) -> Verdict:
    """Judge a chain of drafts per request and pick the token that follows the accepted ones.

    Args:
        z: float [bs, n+1, V], target logits; position i judges draft i, position draft_lens[b] gives the bonus.
        w: float [bs, n, V], draft logits; None when no row uses LOGITS.
        q: float [bs, n, V], what each draft was drawn from; None when no row is sampled and none transfers.
        drafts: int64 [bs, n]. Like w and q, anything at or beyond draft_lens is ignored.
        draft_lens: int64 [bs], in 0..n.
        law: bs entries.
        uniforms: float [bs, n+1, 2] in [0, 1): at each position one to accept with and one to draw with; None
            when no row is sampled.

    Returns:
        The verdict, on the device of z. A row's verdict does not depend on the rest of the batch. The device is
        waited for only by top-k/top-p truncation (see ``filters.truncate``); a CPU stops at each row's first
        rejection.

    Raises:
        ValueError: shapes that do not fit, or a None that the law needs.
    """
    _check_chain(z, w, q, drafts, draft_lens, law, uniforms)
    n = drafts.shape[1]
    positions = torch.arange(n + 1, device=z.device)
    drafted = positions[:n] < draft_lens.unsqueeze(-1)
    chain = _Chain(z, w, q, torch.where(drafted, drafts, 0), draft_lens, uniforms)
    accept_lens = torch.zeros_like(draft_lens)
    closing = torch.zeros_like(draft_lens)
    if law.any_plain_greedy:
        choice = z.argmax(-1)  # of all rows: reading a few too many is cheaper than copying the others out
        accept_lens = _run_length((choice[:, :n] == chain.drafts) & drafted)
        closing = choice.gather(-1, accept_lens.unsqueeze(-1)).squeeze(-1)
    for group in (law.sampled, law.greedy_transfer):
        if group is not None:
            taken, token = _judge(chain, group.host, law.only(group), stop_early=z.device.type == "cpu")
            accept_lens[group.rows] = taken
            closing[group.rows] = token
    padded = torch.nn.functional.pad(chain.drafts, (0, 1))
    ends = accept_lens.unsqueeze(-1)
    tokens = torch.where(positions < ends, padded, torch.where(positions == ends, closing.unsqueeze(-1), 0))
    return Verdict(accept_lens, tokens)


class _Chain(NamedTuple):
    """``verify_chain``'s arguments with the ignored drafts zeroed, so that every draft is a valid token id."""

    z: Tensor
    w: Tensor | None
    q: Tensor | None
    drafts: Tensor
    lens: Tensor
    uniforms: Tensor | None


def _judge(chain: _Chain, rows: Tensor, law: Law, stop_early: bool) -> tuple[Tensor, Tensor]:
    """Accept lengths and closing tokens, both int64 [m], of ``rows`` (int64 [m], CPU): all sampled or all greedy.

    ``stop_early`` asks the device after each position which rows are still in play; otherwise all positions
    are judged, several at a time.
    """
    device, n = chain.z.device, chain.drafts.shape[1]
    accepted = torch.zeros(len(rows), n, dtype=torch.bool, device=device)
    lens = chain.lens[rows.to(device)]
    width = 1 if stop_early else max(1, BLOCK_ELEMENTS // (len(rows) * chain.z.shape[-1]))
    alive = torch.arange(len(rows))
    for start in range(0, n, width):
        if stop_early:
            alive = alive[(accepted[alive, start - 1] if start else True) & (lens[alive] > start)]
            if alive.numel() == 0:
                break
        count = min(width, n - start)
        pick = alive.repeat_interleave(count)
        # alive is sorted, so as many picks as rows means every row once and in order
        here = law if len(pick) == len(rows) else law.select(pick)
        at = torch.arange(start, start + count, device=device).repeat(len(alive))
        accepted[pick.to(device), at] = _accepts(chain, rows[pick].to(device), at, here)
    taken = _run_length(accepted & (torch.arange(n, device=device) < lens.unsqueeze(-1)))
    return taken, _close(chain, rows.to(device), taken, taken == lens, law, stop_early)


def _accepts(chain: _Chain, rows: Tensor, at: Tensor, law: Law) -> Tensor:
    """bool [m]: is the draft at position at[j] of row rows[j] accepted, given that all before it are?"""
    drafts = chain.drafts[rows, at]
    _, p_hat = _laws_at(chain, rows, at, at, law)
    if not law.any_sampled:
        return p_hat.argmax(-1) == drafts
    assert chain.q is not None and chain.uniforms is not None
    reached = p_hat.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    return chain.uniforms[rows, at, 0] < accept_prob(reached, chain.q[rows, at, drafts])


def _close(chain: _Chain, rows: Tensor, at: Tensor, bonus: Tensor, law: Law, ask: bool) -> Tensor:
    """int64 [m]: the token after the accepted drafts of each row; from p where ``bonus``."""
    drafted_at = at.clamp_max(max(chain.drafts.shape[1] - 1, 0))  # a bonus position has no w and no q
    if chain.drafts.shape[1] == 0 or (ask and bool(bonus.all())):
        weights = _distribution(_wide(chain.z[rows, at]) / law.scale, law)
    else:
        p, p_hat = _laws_at(chain, rows, at, drafted_at, law)
        weights = p_hat
        if law.any_sampled:
            assert chain.q is not None
            weights = residual_law(p, p_hat, chain.q[rows, drafted_at], law)
        weights = torch.where(bonus.unsqueeze(-1), p, weights)
    if not law.any_sampled:
        return weights.argmax(-1)
    assert chain.uniforms is not None
    return sample(weights, chain.uniforms[rows, at, 1])


def _laws_at(chain: _Chain, rows: Tensor, at: Tensor, drafted_at: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """``target_law`` at z's positions ``at`` and w's and q's positions ``drafted_at``."""
    w = chain.w[rows, drafted_at] if chain.w is not None and law.logits else None
    q = chain.q[rows, drafted_at] if chain.q is not None and law.any_transfer else None
    return target_law(chain.z[rows, at], w, q, law)


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
    """(1-λ)z + λw for [n, V] scores and λ [n] in (0, 1]; a token masked in either stays masked.

    Falls back to z in a row whose two masks leave no common token.
    """
    share = share.unsqueeze(-1)
    mixed = ((1 - share) * z + share * w).masked_fill_(z == -torch.inf, -torch.inf)
    return torch.where(mixed.amax(-1, keepdim=True) == -torch.inf, z, mixed)


def _run_length(flags: Tensor) -> Tensor:
    """int64 [m]: how many leading entries of each row of bool [m, n] are true."""
    return flags.long().cumprod(-1).sum(-1)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _check_chain(
    z: Tensor,
    w: Tensor | None,
    q: Tensor | None,
    drafts: Tensor,
    draft_lens: Tensor,
    law: Law,
    uniforms: Tensor | None,
) -> None:
    bs, n = drafts.shape
    chain, vocab = (bs, n), z.shape[-1]
    wanted = {
        "z": (z, (bs, n + 1, vocab), False),
        "w": (w, (*chain, vocab), n > 0 and law.logits is not None),
        "q": (q, (*chain, vocab), n > 0 and (law.any_sampled or law.any_transfer)),
        "draft_lens": (draft_lens, (bs,), True),
        "uniforms": (uniforms, (bs, n + 1, 2), law.any_sampled),
        "law": (law.greedy, (bs,), True),
    }
    for name, (tensor, shape, needed) in wanted.items():
        if tensor is None and needed:
            raise ValueError(f"{name} is None but the law needs it: pass a tensor of shape {shape}")
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, drafts {(bs, n)} call for {shape}")
