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

λ and η may change over a request by its schedule (``schedule.py``). When every draft of a chain was accepted, one
more token comes from p. A greedy request commits argmax p̂, with p̂ formed at T = 1 without filters, and accepts x
iff x is that token.

Logits may be -inf (grammar masks) as long as each row has a finite one; float64 logits are computed in float64,
everything else in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rapid_sgl.verify.filters import sample
from rapid_sgl.verify.request_law import TOP_K_OFF, Law, LawRow, Residual, Transfer
from rapid_sgl.verify.schedule import Schedule
from rapid_sgl.verify.transfer import draft_probs, target_law, target_probs

__all__ = [
    "TOP_K_OFF",
    "Law",
    "LawRow",
    "Residual",
    "Schedule",
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
    position: Tensor | None = None,
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
        position: int64 [bs], tokens that each request has generated before the chain's first position; None when
            no row's schedule is LINEAR.

    Returns:
        The verdict, on the device of z. A row's verdict does not depend on the rest of the batch. The device is
        waited for only by top-k/top-p truncation (see ``filters.truncate``); a CPU stops at each row's first
        rejection.

    Raises:
        ValueError: shapes that do not fit, or a None that the law needs.
    """
    _check_chain(z, w, q, drafts, draft_lens, law, uniforms, position)
    n = drafts.shape[1]
    if n == 0 and law.sampled is None and law.greedy_transfer is None:
        return Verdict(torch.zeros_like(draft_lens), z[:, 0].argmax(-1, keepdim=True))
    positions = torch.arange(n + 1, device=z.device)
    drafted = positions[:n] < draft_lens.unsqueeze(-1)
    chain = _Chain(z, w, q, torch.where(drafted, drafts, 0), draft_lens, uniforms, position)
    accept_lens = torch.zeros_like(draft_lens)
    closing = torch.zeros_like(draft_lens)
    if law.any_plain_greedy:
        choice = z.argmax(-1)  # of all rows: reading a few too many is cheaper than copying the others out
        accept_lens = _run_length((choice[:, :n] == chain.drafts) & drafted)
        closing = choice.gather(-1, accept_lens.unsqueeze(-1)).squeeze(-1)
    judge = _judge_stepwise if z.device.type == "cpu" else _judge_in_blocks
    for group in (law.sampled, law.greedy_transfer):
        if group is not None:
            taken, token = judge(chain, group.host, law.only(group))
            accept_lens[group.rows], closing[group.rows] = taken, token
    tokens = torch.cat([chain.drafts, torch.zeros_like(accept_lens).unsqueeze(-1)], 1)
    end = accept_lens.unsqueeze(-1)
    tokens = torch.where(positions < end, tokens, 0).scatter_(-1, end, closing.unsqueeze(-1))
    return Verdict(accept_lens, tokens)


class _Chain(NamedTuple):
    """``verify_chain``'s arguments with the ignored drafts zeroed, so that every draft is a valid token id."""

    z: Tensor
    w: Tensor | None
    q: Tensor | None
    drafts: Tensor
    lens: Tensor
    uniforms: Tensor | None
    position: Tensor | None


def _judge_stepwise(chain: _Chain, rows: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """Accept lengths and closing tokens, both int64 [m], of ``rows`` (int64 [m]): all sampled or all greedy.

    One position at a time, for the rows still in play. A rejected draft is replaced at once, while p and p̂ of
    its position are at hand.
    """
    lens = chain.lens[rows]
    taken, closing = torch.zeros_like(lens), torch.zeros_like(lens)
    alive = torch.arange(len(rows))
    for step in range(chain.drafts.shape[1]):
        alive = alive[lens[alive] > step]
        if alive.numel() == 0:
            break
        here = _entries(law, alive)
        at = torch.full_like(alive, step)
        p, p_hat = _laws_at(chain, rows[alive], at, at, here)
        accepted = _accepts(chain, rows[alive], at, p_hat, here)
        if not accepted.all():
            out = (~accepted).nonzero().squeeze(-1)
            lost = alive[out]
            if len(lost) < len(alive):
                p_hat, here = p_hat[out], here.select(out)
                p = p[out] if here.any_transfer else p_hat
            weights = _replacement(chain, rows[lost], at[out], p, p_hat, here)
            closing[lost] = _draw(chain, rows[lost], at[out], weights, here)
            alive = alive[accepted]
        taken[alive] += 1
    full = (taken == lens).nonzero().squeeze(-1)
    if full.numel():
        at = taken[full]
        part = _entries(law, full)
        closing[full] = _draw(chain, rows[full], at, target_probs(chain.z[rows[full], at], part), part)
    return taken, closing


def _judge_in_blocks(chain: _Chain, rows: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """As ``_judge_stepwise`` (``rows`` on the CPU), for devices that are faster than asking them.

    Which rows are still in play is not asked: all positions are judged, several at a time.
    """
    device, n = chain.z.device, chain.drafts.shape[1]
    accepted = torch.zeros(len(rows), n, dtype=torch.bool, device=device)
    width = max(1, BLOCK_ELEMENTS // (len(rows) * chain.z.shape[-1]))
    for start in range(0, n, width):
        count = min(width, n - start)
        pick = torch.arange(len(rows)).repeat_interleave(count)
        here = law if count == 1 else law.select(pick)
        at = torch.arange(start, start + count, device=device).repeat(len(rows))
        picked = rows[pick].to(device)
        _, p_hat = _laws_at(chain, picked, at, at, here)
        accepted[:, start : start + count] = _accepts(chain, picked, at, p_hat, here).view(-1, count)
    rows = rows.to(device)
    lens = chain.lens[rows]
    taken = _run_length(accepted & (torch.arange(n, device=device) < lens.unsqueeze(-1)))
    if n == 0:
        return taken, _draw(chain, rows, taken, target_probs(chain.z[rows, taken], law), law)
    drafted_at = taken.clamp_max(n - 1)  # a bonus position has no w and no q
    p, p_hat = _laws_at(chain, rows, taken, drafted_at, law)
    weights = _replacement(chain, rows, drafted_at, p, p_hat, law)
    return taken, _draw(chain, rows, taken, torch.where((taken == lens).unsqueeze(-1), p, weights), law)


def _entries(law: Law, rows: Tensor) -> Law:
    """The entries at ``rows``, which rise: as many as the law has are all of them in order."""
    return law if len(rows) == len(law) else law.select(rows)


def _laws_at(chain: _Chain, rows: Tensor, at: Tensor, drafted_at: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """``target_law`` of ``rows`` at z's positions ``at`` and w's and q's positions ``drafted_at``; all int64 [m]."""
    w = chain.w[rows, drafted_at] if chain.w is not None and law.logits else None
    q = chain.q[rows, drafted_at] if chain.q is not None and law.any_transfer else None
    position = None if chain.position is None else chain.position[rows] + at
    return target_law(chain.z[rows, at], w, q, law, position)


def _accepts(chain: _Chain, rows: Tensor, at: Tensor, p_hat: Tensor, law: Law) -> Tensor:
    """bool [m]: is the draft at position at[j] of row rows[j] accepted, given that all before it are?"""
    drafts = chain.drafts[rows, at]
    if not law.any_sampled:
        return p_hat.argmax(-1) == drafts
    assert chain.q is not None and chain.uniforms is not None
    reached = p_hat.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    return chain.uniforms[rows, at, 0] < accept_prob(reached, chain.q[rows, at, drafts])


def _replacement(chain: _Chain, rows: Tensor, at: Tensor, p: Tensor, p_hat: Tensor, law: Law) -> Tensor:
    """[m, V]: weights of the token that replaces the rejected draft at each position."""
    if not law.any_sampled:
        return p_hat
    assert chain.q is not None
    return residual_law(p, p_hat, chain.q[rows, at], law)


def _draw(chain: _Chain, rows: Tensor, at: Tensor, weights: Tensor, law: Law) -> Tensor:
    """int64 [m]: the token that ``weights`` [m, V] give at each position."""
    if not law.any_sampled:
        return weights.argmax(-1)
    assert chain.uniforms is not None
    return sample(weights, chain.uniforms[rows, at, 1])


def _run_length(flags: Tensor) -> Tensor:
    """int64 [m]: how many leading entries of each row of bool [m, n] are true."""
    return flags.long().cumprod(-1).sum(-1)


def _check_chain(
    z: Tensor,
    w: Tensor | None,
    q: Tensor | None,
    drafts: Tensor,
    draft_lens: Tensor,
    law: Law,
    uniforms: Tensor | None,
    position: Tensor | None,
) -> None:
    bs, n = drafts.shape
    chain, vocab = (bs, n), z.shape[-1]
    wanted = {
        "z": (z, (bs, n + 1, vocab), False),
        "w": (w, (*chain, vocab), n > 0 and law.logits is not None),
        "q": (q, (*chain, vocab), n > 0 and (law.any_sampled or law.any_transfer)),
        "draft_lens": (draft_lens, (bs,), True),
        "uniforms": (uniforms, (bs, n + 1, 2), law.any_sampled),
        "position": (position, (bs,), law.any_fading),
        "law": (law.greedy, (bs,), True),
    }
    for name, (tensor, shape, needed) in wanted.items():
        if tensor is None and needed:
            raise ValueError(f"{name} is None but the law needs it: pass a tensor of shape {shape}")
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, drafts {(bs, n)} call for {shape}")
