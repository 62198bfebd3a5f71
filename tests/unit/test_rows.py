"""Draft rows: which prompt tokens a view keeps, and that rows list the target's slots."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from rapid_sgl.config import RapidConfig
from rapid_sgl.drafter.rows import TAIL_GRID, DraftRows, tail_variants, view_ranges


@st.composite
def view_cases(draw):
    budget = draw(st.integers(1, 60))
    head = draw(st.integers(0, budget))
    recent = draw(st.integers(0, budget - head))
    prompt_len = draw(st.integers(budget + 1, 200))
    room = budget - head - recent
    spans, at = [], 0
    while room > 0 and draw(st.booleans()):
        start = at + draw(st.integers(0, 30))
        end = min(start + draw(st.integers(1, room)), prompt_len)
        if start >= end:
            break
        spans.append((start, end))
        room -= end - start
        at = end
    return prompt_len, spans, RapidConfig(budget=budget, head=head, recent=recent)


@given(view_cases())
def test_view_keeps_windows_and_spans_and_fills_the_budget(case):
    prompt_len, spans, config = case
    ranges = view_ranges(prompt_len, spans, config)
    kept = [token for start, end in ranges for token in range(start, end)]
    assert kept == sorted(set(kept))
    assert len(kept) == config.budget
    wanted = set(range(config.head)) | set(range(prompt_len - config.recent, prompt_len))
    for start, end in spans:
        wanted |= set(range(start, end))
    assert wanted <= set(kept)
    # merged: neighbours are never adjacent
    assert all(end < start for (_, end), (start, _) in pairwise(ranges))


def test_rest_of_the_budget_lengthens_the_recent_window():
    config = RapidConfig(budget=40, head=4, recent=10)
    assert view_ranges(100, [], config) == [(0, 4), (64, 100)]
    assert view_ranges(100, [(50, 56)], config) == [(0, 4), (50, 56), (70, 100)]
    # the window grows over a span it meets, which then costs nothing extra
    assert view_ranges(100, [(80, 88)], config) == [(0, 4), (64, 100)]


def test_rows_list_the_targets_slots():
    target = torch.randint(1, 1000, (5, 64), dtype=torch.int32)
    rows = DraftRows(target)
    view = rows.build(3, 50, [(0, 4), (20, 26), (40, 50)])
    assert (view.length, view.shift) == (20, 30)
    wanted = torch.cat([target[3, 0:4], target[3, 20:26], target[3, 40:50]])
    assert torch.equal(rows.req_to_token[3, :20], wanted)
    slots = rows.extend([view], torch.tensor([50]), 5)
    assert torch.equal(slots[0], target[3, 50:55].long())
    assert torch.equal(rows.req_to_token[3, :26], torch.cat([wanted, target[3, 50:56]]))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.booleans()), max_size=12))
def test_rows_stay_complete_whatever_is_committed(steps):
    """After any history of drafted and undrafted steps, and of accepted drafts, nothing that was generated is missing."""
    target = torch.randint(1, 10**6, (2, 200), dtype=torch.int32)
    rows = DraftRows(target)
    ranges = [[(0, 4), (20, 26), (40, 50)], [(0, 30)]]
    views = [rows.build(i, prompt, ranges[i]) for i, prompt in enumerate((50, 60))]
    rows.req_to_token[:, 30:] = -1  # what an earlier request may have left
    lens = torch.tensor([50, 60])
    for width, accepted, second_drafted in steps:
        drafted = [0, 1] if second_drafted else [0]
        if width:
            rows.extend([views[i] for i in drafted], lens[drafted], width)
        lens += torch.tensor([min(accepted, width + 1), 1])
    rows.extend(views, lens, 3)
    for view, seq_len, kept in zip(views, lens.tolist(), ranges, strict=True):
        row = target[view.pool_idx]
        wanted = torch.cat(
            [row[start:end] for start, end in kept] + [row[view.length + view.shift : seq_len + 4]]
        )
        assert torch.equal(rows.req_to_token[view.pool_idx, : len(wanted)], wanted)


@given(st.integers(1200, 6000), st.integers(-64, 64), st.booleans())
def test_questions_of_similar_length_share_the_start_of_the_tail(prompt_len, longer, with_span):
    config = RapidConfig()
    spans = [(100, 300)] if with_span else []
    one, other = (
        tail_variants(view_ranges(length, spans, config), spans)
        for length in (prompt_len, prompt_len + longer)
    )
    # the first question is stored under its preferred start; the second finds it among its own
    assert one[0][:-1] in [variant[:-1] for variant in other]
    assert one[0][-1][0] in [variant[-1][0] for variant in other]
    for variant in (*one, *other):
        tokens = sum(end - start for start, end in variant)
        assert config.budget - 3 * TAIL_GRID <= tokens <= config.budget


def test_tails_never_cut_retrieved_tokens_or_short_windows():
    config = RapidConfig(budget=300, head=10, recent=100)
    ranges = view_ranges(1000, [(700, 890)], config)
    assert tail_variants(ranges, [(700, 890)]) == [ranges]
    small = view_ranges(1000, [], RapidConfig(budget=120, head=10, recent=100))
    assert tail_variants(small, []) == [small]
