"""Copied drafts: what followed the same words earlier in the prompt or the answer.

A copy costs no model pass, only the verification of its tokens. As a proposal it is a point mass: q(x) = 1 for
the copied token, so the law accepts it with probability p(x) and otherwise draws from p without x.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rapid_sgl.request import Span

Ints = NDArray[np.int64]

MIN_MATCH = 2  # one equal token says nothing
MAX_MATCH = 32  # longer matches are not told apart
MAX_CANDIDATES = 1024  # the latest places with the same two tokens that are compared further


class Copy(NamedTuple):
    """A proposal."""

    tokens: list[int]
    match: int  # equal tokens before it


NO_COPY = Copy([], 0)


class PairIndex:
    """Where the two tokens that end at each place of a prompt stood before; memory linear in its length.

    A search costs a microsecond in every step of every request, so it looks things up in plain arrays: a call of
    numpy takes longer than all it does here. Only the index is built by numpy, which frees the interpreter for
    the steps of other requests meanwhile.

    Args:
        ids: int64 [n].
    """

    def __init__(self, ids: Ints):
        pairs = (ids[:-1] << 32) | ids[1:]
        order = np.argsort(pairs, kind="stable")
        ordered = pairs[order]
        same = ordered[1:] == ordered[:-1]
        before = np.full(len(ids), -1)
        before[1 + order[1:][same]] = 1 + order[:-1][same]
        last = np.append(~same, True)[: len(pairs)]
        self.text = _array(ids)
        self.before = _array(before)  # [n], the place before with the same pair, or -1
        self.pairs = _array(ordered[last])  # rising, each once
        self.places = _array(1 + order[last])  # the latest of each

    def latest(self, pair: int) -> int:
        """The last place where ``pair`` ends, or -1."""
        at = bisect_left(self.pairs, pair)
        return self.places[at] if at < len(self.pairs) and self.pairs[at] == pair else -1


class CopySource:
    """The text of one request, prompt and answer, to copy from.

    The prompt's index is made in ``pool``; until it is there the request copies nothing.

    Args:
        prompt: token ids.
        spans: retrieved ranges of the prompt; of equally long matches one inside them is preferred.
    """

    def __init__(self, prompt: Sequence[int], spans: Sequence[Span], pool: ThreadPoolExecutor):
        self.prompt_len = len(prompt)
        self.starts, self.ends = [start for start, _ in spans], [end for _, end in spans]
        self._answer: dict[int, int] = {}  # pair: its latest place in the answer
        self._index: Future[PairIndex] = pool.submit(lambda: PairIndex(np.asarray(prompt, dtype=np.int64)))

    def propose(self, output_ids: Sequence[int], count: int, *, wait: bool = False) -> Copy:
        """``count`` tokens that may follow; none when fewer than MIN_MATCH tokens match.

        Args:
            wait: for the index, where what is proposed must not depend on time.
        """
        if count <= 0 or not (wait or self._index.done()):
            return NO_COPY
        index = self._index.result()
        self._append(index, output_ids)
        place, match = self._longest(index)
        if match < MIN_MATCH:
            return NO_COPY
        text, source = index.text, place + 1
        tokens = text[source : source + count].tolist()
        while (
            len(tokens) < count
        ):  # the match reaches the end of the text: what repeats is copied from the copy
            tokens.append(tokens[len(tokens) - (len(text) - source)])
        return Copy(tokens, match)

    def _longest(self, index: PairIndex) -> tuple[int, int]:
        """The best place whose tokens agree with the last ones, and how many do: the longest match, of equal ones
        those in spans, of these the latest."""
        text, before = index.text, index.before
        end = len(text) - 1
        best, match, inside = -1, 0, False
        place = before[end]
        for _ in range(MAX_CANDIDATES):
            if place < 0 or (match == MAX_MATCH and (inside or not self.starts)):
                break
            equal, most = MIN_MATCH, min(MAX_MATCH, place + 1)
            while equal < most and text[place - equal] == text[end - equal]:
                equal += 1
            if equal > match or (equal == match and not inside and self._in_span(place)):
                best, match, inside = place, equal, self._in_span(place)
            place = before[place]
        return best, match

    def _append(self, index: PairIndex, output_ids: Sequence[int]) -> None:
        text, before, answer = index.text, index.before, self._answer
        for token in output_ids[len(text) - self.prompt_len :]:
            place = len(text)
            pair = (text[-1] << 32) | token
            seen = answer.get(pair)
            before.append(index.latest(pair) if seen is None else seen)
            text.append(token)
            answer[pair] = place

    def _in_span(self, place: int) -> bool:
        at = bisect_right(self.starts, place) - 1
        return at >= 0 and place < self.ends[at]


def _array(values: Ints) -> array[int]:
    return array("q", values.astype(np.int64).tobytes())
