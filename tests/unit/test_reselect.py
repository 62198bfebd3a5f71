"""Re-selection: which spans the latest words of an answer choose, and what the row then holds."""

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_sgl.config import RapidConfig, RapidOptionError
from rapid_sgl.drafter.choice import Abilities
from rapid_sgl.drafter.reselect import STRIDE, WINDOW, Reselection, wants_reselection
from rapid_sgl.drafter.rows import DraftRows, view_ranges
from rapid_sgl.request import Limits, parse_options
from rapid_sgl.retrieval.bm25 import Bm25Index
from rapid_sgl.retrieval.token_index import TokenBm25
from rapid_sgl.state import RequestTable

CONFIG = RapidConfig(budget=300, head=20, recent=80, reselect=16)
SECTION = 100
RNG = np.random.default_rng(0)
# twenty sections of a hundred tokens, each with a vocabulary of its own beside common words
PROMPT = [
    int(token)
    for section in range(20)
    for token in np.where(
        RNG.random(SECTION) < 0.5,
        RNG.integers(0, 30, SECTION),
        RNG.integers(1000 * section + 100, 1000 * section + 160, SECTION),
    )
]


def section(index, start=0, stop=SECTION):
    return PROMPT[index * SECTION + start : index * SECTION + stop]


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Later:
    """A pool that has not come round to it."""

    def submit(self, make, *args):
        self.work = lambda: self.future.set_result(make(*args))
        self.future = Future()
        return self.future


def a_row(config=CONFIG, spans=(), prompt_len=20 * SECTION):
    target = torch.arange(3 * 4000, dtype=torch.int32).view(3, 4000) + 7
    rows = DraftRows(target)
    return rows, rows.build(1, prompt_len, view_ranges(prompt_len, spans, config))


def covered(spans):
    return {token for start, end in spans for token in range(start, end)}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=90), st.integers(1, 9), st.integers(1, 9), st.data())
def test_scores_are_those_of_bm25s(ids, size, stride, data):
    stride = min(size, stride)
    index = TokenBm25(np.array(ids), size, stride)
    assert index.windows[0][0] == 0 and index.windows[-1][1] == len(ids)
    assert all(0 < end - start <= size for start, end in index.windows)
    assert all(b[0] - a[0] == stride and b[0] <= a[1] for a, b in pairwise(index.windows))
    query = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=20))
    texts = [" ".join(f"w{token}" for token in ids[start:end]) for start, end in index.windows]
    wanted = Bm25Index(texts).scores(" ".join(f"w{token}" for token in query))
    got = index.scores(query, np.ones(len(query)))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        index.scores(query, np.full(len(query), 0.5)), wanted / 2, rtol=1e-5, atol=1e-6
    )


def test_an_index_of_nothing_and_gaps():
    assert len(TokenBm25(np.array([], dtype=np.int64), 4, 2).scores([1], np.ones(1))) == 0
    for stride in (0, 5):
        with pytest.raises(ValueError, match=f"stride {stride} is out of range; use 1 to 4"):
            TokenBm25(np.arange(9), 4, stride)


def test_spans_follow_the_answer(pool):
    """What the answer says now is chosen, not what it said before, and the room is filled but not passed."""
    reselection = Reselection(PROMPT, [], CONFIG, pool)
    for first, then in ((3, 12), (12, 3), (7, 15)):
        spans = reselection.select(section(then, 30, 94))
        assert covered(spans) >= set(range(then * SECTION + 30, then * SECTION + 94))
        moved = reselection.select([*section(first, 0, 40), *section(then, 0, 24)])
        assert covered(moved) >= set(range(then * SECTION, then * SECTION + 24))
        for chosen in (spans, moved):
            assert CONFIG.head <= chosen[0][0] and chosen[-1][1] <= len(PROMPT) - CONFIG.recent
            assert all(a[1] < b[0] for a, b in pairwise(chosen))
            assert len(covered(chosen)) == CONFIG.budget - CONFIG.head - CONFIG.recent


