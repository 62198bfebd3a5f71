"""Requests of every kind, the formulas of their laws in numpy, and random batches to verify."""

import numpy as np
import pytest
import torch

from rapid_sgl.verify.law import Law, LawRow, Residual, Transfer, draft_probs, sample
from rapid_sgl.verify.noise import uniforms

ALMOST_ONE = 1 - 2.0**-53
TRANSFERS = {
    "none": dict(),
    "mixture": dict(transfer=Transfer.MIXTURE, weight=0.3),
    "logits": dict(transfer=Transfer.LOGITS, weight=0.4),
    "distill": dict(transfer=Transfer.DISTILL, weight=6.0),
    "distill, loose gate": dict(transfer=Transfer.DISTILL, weight=2.0, alpha=0.7),
}
FILTERS = {
    "plain": dict(),
    "cool": dict(temperature=0.6),
    "hot top-k": dict(temperature=1.7, top_k=3),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.25),
    "all": dict(temperature=1.3, top_k=4, top_p=0.9, min_p=0.1),
}
every_transfer = pytest.mark.parametrize("transfer", TRANSFERS.values(), ids=TRANSFERS)
every_filter = pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and on a busy machine each parallel region waits milliseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def np_filter(probs, row):
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept, mass = np.zeros(len(probs)), 0.0
    for rank, i in enumerate(ranked):
        if rank < row.top_k and mass <= row.top_p and probs[i] >= row.min_p * probs.max():
            kept[i] = probs[i]
        mass += probs[i]
    return kept / kept.sum()


def np_laws(z, w, row):
    """(p, q, p̂) of one position of a sampled row."""
    t = row.temperature
    p, q = np_filter(softmax(z / t), row), np_filter(softmax(w / t), row)
    if row.transfer == Transfer.MIXTURE:
        return p, q, (1 - row.weight) * p + row.weight * q
    if row.transfer == Transfer.LOGITS:
        return p, q, np_filter(softmax(((1 - row.weight) * z + row.weight * w) / t), row)
    if row.transfer == Transfer.DISTILL:
        gate = q >= row.alpha * q.max()
        return p, q, np_filter(softmax(z / t + row.weight * gate * (q - p)), row)
    return p, q, p


def random_logits(seed, *shape, scale=2.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def random_rows(seed, count):
    """Every kind of request: greedy or sampled, each transfer and residual, each filter."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        transfer = list(TRANSFERS.values())[rng.integers(len(TRANSFERS))]
        filters = list(FILTERS.values())[rng.integers(len(FILTERS))]
        rows.append(
            LawRow(bool(rng.random() < 0.35), residual=Residual(rng.integers(2)), **filters, **transfer)
        )
    return rows


def random_chain(bs, n, vocab, rows, seed=0, poison=False):
    """Arguments of ``verify_chain``: mixed lengths, drafts drawn from q; ``poison`` fills what must be ignored."""
    law = Law.from_rows(rows)
    z = random_logits(seed, bs, n + 1, vocab)
    w = z[:, :n] + random_logits(seed + 1, bs, n, vocab, scale=0.5)
    u = uniforms(torch.arange(bs) + 99 * seed, torch.zeros(bs, dtype=torch.int64), n + 1, 3)
    q = torch.stack([draft_probs(w[:, i], law) for i in range(n)], 1) if n else torch.zeros(bs, 0, vocab)
    drafts = torch.zeros(bs, n, dtype=torch.int64)
    for i in range(n):
        drafts[:, i] = torch.where(law.greedy, w[:, i].argmax(-1), sample(q[:, i], u[:, i, 2]))
    lens = torch.randint(0, n + 1, (bs,), generator=torch.Generator().manual_seed(seed))
    if poison:
        ignored = torch.arange(n) >= lens[:, None]
        w[ignored], q[ignored], drafts[ignored] = torch.nan, torch.nan, -(10**9)
    return z, w, q, drafts, lens, law, u[..., :2]
