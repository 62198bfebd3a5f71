"""Schedules of a transfer's weight: the law stays exact for each, and begins and ends where it says."""

import numpy as np
import pytest
import torch
from law_cases import (
    ALMOST_ONE,
    FILTERS,
    SCHEDULES,
    TRANSFERS,
    LargeOps,
    every_schedule,
    every_transfer,
    np_laws,
    one_thread,  # noqa: F401
    random_chain,
    random_logits,
    variation,
)
from law_tree import Tree, emitted_law, expected_law

from rapid_sgl.verify.law import Law, LawRow, Schedule, Transfer, draft_probs, target_law, verify_chain

changing_transfer = pytest.mark.parametrize("transfer", list(TRANSFERS.values())[1:], ids=list(TRANSFERS)[1:])


# ---- in closed form ----


@every_transfer
@every_schedule
@pytest.mark.parametrize("filters", [FILTERS["plain"], FILTERS["all"]], ids=["plain", "all"])
def test_what_is_emitted_follows_the_target_law(transfer, schedule, filters):
    tree = Tree(2, LawRow(**transfer, **schedule, **filters), seed=11, position=1)
    joint = emitted_law(tree)
    assert abs(joint.sum() - 1) < 1e-6
    assert abs(joint - expected_law(tree)).max() < 1e-6
    if not transfer or not tree.row.request_weight:
        p = tree.laws[0][()][0]
        assert abs(joint.sum(1) - p).max() < 1e-6, "without a transfer the law must be the target's own"


@changing_transfer
@every_schedule
def test_three_positions_across_the_end_of_the_answer(transfer, schedule):
    """Positions 3, 4, 5 of an answer of 5: LINEAR's weight is 2/5, 1/5 and 0 of its start."""
    row = LawRow(**transfer, **schedule, temperature=0.9, top_p=0.95)
    tree = Tree(3, row, seed=1, dtype=torch.float32, position=3)
    assert abs(emitted_law(tree) - expected_law(tree)).max() < 1e-6


@pytest.mark.parametrize("seed", range(30))
def test_random_requests(seed):
    rng = np.random.default_rng(seed)
    transfer = Transfer(rng.integers(1, 4))
    row = LawRow(
        temperature=rng.uniform(0.3, 2),
        top_p=rng.choice([1.0, rng.uniform(0.3, 1)]),
        transfer=transfer,
        weight=rng.uniform(0, 20 if transfer == Transfer.DISTILL else 1),
        alpha=rng.uniform(),
        schedule=Schedule(rng.integers(4)),
        gate=rng.uniform(0.2, 0.9),
        score=rng.uniform(),
        answer_length=int(rng.integers(1, 8)),
    )
    tree = Tree(2, row, seed, position=int(rng.integers(9)))
    assert abs(emitted_law(tree) - expected_law(tree)).max() < 1e-6


# ---- the tests above would see a schedule that is off ----


@changing_transfer
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_position_off_by_one_is_another_law(transfer, wrong):
    tree = Tree(2, LawRow(**transfer, schedule=Schedule.LINEAR, answer_length=5), seed=3, position=1)
    assert abs(emitted_law(tree) - expected_law(tree)).max() < 1e-6
    other = expected_law(tree, tree.expected(tree.position + wrong))
    assert variation(other, expected_law(tree)) > 1e-3


@changing_transfer
def test_a_chain_that_stays_at_its_first_position_is_another_law(transfer):
    tree = Tree(2, LawRow(**transfer, schedule=Schedule.LINEAR, answer_length=5), seed=3, position=1)
    stuck = [tree.expected(tree.position - i)[i] for i in range(tree.n)]
    assert variation(expected_law(tree, stuck), emitted_law(tree)) > 1e-3


@changing_transfer
def test_a_gate_that_opens_at_the_wrong_prefixes_is_another_law(transfer):
    tree = Tree(2, LawRow(**transfer, schedule=Schedule.CONFIDENCE, gate=0.5), seed=3)
    is_open = [q.max() >= 0.5 for level in tree.laws for _, q, _ in level.values()]
    assert any(is_open) and not all(is_open), "the tree should have open and closed positions"
    emitted = emitted_law(tree)
    for gate in (0.0, 1.0):  # always open, never open
        wrong = tree.expected(0, LawRow(**transfer, schedule=Schedule.CONFIDENCE, gate=gate))
        assert variation(expected_law(tree, wrong), emitted) > 1e-3


# ---- where each begins and ends ----


def laws_of(row, position=None, seed=0):
    """(q, p, p̂) of one position with random float32 logits."""
    z, w, law = random_logits(seed, 1, 6), random_logits(seed + 1, 1, 6), Law.from_rows([row])
    q = draft_probs(w, law)
    return q, *target_law(z, w, q, law, None if position is None else torch.tensor([position]))


@changing_transfer
def test_linear_begins_constant_and_ends_without_transfer(transfer):
    row = LawRow(**transfer, schedule=Schedule.LINEAR, answer_length=4)
    assert torch.equal(laws_of(row, 0)[2], laws_of(LawRow(**transfer))[2])
    for position in range(1, 4):
        assert variation(*laws_of(row, position)[1:]) > 1e-4, "some transfer is left"
    for position in (4, 5, 10**9):
        _, p, p_hat = laws_of(row, position)
        assert torch.equal(p_hat, p)


