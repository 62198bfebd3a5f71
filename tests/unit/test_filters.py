"""Truncation against SGLang's sampler and against sorting everything; the inverse-CDF draw."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_cases import one_thread  # noqa: F401

from rapid_sgl.verify.filters import floor, sample, truncate

FULL_SORT: tuple[int, ...] = ()


def random_probs(seed: int, rows: int, vocab: int, spread: float = 3.0, coarse: bool = False) -> torch.Tensor:
    """Softmaxes of normal logits; ``coarse`` rounds the logits to bfloat16, as models emit them: many ties."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return torch.softmax(logits.bfloat16().float() if coarse else logits, dim=-1)


def random_filters(seed: int, rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row a top-k, top-p and min-p; each is off in about half of the rows."""
    g = torch.Generator().manual_seed(seed)
    off = torch.rand(3, rows, generator=g) < 0.5
    top_k = torch.randint(1, vocab + 1, (rows,), generator=g, dtype=torch.int32)
    top_p = torch.rand(rows, generator=g).clamp_min(1e-3)
    min_p = torch.rand(rows, generator=g) ** 3
    return top_k.masked_fill(off[0], 1 << 30), top_p.masked_fill(off[1], 1.0), min_p.masked_fill(off[2], 0.0)


def sglang_truncate(probs: torch.Tensor, *filters: torch.Tensor) -> torch.Tensor:
    """What SGLang's pytorch sampler draws from, renormalised and put back in token order.

    It is given top-p 2 for 1: its float32 running sum may exceed 1 and then drops the tail of a row that asked
    for no top-p (``test_filters_off_keep_every_token``).
    """
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    top_k, top_p, min_p = filters
    top_p = top_p.masked_fill(top_p == 1, 2.0)
    unused = torch.zeros(len(probs), dtype=torch.int64)
    _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), top_k, top_p, min_p, bool((min_p > 0).any()), None, unused, return_filtered_probs=True
    )
    dense = torch.zeros_like(probs).scatter_(-1, ids.long(), weights)
    return dense / dense.sum(-1, keepdim=True)


@pytest.mark.parametrize("vocab", [5, 64, 3000])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_equals_sglang(vocab, spread):
    for seed in range(5):
        probs = random_probs(seed, 40, vocab, spread)
        filters = random_filters(seed, 40, vocab)
        ours, theirs = truncate(probs, *filters), sglang_truncate(probs, *filters)
        assert torch.equal(ours > 0, theirs > 0)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_equals_sglang_up_to_which_of_equal_tokens_is_kept():
    for seed in range(5):
        probs = random_probs(seed, 40, 3000, coarse=True)
        filters = random_filters(seed, 40, 3000)
        ours, theirs = (f(probs, *filters).sort(-1).values for f in (truncate, sglang_truncate))
        assert torch.equal(ours > 0, theirs > 0)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("widths", [(1,), (2, 8), (64, 256), (1024,), (7, 1999), None])
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("coarse", [False, True])
def test_narrow_widths_equal_the_full_sort_bit_for_bit(widths, spread, coarse):
    probs = random_probs(3, 40, 2000, spread, coarse)
    filters = random_filters(4, 40, 2000)
    filters[0][:20] = torch.arange(1, 21)  # cuts next to the widths
    assert torch.equal(truncate(probs, *filters, widths), truncate(probs, *filters, FULL_SORT))


def test_a_decided_row_is_not_sorted(monkeypatch):
    """The fast path is taken: rows that the first width decides never reach a wider one."""
    probs = random_probs(0, 8, 5000, spread=6.0)
    probs[3] = 1 / 5000  # flat: top-p 0.9 keeps 4501 tokens
    top_k, top_p, min_p = torch.full((8,), 1 << 30), torch.full((8,), 0.9), torch.zeros(8)
    sizes = []
    sort = torch.sort
    monkeypatch.setattr(torch, "sort", lambda t, **kw: sizes.append(tuple(t.shape)) or sort(t, **kw))
    kept = (truncate(probs, top_k, top_p, min_p, (64, 256)) > 0).sum(-1)
    assert sizes == [(8, 64), (1, 256), (1, 5000)]
    assert kept[3] == 4501 and kept[[0, 1, 2, 4, 5, 6, 7]].max() < 64


def test_equal_tokens_at_the_cut_are_kept_by_rising_id():
    probs = torch.tensor([[0.1, 0.2, 0.2, 0.1, 0.2, 0.2]])
    off = torch.tensor([1.0]), torch.tensor([0.0])
    for widths in (FULL_SORT, (2,), (3,), (5,)):
        kept = truncate(probs, torch.tensor([3]), *off, widths) > 0
        assert kept.tolist() == [[False, True, True, False, True, False]]


def test_the_token_that_crosses_top_p_is_kept_and_mass_exactly_at_top_p_keeps_one_more():
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).expand(3, 4)
    top_p = torch.tensor([0.6, 0.75, 0.76])
    kept = truncate(probs, torch.full((3,), 4), top_p, torch.zeros(3)) > 0
    assert kept.sum(-1).tolist() == [2, 3, 3]


def test_top_p_counts_mass_before_top_k_is_applied():
    """Not mass among the survivors of top-k: 0.4 + 0.3 exceeds 0.6 of the whole, not of 0.9 renormalised."""
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    got = truncate(probs, torch.tensor([3]), torch.tensor([0.6]), torch.tensor([0.0]))
    torch.testing.assert_close(got, torch.tensor([[4 / 7, 3 / 7, 0.0, 0.0]]))


def test_filters_off_keep_every_token():
    probs = random_probs(2, 40, 3000)
    running = probs.sort(-1, descending=True).values.cumsum(-1)
    assert (running[:, :-1] > 1).any(), "the case under test: a float32 running sum that passes 1 too early"
    got = truncate(probs, torch.full((40,), 1 << 30), torch.ones(40), torch.zeros(40))
    assert torch.equal(got > 0, probs > 0)
    torch.testing.assert_close(got, probs)


def test_min_p_keeps_the_largest_even_at_1():
    probs = torch.tensor([[0.3, 0.4, 0.3]])
    assert truncate(probs, torch.tensor([9]), torch.tensor([1.0]), torch.tensor([1.0])).tolist() == [
        [0, 1, 0]
    ]
    assert floor(probs, torch.tensor([1.0])).tolist() == [[0, 1, 0]]


def test_floor_equals_truncate_with_min_p_alone():
    probs = random_probs(5, 50, 700)
    min_p = torch.rand(50) ** 4
    full = truncate(probs, torch.full((50,), 1 << 30), torch.ones(50), min_p)
    torch.testing.assert_close(floor(probs, min_p), full)
    assert torch.equal(floor(probs, min_p) > 0, full > 0)


def test_masked_vocabulary_leaves_few_tokens():
    """A grammar mask gives zero probabilities, which tie with each other beyond every width."""
    probs = torch.zeros(2, 5000)
    probs[0, [7, 4000, 4999]] = torch.tensor([0.5, 0.3, 0.2])
    probs[1, 4321] = 1.0
    filters = torch.tensor([50, 50]), torch.tensor([0.95, 0.95]), torch.zeros(2)
    torch.testing.assert_close(truncate(probs, *filters), probs)


def test_inputs_are_not_modified():
    probs = random_probs(1, 4, 300)
    before = probs.clone()
    truncate(probs, *random_filters(1, 4, 300))
    floor(probs, torch.full((4,), 0.5))
    sample(probs, torch.full((4,), 0.5))
    assert torch.equal(probs, before)


def test_sample_inverts_the_distribution_function():
    """Dyadic probabilities are exact in floating point, so the count per token on a midpoint grid is exact."""
    probs = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.125, 0.125, 0.0])
    grid = (torch.arange(1024, dtype=torch.float64) + 0.5) / 1024
    drawn = sample(probs.expand(1024, 7), grid)
    assert torch.bincount(drawn, minlength=7).tolist() == [0, 256, 512, 0, 128, 128, 0]
    assert torch.equal(drawn, drawn.sort().values), "token ids must rise with u"
    assert torch.equal(drawn, sample(probs.expand(1024, 7) * 0.03, grid)), "weights need not be normalised"


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(
        st.one_of(st.just(0.0), st.floats(2.0**-99, 1.0, width=32)), min_size=1, max_size=12
    ).filter(any),
    u=st.one_of(
        st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-53, 1 - 2.0**-24, 2.0**-60])
    ),
)
def test_sample_never_returns_a_token_of_weight_zero(weights, u):
    row = torch.tensor([weights])
    assert row[0, sample(row, torch.tensor([u], dtype=torch.float64))[0]] > 0


def test_sample_at_the_ends_over_a_large_vocabulary():
    probs = torch.softmax(torch.randn(4, 49152, generator=torch.Generator().manual_seed(0)), -1)
    probs[:, :3] = 0
    probs[:, -3:] = 0
    first, last = (
        sample(probs, torch.zeros(4)),
        sample(probs, torch.full((4,), 1 - 2.0**-53, dtype=torch.float64)),
    )
    assert (first == 3).all() and (last == 49152 - 4).all()
    narrowed = torch.full((4,), 1 - 2.0**-53, dtype=torch.float64).float()
    assert (narrowed == 1).all() and (probs.gather(1, sample(probs, narrowed)[:, None]) > 0).all()
