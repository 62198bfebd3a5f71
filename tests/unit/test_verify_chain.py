"""``verify_chain`` on batches: limits of the transfers, greedy rows, masks, independence of the batch, cost."""

import itertools

import pytest
import torch
from law_cases import (
    ALMOST_ONE,
    FILTERS,
    SCHEDULES,
    TRANSFERS,
    LargeOps,
    every_filter,
    every_transfer,
    np_laws,
    one_thread,  # noqa: F401
    random_chain,
    random_logits,
    random_rows,
)

from rapid_sgl.verify import law as law_module
from rapid_sgl.verify.law import (
    Law,
    LawRow,
    Residual,
    Transfer,
    draft_probs,
    residual_law,
    sample,
    target_law,
    verify_chain,
)


def same(a, b):
    assert torch.equal(a.accept_lens, b.accept_lens) and torch.equal(a.tokens, b.tokens)


def take(chain, rows):
    z, w, q, drafts, lens, law, u, position = chain
    return z[rows], w[rows], q[rows], drafts[rows], lens[rows], law.select(rows), u[rows], position[rows]


@pytest.mark.parametrize("transfer", [Transfer.MIXTURE, Transfer.LOGITS, Transfer.DISTILL])
@pytest.mark.parametrize("greedy", [False, True])
def test_weight_zero_is_no_transfer(transfer, greedy):
    chain = random_chain(8, 4, 50, [LawRow(greedy=greedy, top_k=20)] * 8)
    plain = verify_chain(*chain)
    law = Law.from_rows([LawRow(greedy=greedy, top_k=20, transfer=transfer, weight=0.0)] * 8)
    assert not law.any_transfer
    same(plain, verify_chain(*chain[:5], law, *chain[6:]))


@every_filter
def test_weight_one_is_the_draft_distribution(filters):
    z, w = random_logits(0, 6, 40), random_logits(1, 6, 40)
    for transfer in (Transfer.MIXTURE, Transfer.LOGITS):
        law = Law.from_rows([LawRow(transfer=transfer, weight=1.0, **filters)] * 6)
        q = draft_probs(w, law)
        _, p_hat = target_law(z, w, q, law)
        torch.testing.assert_close(p_hat, q, rtol=1e-6, atol=1e-9)


def test_equal_laws_never_reject_and_leave_no_nan():
    """p̂ = q exactly: the residual has no mass, so the fallback p̂ is what is left to draw from."""
    z = random_logits(4, 3, 2, 30)
    law = Law.from_rows([LawRow(), LawRow(top_p=0.7), LawRow(transfer=Transfer.DISTILL, weight=9.0)])
    q = torch.stack([draft_probs(z[:, 0], law)], 1)
    p, p_hat = target_law(z[:, 0], None, q[:, 0], law)
    assert torch.equal(p_hat, q[:, 0])
    assert torch.equal(residual_law(p, p_hat, q[:, 0], law), p_hat)
    u = torch.full((3, 2, 2), ALMOST_ONE, dtype=torch.float64)
    verdict = verify_chain(z, None, q, q[:, 0].argmax(-1, keepdim=True), torch.ones(3).long(), law, u)
    assert verdict.accept_lens.tolist() == [1, 1, 1]


def test_a_draft_that_cannot_be_right_is_always_replaced_and_a_certain_one_never_is():
    """q is a point mass, as for drafts copied from the prompt; accept with p̂(x), else draw from p̂ without x."""
    law = Law.from_rows([LawRow()] * 2)
    z = torch.full((2, 2, 4), -torch.inf)
    z[:, 0, 1], z[:, 1, 2] = 0.0, 0.0
    q = torch.nn.functional.one_hot(torch.tensor([[1], [3]]), 4).float()
    for u in (0.0, 0.5, ALMOST_ONE):
        verdict = verify_chain(
            z,
            None,
            q,
            torch.tensor([[1], [3]]),
            torch.ones(2).long(),
            law,
            torch.full((2, 2, 2), u, dtype=torch.float64),
        )
        assert verdict.accept_lens.tolist() == [1, 0]
        assert verdict.tokens.tolist() == [[1, 2], [1, 0]]


