"""The law of verification in closed form, on five-token vocabularies.

Two independent sides are compared. The expected laws are computed in numpy, from their formulas. What
``verify_chain`` does is *measured*: acceptance probabilities and closing laws are read off it by bisecting the
uniforms it is given, and the law of what it emits follows by enumerating every chain of drafts. No step samples.
"""

import itertools

import numpy as np
import pytest
import torch
from law_cases import (
    ALMOST_ONE,
    every_filter,
    every_transfer,
    np_filter,
    np_laws,
    one_thread,  # noqa: F401
    softmax,
)

from rapid_sgl.verify.law import (
    Law,
    LawRow,
    Residual,
    Transfer,
    accept_prob,
    draft_probs,
    residual_law,
    target_law,
    verify_chain,
)

V = 5


def variation(a, b):
    return abs(a - b).sum() / 2


# ---- a draft tree: logits for every prefix, and all its chains as one batch ----


class Tree:
    """Random target and draft logits at every prefix of up to ``n`` tokens, laid out as the V^n chains.

    ``accept[i]`` [chains] is the measured probability that draft i is accepted once reached, ``closing[i]``
    [chains, V] the measured law of the token emitted at position i when the drafts before it stand and draft i
    (if i < n) is rejected; meaningless for a chain that cannot stop there.
    """

    def __init__(self, n, row, seed, dtype=torch.float64):
        rng = np.random.default_rng(seed)
        self.n, self.row = n, row
        self.z = [rng.normal(size=(V,) * (i + 1)) * 1.5 for i in range(n + 1)]
        self.w = [level + rng.normal(size=level.shape) for level in self.z[:n]]
        self.chains = list(itertools.product(range(V), repeat=n))
        self.law = Law.from_rows([row] * len(self.chains))
        self.z_rows, self.w_rows = self.rows_of(self.z, dtype), self.rows_of(self.w, dtype)
        self.q_rows = torch.stack([draft_probs(self.w_rows[:, i], self.law) for i in range(n)], 1)
        self.laws = [
            {at: np_laws(self.z[i][at], self.w[i][at], row) for at in itertools.product(range(V), repeat=i)}
            for i in range(n)
        ]
        self.measure()

    def rows_of(self, levels, dtype):
        rows = [[level[chain[:i]] for i, level in enumerate(levels)] for chain in self.chains]
        return torch.tensor(np.array(rows), dtype=dtype)

    def measure(self):
        """Bisect one uniform per experiment; experiments x chains are one batch of ``verify_chain``."""
        n, count = self.n, len(self.chains)
        accepts = [(i, 0, None) for i in range(n)]
        draws = [(i, 1, token) for i in range(n + 1) for token in range(V - 1)]
        experiments = accepts + draws
        u = torch.zeros(len(experiments), count, n + 1, 2, dtype=torch.float64)  # 0 accepts what can be
        for e, (i, stream, _) in enumerate(experiments):
            if stream == 1 and i < n:
                u[e, :, i, 0] = ALMOST_ONE  # reject draft i

        def below(guess):
            """bool [experiments, chains]: is draft i accepted, or a token <= ``token`` drawn, at this uniform?"""
            for e, (i, stream, _) in enumerate(experiments):
                u[e, :, i, stream] = guess[e]
            verdict = repeated_verify(self, u.flatten(0, 1))
            lens, tokens = verdict.accept_lens.view(-1, count), verdict.tokens.view(-1, count, n + 1)
            return torch.stack(
                [
                    lens[e] > i if stream == 0 else tokens[e, :, i] <= token
                    for e, (i, stream, token) in enumerate(experiments)
                ]
            )

        shares = share_of_unit_interval(below, (len(experiments), count))
        self.accept = shares[:n]
        steps = shares[n:].reshape(n + 1, V - 1, count).transpose(0, 2, 1)
        self.closing = np.diff(steps, prepend=0.0, append=1.0, axis=2)