@changing_transfer
def test_confidence_holds_from_its_gate_on(transfer):
    constant = laws_of(LawRow(**transfer))
    top = constant[0].max()
    for gate, is_open in ((top, True), (torch.nextafter(top, torch.tensor(0.0)), True), (torch.nextafter(top, torch.tensor(1.0)), False)):  # fmt: skip
        _, p, p_hat = laws_of(LawRow(**transfer, schedule=Schedule.CONFIDENCE, gate=gate.item()))
        assert torch.equal(p_hat, constant[2] if is_open else p)


@changing_transfer
def test_retrieval_is_a_constant_weight_of_the_request(transfer):
    weight, score = transfer["weight"], 0.7
    scaled = laws_of(LawRow(**{**transfer, "weight": weight * score}))[2]
    for gate, is_open in ((0.0, True), (score, True), (0.71, False)):
        row = LawRow(**transfer, schedule=Schedule.RETRIEVAL, gate=gate, score=score)
        assert Law.from_rows([row]).any_transfer == is_open
        _, p, p_hat = laws_of(row)
        assert torch.equal(p_hat, scaled if is_open else p)
    assert not Law.from_rows([LawRow(**transfer, schedule=Schedule.RETRIEVAL)]).any_transfer, "no score given"


def test_weight_zero_leaves_the_target_whatever_the_drafter_masks():
    """0 · -inf must not turn up."""
    z = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    w = torch.tensor([[-torch.inf, 0.0, 0.0, 1.0]])
    law = Law.from_rows(
        [LawRow(transfer=Transfer.LOGITS, weight=0.5, schedule=Schedule.LINEAR, answer_length=2)]
    )
    p, p_hat = target_law(z, w, draft_probs(w, law), law, torch.tensor([2]))
    assert torch.equal(p_hat, p)


@every_schedule
@changing_transfer
def test_greedy_commits_the_argmax_of_the_scheduled_law(transfer, schedule):
    bs, n, vocab = 48, 3, 12
    z, w = random_logits(7, bs, n + 1, vocab, scale=1.0), random_logits(8, bs, n, vocab, scale=1.0)
    law = Law.from_rows([LawRow(greedy=True, **transfer, **schedule)] * bs)
    position = torch.arange(bs) % 6
    q = torch.stack([draft_probs(w[:, i], law) for i in range(n)], 1)
    row = LawRow(**transfer, **schedule)
    at = lambda b, i: (z[b, i].double().numpy(), w[b, i].double().numpy(), row, int(position[b]) + i)  # noqa: E731
    best = torch.tensor([[np_laws(*at(b, i))[2].argmax() for i in range(n)] for b in range(bs)])
    right = torch.arange(bs) // 12  # how many leading drafts are the wanted token
    drafts = torch.where(torch.arange(n) < right[:, None], best, (best + 1) % vocab)
    verdict = verify_chain(z, w, q, drafts, torch.full((bs,), n), law, None, position)
    assert torch.equal(verdict.accept_lens, right)
    following = torch.cat([best, z[:, n:].argmax(-1)], 1)
    assert torch.equal(verdict.tokens.gather(-1, right[:, None]), following.gather(-1, right[:, None]))


# ---- cost and errors ----


def large_ops(row, vocab=1009):
    """Vocabulary-sized operations of verifying two chains of 4 with this request, the first draft rejected."""
    z, w, q, drafts, _, law, u, position = random_chain(2, 4, vocab, [row] * 2)
    u = torch.full_like(u, ALMOST_ONE)
    drafts = q.argmin(-1) if row.greedy else drafts
    with LargeOps(vocab) as ops:
        verify_chain(z, w, q, drafts, torch.full((2,), 4), law, u, position)
    return ops.seen


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("name", list(SCHEDULES)[1:])
def test_what_schedules_cost(name, greedy):
    plain = large_ops(LawRow(greedy=greedy))
    assert large_ops(LawRow(greedy=greedy, **SCHEDULES[name])) == plain, "no transfer, no cost"
    for transfer in list(TRANSFERS.values())[1:]:
        constant = large_ops(LawRow(greedy=greedy, **transfer))
        scheduled = large_ops(LawRow(greedy=greedy, **transfer, **SCHEDULES[name]))
        if name == "retrieval, too weak":
            assert scheduled == plain
        elif name == "confidence":
            assert scheduled.count("aten::amax") == constant.count("aten::amax") + 1
            assert len(scheduled) <= len(constant) + 2  # the gate reads q once, through a view of all rows
        else:
            assert scheduled == constant


def test_linear_needs_positions():
    row = LawRow(transfer=Transfer.MIXTURE, weight=0.5, schedule=Schedule.LINEAR, answer_length=9)
    z, w, q, drafts, lens, law, u, position = random_chain(2, 3, 20, [LawRow(), row])
    with pytest.raises(ValueError, match="position is None"):
        verify_chain(z, w, q, drafts, lens, law, u)
    with pytest.raises(ValueError, match=r"position has shape \(1,\)"):
        verify_chain(z, w, q, drafts, lens, law, u, position[:1])
    with pytest.raises(ValueError, match=r"position is None.*LINEAR"):
        target_law(z[:, 0], w[:, 0], q[:, 0], law)