# ---- greedy rows ----


@every_transfer
def test_greedy_commits_the_argmax_of_the_target_law(transfer):
    """Temperature and filters are ignored; the bonus is argmax z."""
    bs, n, vocab = 64, 3, 12
    z, w = random_logits(7, bs, n + 1, vocab, scale=1.0), random_logits(8, bs, n, vocab, scale=1.0)
    unfiltered = LawRow(**transfer)
    law = Law.from_rows([LawRow(greedy=True, temperature=0.01, top_k=1, top_p=0.1, **transfer)] * bs)
    q = torch.stack([draft_probs(w[:, i], law) for i in range(n)], 1)
    best = torch.tensor(
        [[np_laws(z[b, i].double().numpy(), w[b, i].double().numpy(), unfiltered)[2].argmax() for i in range(n)]
         for b in range(bs)]
    )  # fmt: skip
    if transfer:
        assert (best != z[:, :n].argmax(-1)).any(), "the transfer should change some tokens"
    right = torch.arange(bs) % (n + 1)  # how many leading drafts are the wanted token
    drafts = torch.where(torch.arange(n) < right[:, None], best, (best + 1) % vocab)
    verdict = verify_chain(z, w, q, drafts, torch.full((bs,), n), law, None)
    assert torch.equal(verdict.accept_lens, right)
    following = torch.cat([best, z[:, n:].argmax(-1)], 1)
    for b in range(bs):
        k = right[b]
        assert verdict.tokens[b].tolist() == following[b, : k + 1].tolist() + [0] * int(n - k)


def test_greedy_takes_the_first_of_equal_tokens():
    z = torch.tensor([[[0.0, 3.0, 3.0], [1.0, 1.0, 1.0]]])
    law = Law.from_rows([LawRow(greedy=True)])
    verdict = verify_chain(z, None, None, torch.tensor([[2]]), torch.tensor([1]), law, None)
    assert verdict.accept_lens.tolist() == [0] and verdict.tokens.tolist() == [[1, 0]]
    verdict = verify_chain(z, None, None, torch.tensor([[1]]), torch.tensor([1]), law, None)
    assert verdict.accept_lens.tolist() == [1] and verdict.tokens.tolist() == [[1, 0]]


def test_all_greedy_reads_the_logits_once():
    z = random_logits(0, 4, 6, 1009)
    law = Law.from_rows([LawRow(greedy=True, top_k=5, residual=Residual.PAPER)] * 4)
    drafts = z[:, :5].argmax(-1)
    with LargeOps(1009) as ops:
        verify_chain(z, None, None, drafts, torch.full((4,), 5), law, None)
    assert ops.seen == ["aten::argmax"]


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_plain_sampling_sorts_nothing_and_stops_at_the_first_rejection(accepted):
    z = random_logits(0, 1, 9, 1009)
    law = Law.from_rows([LawRow(temperature=0.7)])
    q = torch.zeros(1, 8, 1009).index_fill_(-1, torch.tensor([3]), 1.0)
    u = torch.full((1, 9, 2), 0.999)
    u[:, :accepted] = 0.0
    with LargeOps(1009) as ops:
        verdict = verify_chain(z, None, q, torch.full((1, 8), 3), torch.tensor([8]), law, u)
    assert verdict.accept_lens.tolist() == [accepted]
    assert not {"aten::sort.stable", "aten::sort", "aten::topk"} & set(ops.seen)
    # one per draft judged; the rejected one's p is what its replacement is drawn from
    assert ops.seen.count("aten::_softmax") == accepted + 1


# ---- masks ----