def repeated_verify(tree, u):
    """``verify_chain`` on the tree's chains, repeated to the length of ``u`` [m * chains, n+1, 2]."""
    rows = torch.arange(len(tree.chains)).repeat(len(u) // len(tree.chains))
    lens = torch.full((len(u),), tree.n)
    drafts = torch.tensor(tree.chains)[rows]
    return verify_chain(
        tree.z_rows[rows], tree.w_rows[rows], tree.q_rows[rows], drafts, lens, tree.law.select(rows), u
    )


def share_of_unit_interval(below, shape):
    """Where ``below`` turns from true to false on [0, 1), elementwise, to 2^-34; 0 if never true, 1 if always."""
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    never, always = ~below(low), below(torch.full_like(low, ALMOST_ONE))
    for _ in range(34):
        middle = (low + high) / 2
        true = below(middle)
        low, high = torch.where(true, middle, low), torch.where(true, high, middle)
    return torch.where(never, 0.0, torch.where(always, 1.0, low)).numpy()


def emitted_law(tree):
    """Measured joint law of the first n tokens, a chain that stops early being continued by p̂ itself."""
    joint = np.zeros((V,) * tree.n)
    for row, chain in enumerate(tree.chains):
        reached = 1.0  # probability that this chain is drafted up to here and accepted
        for i, token in enumerate(chain):
            q = tree.q_rows[row, i].double().numpy()
            # what is drafted after a rejection is immaterial: count it once, on the chain that ends in zeros
            stop = reached * q[token] * (1 - tree.accept[i][row])
            if stop > 0 and not any(chain[i + 1 :]):
                for t in range(V):
                    continue_from((*chain[:i], t), stop * tree.closing[i][row, t], tree, joint)
            reached *= q[token] * tree.accept[i][row]
        joint[chain] += reached
    return joint


def continue_from(prefix, mass, tree, joint):
    if len(prefix) == tree.n:
        joint[prefix] += mass
        return
    p_hat = tree.laws[len(prefix)][prefix][2]
    for t in range(V):
        continue_from((*prefix, t), mass * p_hat[t], tree, joint)


def expected_law(tree):
    """Π p̂ from the formulas."""
    joint = np.zeros((V,) * tree.n)
    for chain in tree.chains:
        joint[chain] = np.prod([tree.laws[i][chain[:i]][2][token] for i, token in enumerate(chain)])
    return joint


@every_transfer
@every_filter
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_what_is_emitted_follows_the_target_law(transfer, filters, dtype):
    tree = Tree(2, LawRow(**transfer, **filters), seed=11, dtype=dtype)
    joint = emitted_law(tree)
    assert abs(joint.sum() - 1) < 1e-6
    assert abs(joint - expected_law(tree)).max() < 1e-6
    if not transfer:
        assert abs(joint.sum(1) - tree.laws[0][()][0]).max() < 1e-6, (
            "without a transfer the law must be the target's own"
        )
    else:
        assert variation(joint.sum(1), tree.laws[0][()][0]) > 1e-3, "this transfer should change the law"


@every_transfer
@pytest.mark.parametrize("seed", range(3))
def test_three_positions(transfer, seed):
    tree = Tree(3, LawRow(**transfer, temperature=0.9, top_p=0.95), seed)
    assert abs(emitted_law(tree) - expected_law(tree)).max() < 1e-6


def random_request(rng):
    """Any sampled request whose weight, temperature and filters have no round values."""
    transfer = Transfer(rng.integers(4))
    return LawRow(
        temperature=rng.uniform(0.3, 2),
        top_k=int(rng.integers(1, V + 2)),
        top_p=rng.choice([1.0, rng.uniform(0.1, 1)]),
        min_p=rng.choice([0.0, rng.uniform(0, 0.5)]),
        transfer=transfer,
        weight=rng.uniform(0, 20 if transfer == Transfer.DISTILL else 1),
        alpha=rng.uniform(),
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_requests(seed):
    tree = Tree(2, random_request(np.random.default_rng(seed)), seed)
    assert abs(emitted_law(tree) - expected_law(tree)).max() < 1e-6


@every_transfer
@every_filter
def test_the_bonus_follows_p(transfer, filters):
    tree = Tree(1, LawRow(**transfer, **filters), seed=5)
    for row, chain in enumerate(tree.chains):
        if tree.accept[0][row] > 0:
            p = np_filter(softmax(tree.z[1][chain] / tree.row.temperature), tree.row)
            assert abs(tree.closing[1][row] - p).max() < 1e-6


@every_transfer
@every_filter
def test_public_functions_equal_the_formulas_and_are_what_verify_chain_uses(transfer, filters):
    for seed in range(3):
        tree = Tree(1, LawRow(**transfer, **filters), seed)
        p, q, p_hat = tree.laws[0][()]
        z, w = tree.z_rows[:, 0], tree.w_rows[:, 0]
        ours = target_law(z, w, tree.q_rows[:, 0], tree.law)
        for got, want in zip((tree.q_rows[:, 0], *ours), (q, p, p_hat), strict=True):
            assert abs(got.numpy() - want).max() < 1e-6
        accept = tree.accept[0]
        assert abs(accept - accept_prob(ours[1][0], tree.q_rows[0, 0]).numpy())[q > 0].max() < 1e-9
        weights = residual_law(*ours, tree.q_rows[:, 0], tree.law)
        weights = (weights / weights.sum(-1, keepdim=True)).numpy()
        rejectable = accept < 1
        assert rejectable.any()
        assert abs(tree.closing[0] - weights)[rejectable].max() < 1e-8
        exact = np.maximum(p_hat - q, 0)
        exact = exact / exact.sum() if exact.any() else p_hat
        assert abs(weights[0] - exact).max() < 1e-6


def test_verdicts_turn_once_as_a_uniform_rises():
    """What bisection relies on: accept lengths fall and closing tokens rise with the uniform, on a fine grid."""
    tree = Tree(1, LawRow(), seed=2)
    grid = (torch.arange(400, dtype=torch.float64) / 400).repeat_interleave(V)
    u = torch.zeros(len(grid), 2, 2, dtype=torch.float64)
    u[:, 0, 0] = grid
    lens = repeated_verify(tree, u).accept_lens.view(400, V)
    assert (lens.diff(dim=0) <= 0).all() and lens.min() == 0 and lens.max() == 1
    for position, accept in ((0, ALMOST_ONE), (1, 0.0)):
        u = torch.full((len(grid), 2, 2), accept, dtype=torch.float64)
        u[:, position, 1] = grid
        verdict = repeated_verify(tree, u)
        tokens = torch.where(verdict.accept_lens == position, verdict.tokens[:, position], -1).view(400, V)
        assert (tokens.diff(dim=0) >= 0).all() and tokens.max() == V - 1


# ---- the paper's residual ----


@pytest.mark.parametrize("eta", [5.0, 20.0])
def test_paper_residual_is_algorithm_1_and_follows_neither_law(eta):
    for seed in range(4):
        row = LawRow(transfer=Transfer.DISTILL, weight=eta, residual=Residual.PAPER)
        tree = Tree(1, row, seed)
        p, q, p_hat = tree.laws[0][()]
        accept = np.minimum(1, p_hat / q)
        residual = np.maximum(np.maximum(p - p_hat, p - q), 0)
        algorithm_1 = q * accept + (q * (1 - accept)).sum() * residual / residual.sum()
        emitted = emitted_law(tree)
        assert abs(emitted - algorithm_1).max() < 1e-6
        assert variation(emitted, p) > 0.02 and variation(emitted, p_hat) > 0.02


@every_filter
def test_paper_residual_without_transfer_is_lossless(filters):
    tree = Tree(2, LawRow(residual=Residual.PAPER, **filters), seed=3)
    assert abs(emitted_law(tree) - expected_law(tree)).max() < 1e-6
