"""Copied drafts against a search by hand."""

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_sgl.drafter.copies import MAX_MATCH, MIN_MATCH, NO_COPY, CopySource


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def propose(pool, prompt, output, count=4, spans=()):
    return CopySource(prompt, spans, pool).propose(output, count, wait=True)


def by_hand(text, count):
    """(longest match before another place, the latest such place's continuation)."""
    best, where = 0, None
    for end in range(len(text) - 1):
        match = 0
        while match < MAX_MATCH and match <= end and text[end - match] == text[len(text) - 1 - match]:
            match += 1
        if match >= max(best, 1):
            best, where = match, end
    if best < MIN_MATCH:
        return [], 0
    follow = list(text)
    for offset in range(count):
        follow.append(follow[where + 1 + offset])
    return follow[len(text) :], best


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=40)
)
def test_longest_and_latest_match(pool, prompt, output):
    assert propose(pool, prompt, output) == by_hand([*prompt, *output], 4)


def test_the_answer_grows_and_is_copied_from_too(pool):
    source = CopySource([1, 2, 3, 4, 5], (), pool)
    output = []
    for token in [7, 8, 9, 6, 7, 8]:
        output.append(token)
        copy = source.propose(output, 3, wait=True)
    assert copy == ([9, 6, 7], 2)
    output += [*range(10, 700), 2, 3]  # more than the buffer had room for
    assert source.propose(output, 2, wait=True) == ([4, 5], 2)


def test_a_match_in_a_retrieved_span_wins_over_a_later_one(pool):
    prompt = [5, 6, 1, 1, 1, 5, 6, 2, 2, 2]
    assert propose(pool, prompt, [5, 6], 2).tokens == [2, 2]
    assert propose(pool, prompt, [5, 6], 2, spans=[(0, 3)]).tokens == [1, 1]


def test_nothing_to_copy(pool):
    assert propose(pool, [1, 2, 3], [4]) == NO_COPY
    assert propose(pool, [1, 2, 3], [9, 2]) == NO_COPY  # one equal token
    assert propose(pool, [1, 2, 3], [1, 2], count=0) == NO_COPY


def test_until_the_index_is_there_nothing_is_copied():
    class Later:
        """A pool that has not come round to it."""

        def submit(self, make, *args):
            return Future()

    assert CopySource([1, 2, 3], (), Later()).propose([1, 2], 2) == NO_COPY
