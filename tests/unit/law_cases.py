"""Requests of every kind, the formulas of their laws in numpy, and random batches to verify."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rapid_sgl.verify.law import Law, LawRow, Residual, Schedule, Transfer, draft_probs, sample
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
# Answers of 5 tokens: the chains of a few drafts that start in them, at ``position``, cross their end.
SCHEDULES = {
    "constant": dict(),
    "linear": dict(schedule=Schedule.LINEAR, answer_length=5),
    "confidence": dict(schedule=Schedule.CONFIDENCE, gate=0.5),
    "retrieval": dict(schedule=Schedule.RETRIEVAL, gate=0.5, score=0.8),
    "retrieval, too weak": dict(schedule=Schedule.RETRIEVAL, gate=0.8, score=0.5),
}
every_transfer = pytest.mark.parametrize("transfer", TRANSFERS.values(), ids=TRANSFERS)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
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


def np_weight(row, q, n):
    """λ or η after ``n`` generated tokens."""
    if row.schedule == Schedule.LINEAR:
        return row.weight * max(0, 1 - n / row.answer_length)
    if row.schedule == Schedule.CONFIDENCE:
        return row.weight if q.max() >= row.gate else 0.0
    if row.schedule == Schedule.RETRIEVAL:
        return row.weight * row.score if row.score >= row.gate else 0.0
    return row.weight


def np_laws(z, w, row, n=0):
    """(p, q, p̂) of one position of a sampled row, ``n`` tokens after the answer began."""
    t = row.temperature
    p, q = np_filter(softmax(z / t), row), np_filter(softmax(w / t), row)
    weight = np_weight(row, q, n)
    if row.transfer == Transfer.MIXTURE:
        return p, q, (1 - weight) * p + weight * q
    if row.transfer == Transfer.LOGITS:
        return p, q, np_filter(softmax(((1 - weight) * z + weight * w) / t), row)
    if row.transfer == Transfer.DISTILL:
        gate = q >= row.alpha * q.max()
        return p, q, np_filter(softmax(z / t + weight * gate * (q - p)), row)
    return p, q, p


def variation(a, b):
    """Total variation distance."""
    return abs(a - b).sum() / 2


def random_logits(seed, *shape, scale=2.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def random_rows(seed, count):
    """Every kind of request: greedy or sampled, each transfer, schedule and residual, each filter."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        transfer = list(TRANSFERS.values())[rng.integers(len(TRANSFERS))]
        filters = list(FILTERS.values())[rng.integers(len(FILTERS))]
        schedule = list(SCHEDULES.values())[rng.integers(len(SCHEDULES))]
        greedy, residual = bool(rng.random() < 0.35), Residual(rng.integers(2))
        rows.append(LawRow(greedy, residual=residual, **filters, **transfer, **schedule))
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
    return z, w, q, drafts, lens, law, u[..., :2], torch.arange(bs) % 6


class LargeOps(TorchDispatchMode):
    """Records the operations that read a tensor with a dimension of ``size``."""

    def __init__(self, size):
        super().__init__()
        self.size, self.seen = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(a, torch.Tensor) and self.size in a.shape for a in args):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))