@pytest.mark.parametrize("transfer", [*TRANSFERS.values(), dict(transfer=Transfer.LOGITS, weight=1.0)])
@every_filter
def test_masked_tokens_are_never_emitted_and_nothing_is_nan(transfer, filters):
    z, w = random_logits(1, 6, 4, 30), random_logits(2, 6, 3, 30)
    open_tokens = torch.rand(6, 4, 30, generator=torch.Generator().manual_seed(3)) < 0.2
    open_tokens[..., 0] |= ~open_tokens.any(-1)
    open_tokens[0] = torch.arange(30) == 17  # a single token left
    z, w = z.masked_fill(~open_tokens, -torch.inf), w.masked_fill(~open_tokens[:, :3], -torch.inf)
    for residual in Residual:
        law = Law.from_rows([LawRow(**transfer, **filters, residual=residual)] * 6)
        q = torch.stack([draft_probs(w[:, i], law) for i in range(3)], 1)
        for i in range(3):
            p, p_hat = target_law(z[:, i], w[:, i], q[:, i], law)
            for probs in (q[:, i], p, p_hat, residual_law(p, p_hat, q[:, i], law)):
                assert torch.isfinite(probs).all() and (probs >= 0).all() and (probs.sum(-1) > 0).all()
                assert (probs[~open_tokens[:, i]] == 0).all()
        for u in (0.0, 0.3, 0.9, ALMOST_ONE):
            noise = torch.full((6, 4, 2), u, dtype=torch.float64)
            drafts = torch.stack([sample(q[:, i], noise[:, i, 0]) for i in range(3)], 1)
            verdict = verify_chain(z, w, q, drafts, torch.full((6,), 3), law, noise)
            for b in range(6):
                for i in range(int(verdict.accept_lens[b]) + 1):
                    assert open_tokens[b, i, verdict.tokens[b, i]]


def test_masks_without_a_common_token_leave_the_target():
    """Should not happen (both sides get the same mask), but must not produce NaN either."""
    z = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    w = torch.tensor([[-torch.inf, -torch.inf, 0.0, 1.0]])
    for weight in (0.5, 1.0):
        law = Law.from_rows([LawRow(transfer=Transfer.LOGITS, weight=weight)])
        p, p_hat = target_law(z, w, draft_probs(w, law), law)
        torch.testing.assert_close(p_hat, p)


# ---- batches ----


@pytest.mark.parametrize("seed", range(4))
def test_a_row_in_a_batch_equals_the_row_alone(seed):
    rows = random_rows(seed, 40)
    chain = random_chain(40, 4, 300, rows, seed, poison=True)
    batch = verify_chain(*chain)
    lens = set(batch.accept_lens.tolist())
    assert {0, 1, 4} <= lens, "the batch should cover rejections and bonuses"
    for b in range(40):
        alone = verify_chain(*take(chain, torch.tensor([b])))
        same(alone, type(batch)(batch.accept_lens[[b]], batch.tokens[[b]]))


def test_laws_of_a_row_are_bit_identical_in_a_batch_and_alone():
    """Two threads and a long vocabulary: torch then splits a reduction over a lone row, not one over a batch."""
    torch.set_num_threads(2)
    rows = [
        LawRow(**filters, **TRANSFERS[name])
        for filters in FILTERS.values()
        for name in ("mixture", "distill")
    ]
    rows += [LawRow(min_p=0.02 * i) for i in range(1, 7)]
    law, bs, vocab = Law.from_rows(rows), len(rows), 40000
    z, w = random_logits(0, bs, vocab), random_logits(1, bs, vocab)
    q = draft_probs(w, law)
    together = (q, *target_law(z, w, q, law))
    for b in range(bs):
        one = torch.tensor([b])
        part = law.select(one)
        alone = (draft_probs(w[one], part), *target_law(z[one], w[one], q[one], part))
        for x, y in zip(together, alone, strict=True):
            assert torch.equal(x[one], y)