@pytest.mark.parametrize("size", ["whole", "ragged"])
def test_only_windows_that_can_be_chosen_are_looked_at(pool, size):
    """The same spans as from all windows."""
    prompt = PROMPT if size == "whole" else PROMPT[: -17 - STRIDE // 2]
    reselection = Reselection(prompt, [], CONFIG, pool)
    index = reselection._index.result()
    few = {"budget": 300, "prompt_len": len(prompt), "head": 20, "recent": 80, "overlapping": True}
    from rapid_sgl.drafter import reselect

    calls = []
    original = reselect.select_spans

    def spy(windows, scores, **options):
        calls.append(len(windows))
        return original(windows, scores, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reselect, "select_spans", spy)
        chosen = [reselection.select(section(i, 10, 74)) for i in range(19)]
    for i, spans in enumerate(chosen):
        recent = section(i, 10, 74)
        decay = 0.5 ** (np.arange(len(recent), 0, -1) / reselect.HALF_LIFE)
        weights = np.concatenate([decay, np.full(reselect.QUESTION, reselect.QUESTION_WEIGHT)])
        scores = index.scores([*recent, *prompt[-reselect.QUESTION :]], weights)
        everything = [(start + 20, end + 20) for start, end in index.windows]
        assert spans == original(everything, scores.tolist(), **few)
    assert max(calls) < len(index.windows)


def test_the_row_holds_the_chosen_spans_and_the_answer(pool):
    own = [(200, 260), (700, 760)]
    rows, view = a_row(spans=own)
    reselection = Reselection(PROMPT, own, CONFIG, pool)
    target, before = rows.target[1], view.length
    lens = torch.tensor([len(PROMPT)])
    output = []
    for step, token in enumerate(section(11)):
        output.append(token)
        if reselection.advance(rows, view, output, wait=True):
            assert reselection.changes[-1] == (len(output), reselection.spans)
        rows.extend([view], lens + step, 2)
        kept = view_ranges(len(PROMPT), reselection.spans, CONFIG)
        wanted = torch.cat(
            [target[start:end] for start, end in kept] + [target[len(PROMPT) : len(PROMPT) + step + 3]]
        )
        assert torch.equal(rows.req_to_token[1, : len(wanted)], wanted)
        assert (view.length, view.shift) == (before, len(PROMPT) - before)
        if len(output) < CONFIG.reselect:
            assert reselection.spans == own
    # the row moved to the section that is quoted, and its slots are the request's own
    assert covered(reselection.spans) >= set(range(1140, 1190))
    assert set(rows.req_to_token[1, : view.length].tolist()) <= set(target[: len(PROMPT)].tolist())
    assert reselection.history() == [
        [due, *(bound for span in spans for bound in span)] for due, spans in reselection.changes
    ]
    assert reselection.changes and all(due % CONFIG.reselect == 0 for due, _ in reselection.changes)


def test_ranges_of_another_size_are_refused():
    rows, view = a_row()
    before = rows.req_to_token.clone()
    with pytest.raises(ValueError, match="ranges of 301 tokens for a view of 300"):
        rows.rewrite(view, [(0, 301)])
    assert torch.equal(rows.req_to_token, before)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(1, 11), min_size=1, max_size=20), st.booleans())
def test_spans_depend_on_the_committed_tokens_alone(pool, every, accepted, retracted):
    """However the tokens came, in chains or one at a time, and after a retraction, which starts anew."""
    config = RapidConfig(budget=300, head=20, recent=80, reselect=every)
    text = [*section(4), *section(13), *section(8)]
    fast, slow = (Reselection(PROMPT, [(100, 150)], config, pool) for _ in range(2))
    (rows, view), (others, other) = a_row(config), a_row(config)
    done = 0
    for count in accepted:
        for _ in range(count):
            done = min(done + 1, len(text))
            slow.advance(others, other, text[:done], wait=True)
        if retracted and count == 11:
            fast = Reselection(PROMPT, [(100, 150)], config, pool)
        fast.advance(rows, view, text[:done], wait=True)
        assert fast.spans == slow.spans
        due = done // every * every
        wanted = fast.select(text[max(0, due - 64) : due]) if due else [(100, 150)]
        assert fast.spans == wanted


def test_nothing_waits_for_the_index_unless_it_must():
    later = Later()
    reselection = Reselection(PROMPT, [], CONFIG, later)
    rows, view = a_row()
    before = rows.req_to_token.clone()
    output = section(5, 0, 40)
    assert not reselection.advance(rows, view, output)
    assert torch.equal(rows.req_to_token, before) and not reselection.changes
    later.work()
    # caught up with as soon as it is there, by the tokens up to the last multiple
    assert reselection.advance(rows, view, output)
    assert reselection.changes == [(32, reselection.select(output[:32]))]


