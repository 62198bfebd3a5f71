"""From a softmax to the distribution a request samples from, and a draw from it.

Pure torch on any device. ``truncate`` keeps the token set that SGLang's pytorch sampler keeps
(``sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch``):

- tokens are ranked by falling probability, equal ones by rising id;
- top-k keeps the first k ranks;
- top-p keeps a token while the mass *before* it, in the untruncated distribution, is at most top_p;
- min-p keeps a token whose probability is at least min_p times the largest one.

A token must pass all three, and the survivors are then divided by their sum.

No result depends on which other rows are in the batch: normalisers are read off a running sum, because
``Tensor.sum`` splits a lone long row over threads and so rounds it differently from a row in a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Leading ranks tried before sorting a whole row, narrowest first. On a CPU with V = 49152, torch picks 64, 256
# and 4096 of them in about 0.03, 0.1 and 0.4 ms and sorts a row in 2-3 ms; most rows are decided by 64. On an
# accelerator the width hardly matters while each retry waits for the device.
CPU_WIDTHS = (64, 256, 4096)
ACCELERATOR_WIDTHS = (1024,)


def truncate(
    probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, widths: tuple[int, ...] | None = None
) -> Tensor:
    """Apply top-k, top-p and min-p to every row and renormalise.

    Args:
        probs: float32 or float64 [n, V], rows sum to 1. Not modified.
        top_k: int32 or int64 [n], >= 1; a value >= V turns top-k off.
        top_p: float32 [n], in (0, 1]; 1 turns top-p off. (SGLang compares a float32 running sum with 1.0
            and may drop tail tokens of less mass than its rounding error; here none is dropped.)
        min_p: float32 [n], in [0, 1]; 0 turns min-p off.
        widths: how many leading ranks to try before sorting whole rows; None picks them by device. The
            result is the same for any choice.

    Returns:
        [n, V], same dtype as ``probs``. Waits for the device once per width tried.
    """
    if widths is None:
        widths = CPU_WIDTHS if probs.device.type == "cpu" else ACCELERATOR_WIDTHS
    vocab = probs.shape[-1]
    width = widths[0] if widths and widths[0] < vocab else vocab
    values, ids = _leading(probs, width)

    before = values.cumsum(-1) - values
    limit = torch.where(top_p < 1, top_p, torch.inf).unsqueeze(-1)
    kept = (torch.arange(width, device=probs.device) < top_k.unsqueeze(-1)) & (before <= limit)
    survivors = values * (kept & (values >= values[:, :1] * min_p.unsqueeze(-1)))
    survivors /= survivors.cumsum(-1)[:, -1:]
    result = torch.zeros_like(probs).scatter_(-1, ids, survivors)
    if width == vocab:
        return result

    # A kept token as improbable as the last candidate may have been chosen over an equal one with a smaller
    # id, or have successors outside the candidates. Tokens of probability zero do not matter.
    undecided = (kept & (values <= values[:, -1:]) & (values > 0)).any(-1)
    rows = undecided.nonzero().squeeze(-1)
    if rows.numel():
        result[rows] = truncate(probs[rows], top_k[rows], top_p[rows], min_p[rows], widths[1:])
    return result


def floor(probs: Tensor, min_p: Tensor) -> Tensor:
    """``truncate`` for rows where only min-p is active: nothing has to be ranked.

    Args:
        probs: float [n, V]. Not modified.
        min_p: float32 [n], in [0, 1].
    """
    survivors = probs * (probs >= probs.amax(-1, keepdim=True) * min_p.unsqueeze(-1))
    return survivors / survivors.cumsum(-1)[:, -1:]


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Draw one token per row by inverting its cumulative distribution.

    Args:
        probs: float [n, V], non-negative weights with a positive sum; they need not be normalised.
        u: float [n], uniforms in [0, 1).

    Returns:
        int64 [n]. Never a token of weight zero.
    """
    mass = probs.cumsum(-1, dtype=torch.float64)
    ids = torch.searchsorted(mass, u.double().unsqueeze(-1) * mass[:, -1:], right=True)
    ids = ids.clamp_max(probs.shape[-1] - 1)
    # A uniform narrowed to float32 on its way here can be 1, and an accelerator's parallel prefix sum may grow
    # at a token of weight zero. Both are rounding events, so any token of the support will do.
    drawn = probs.gather(-1, ids)
    return torch.where(drawn > 0, ids, probs.argmax(-1, keepdim=True)).squeeze(-1)


def _leading(probs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest probabilities of each row, ranked, and their token ids; both [n, width].

    Which of several tokens equal to the last one get in is arbitrary when width < V.
    """
    if width == probs.shape[-1]:
        values, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
        return values, ids
    ids = torch.topk(probs, width, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = torch.sort(probs.gather(-1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