@pytest.mark.parametrize("block", [1, 300 * 7, 300 * 40 * 2, 1 << 30])
def test_judging_positions_in_blocks_equals_stopping_early(block, monkeypatch):
    """The accelerator's way, which never asks the device, against the CPU's."""
    monkeypatch.setattr(law_module, "BLOCK_ELEMENTS", block)
    for seed in range(3):
        chain = random_chain(40, 4, 300, random_rows(seed, 40), seed, poison=True)
        early = verify_chain(*chain)
        with monkeypatch.context() as patch:
            patch.setattr(law_module, "_judge_stepwise", law_module._judge_in_blocks)
            same(early, verify_chain(*chain))


@pytest.mark.parametrize("filters", [dict(), dict(min_p=0.1)], ids=["plain", "min-p"])
def test_accelerators_are_not_waited_for(filters):
    """Meta tensors have no values, so anything that would read one back from the device raises."""
    kinds = itertools.product((False, True), TRANSFERS.values(), SCHEDULES.values())
    rows = [LawRow(greedy=g, **transfer, **schedule, **filters) for g, transfer, schedule in kinds]
    rows.append(LawRow(residual=Residual.PAPER, **filters))
    bs, n = len(rows), 3
    law = Law.from_rows(rows, device="meta")
    z, w = (torch.empty(bs, k, 64, device="meta") for k in (n + 1, n))
    q = torch.stack([draft_probs(w[:, i], law) for i in range(n)], 1)
    drafts, lens, position = (
        torch.empty(*s, dtype=torch.int64, device="meta") for s in ((bs, n), (bs,), (bs,))
    )
    verdict = verify_chain(z, w, q, drafts, lens, law, torch.empty(bs, n + 1, 2, device="meta"), position)
    assert verdict.tokens.device.type == "meta" and verdict.tokens.shape == (bs, n + 1)
    assert verdict.accept_lens.shape == (bs,)


def test_no_drafts_at_all_is_plain_decoding():
    rows = random_rows(1, 30)
    z, _, _, _, _, law, u, position = random_chain(30, 0, 80, rows)
    none = torch.zeros(30, 0, dtype=torch.int64)
    verdict = verify_chain(z, None, None, none, torch.zeros(30, dtype=torch.int64), law, u, position)
    p = target_law(z[:, 0], None, None, Law.from_rows([LawRow(r.greedy, r.temperature, r.top_k, r.top_p, r.min_p) for r in rows]))[0]  # fmt: skip
    wanted = torch.where(law.greedy, z[:, 0].argmax(-1), sample(p, u[:, 0, 1]))
    assert verdict.accept_lens.tolist() == [0] * 30
    assert torch.equal(verdict.tokens[:, 0], wanted)


def test_half_precision_logits_are_computed_in_float32():
    law = Law.from_rows([LawRow(top_p=0.9)] * 3)
    w = random_logits(0, 3, 200).bfloat16()
    assert torch.equal(draft_probs(w, law), draft_probs(w.float(), law))


def test_missing_or_misshapen_tensors_are_refused():
    rows = [LawRow(), LawRow(transfer=Transfer.LOGITS, weight=0.5)]
    z, w, q, drafts, lens, law, u, _ = random_chain(2, 3, 20, rows)
    for name, args in {
        "w is None": (z, None, q, drafts, lens, law, u),
        "q is None": (z, w, None, drafts, lens, law, u),
        "uniforms is None": (z, w, q, drafts, lens, law, None),
        r"z has shape \(2, 3, 20\)": (z[:, :3], w, q, drafts, lens, law, u),
        r"q has shape \(2, 2, 20\)": (z, w, q[:, :2], drafts, lens, law, u),
        r"law has shape \(1,\)": (z, w, q, drafts, lens, law.select(torch.tensor([0])), u),
        r"draft_lens has shape \(1,\)": (z, w, q, drafts, lens[:1], law, u),
    }.items():
        with pytest.raises(ValueError, match=name):
            verify_chain(*args)