def test_an_answer_that_matches_nothing_gets_the_requests_own_spans(pool):
    own = [(300, 350)]
    prompt = [*PROMPT, *[77777] * 80]  # and a question of words that nothing else has
    reselection = Reselection(prompt, own, CONFIG, pool)
    rows, view = a_row(spans=own, prompt_len=len(prompt))
    assert not reselection.advance(rows, view, [99999] * 16, wait=True)
    assert reselection.spans == own
    assert reselection.advance(rows, view, [99999] * 16 + section(6, 20, 36), wait=True)
    assert reselection.advance(rows, view, [99999] * 112, wait=True)
    assert reselection.spans == own


def a_request(prompt=PROMPT, **custom):
    params = SimpleNamespace(
        custom_params=custom, top_k=1, top_p=1.0, min_p=0.0, temperature=1.0, max_new_tokens=200,
        sampling_seed=None, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0,
        min_new_tokens=0, logit_bias=None, stop_token_ids=None,
    )  # fmt: skip
    return SimpleNamespace(
        rid="r", origin_input_ids=prompt, output_ids=section(9, 0, 40), sampling_params=params,
        lora_id=None, kv=SimpleNamespace(req_pool_idx=1), tokenizer=None, eos_token_ids=None,
    )  # fmt: skip


SMALL = {"rapid_budget": 300, "rapid_head": 20, "rapid_recent": 80, "rapid_copy": "off"}


@pytest.mark.parametrize(
    ("options", "followed"),
    [
        ({"rapid_reselect": 16}, True),
        ({"rapid_reselect": 16, "rapid_drafter": "auto"}, True),
        ({}, False),
        ({"rapid_reselect": 0}, False),
        ({"rapid_reselect": 16, "rapid_drafter": "off"}, False),
        ({"rapid_reselect": 16, "rapid_recent": 280}, False),  # no room for spans
        ({"rapid_reselect": 16, "rapid_budget": 3000}, False),  # a prompt within the budget
    ],
)
def test_which_requests_are_followed(options, followed):
    rows = DraftRows(torch.arange(2 * 4000, dtype=torch.int32).view(2, 4000))
    table = RequestTable(rows, None, RapidConfig(), 4, Abilities())
    req = a_request(**{**SMALL, **options})
    state = table.get(req)
    table.reselect(req, state, wait=True)
    info = state.meta_info(finished=True)
    assert table.reselections == info.get("rapid_reselections", 0) == (1 if followed else 0)
    assert ("rapid_reselections" in info) == followed
    assert "rapid_reselected" not in info  # only in a trace


def test_a_trace_tells_the_spans():
    rows = DraftRows(torch.arange(2 * 4000, dtype=torch.int32).view(2, 4000))
    table = RequestTable(rows, None, RapidConfig(), 4, Abilities())
    req = a_request(**SMALL, rapid_reselect=16, rapid_trace="on")
    state = table.get(req)
    table.reselect(req, state, wait=True)
    assert "rapid_reselected" not in state.meta_info(finished=False)
    ((due, *bounds),) = state.meta_info(finished=True)["rapid_reselected"]
    assert due == 32
    spans = list(zip(bounds[::2], bounds[1::2], strict=True))
    assert covered(spans) >= set(range(9 * SECTION, 9 * SECTION + 32))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1, "rapid_reselect=-1 is out of range; use an integer at least 0"),
        (1.5, "rapid_reselect=1.5 is a number, not an integer"),
        ("16", "rapid_reselect='16' is a string, not an integer"),
        (True, "rapid_reselect=True is a boolean, not an integer"),
    ],
)
def test_wrong_values(value, text):
    with pytest.raises(RapidOptionError, match=text):
        parse_options({"rapid_reselect": value}, RapidConfig(), Limits(3000, 4))


def test_the_option_has_every_form():
    assert RapidConfig().reselect == 0 and not wants_reselection(RapidConfig())
    assert RapidConfig.from_env({"RAPID_SGL_RESELECT": "32"}).reselect == 32
    with pytest.raises(RapidOptionError, match="RAPID_SGL_RESELECT='often' is not an integer"):
        RapidConfig.from_env({"RAPID_SGL_RESELECT": "often"})
    assert WINDOW >= STRIDE
