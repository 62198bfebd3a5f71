"""The law of verification in closed form, on five-token vocabularies.

Two independent sides are compared: laws computed in numpy from their formulas, and what ``verify_chain`` does,
measured without sampling (``law_tree``).
"""

import numpy as np
import pytest
import torch
from law_cases import (
    ALMOST_ONE,
    every_filter,
    every_transfer,
    np_filter,
    one_thread,  # noqa: F401
    softmax,
    variation,
)
from law_tree import Tree, V, emitted_law, expected_law, repeated_verify

from rapid_sgl.verify.law import LawRow, Residual, Transfer, accept_prob, residual_law, target_law


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
