"""Copied drafts: what followed the same words earlier in the prompt or the answer.

A copy costs no model pass, only the verification of its tokens. As a proposal it is a point mass: q(x) = 1 for
the copied token, so the law accepts it with probability p(x) and otherwise draws from p without x.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rapid_sgl.request import Span

Ints = NDArray[np.int64]

MIN_MATCH = 2  # one equal token says nothing
MAX_MATCH = 32  # longer matches are not told apart
FEW = 32  # candidates that are compared all at once
MAX_CANDIDATES = 4096  # the latest occurrences of a token that are compared further


class Copy(NamedTuple):
    """A proposal."""

    tokens: list[int]
    match: int  # equal tokens before it


NO_COPY = Copy([], 0)


class TokenIndex:
    """Where each token occurs in a prompt; memory and time linear in its length but for one sort.

    Args:
        ids: int64 [n].
    """

    def __init__(self, ids: Ints):
        self.order = np.argsort(ids, kind="stable")
        self.sorted = ids[self.order]

    def positions(self, token: int) -> Ints:
        """Rising positions of ``token``, int64 [k]."""
        first, last = np.searchsorted(self.sorted, [token, token + 1])
        return self.order[first:last]


class CopySource:
    """The text of one request, prompt and answer, to copy from.

    The prompt's index is made in ``pool``; until it is there the request copies nothing.

    Args:
        prompt: token ids.
        spans: retrieved ranges of the prompt; of equally long matches one inside them is preferred.
    """

    def __init__(self, prompt: Sequence[int], spans: Sequence[Span], pool: ThreadPoolExecutor):
        self.prompt_len = self.length = len(prompt)
        self.spans = np.array(spans, dtype=np.int64).reshape(-1, 2)
        self._text: Ints = np.zeros(self.length + 256, dtype=np.int64)
        self._index: Future[TokenIndex] = pool.submit(self._build, prompt)

    def propose(self, output_ids: Sequence[int], count: int, *, wait: bool = False) -> Copy:
        """``count`` tokens that may follow; none when fewer than MIN_MATCH tokens match.

        Args:
            wait: for the index, where what is proposed must not depend on time.
        """
        if count <= 0 or not (wait or self._index.done()):
            return NO_COPY
        self._append(output_ids)
        text, end = self._text[: self.length], self.length - 1
        where = self._occurrences(int(text[end]))
        where = where[(where >= MIN_MATCH - 1) & (where < end)][-MAX_CANDIDATES:]
        where = where[text[where - 1] == text[end - 1]]
        if not len(where):
            return NO_COPY
        where, match = self._longest(where, end)
        source = int(self._preferred(where)) + 1
        # a match that reaches the end of the text goes round: what repeats is copied from the copy
        offsets = np.arange(count) % (self.length - source)
        return Copy(text[source + offsets].tolist(), match)

    def _longest(self, where: Ints, end: int) -> tuple[Ints, int]:
        """Those of ``where`` that agree longest with the tokens up to ``end``, and how many agree (all: MIN_MATCH)."""
        text, match = self._text, MIN_MATCH
        while len(where) > FEW and match < MAX_MATCH:
            longer = where[(where >= match) & (text[where - match] == text[end - match])]
            if not len(longer):
                return where, match
            where, match = longer, match + 1
        # the rest at once: a numpy call costs more than comparing a few hundred tokens
        back = np.arange(match, MAX_MATCH)
        at = where[:, None] - back
        equal = (text[at.clip(0)] == text[end - back]) & (at >= 0)
        more = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        best = int(more.max())
        return where[more == best], match + best

    def _build(self, prompt: Sequence[int]) -> TokenIndex:
        self._text[: self.prompt_len] = np.asarray(prompt, dtype=np.int64)
        return TokenIndex(self._text[: self.prompt_len])

    def _append(self, output_ids: Sequence[int]) -> None:
        self._index.result()  # it reads the prompt from the buffer that may be replaced below
        have = self.length - self.prompt_len
        new = output_ids[have:]
        if self.length + len(new) > len(self._text):
            self._text = np.concatenate([self._text, np.zeros(len(self._text) + len(new), dtype=np.int64)])
        self._text[self.length : self.length + len(new)] = new
        self.length += len(new)

    def _occurrences(self, token: int) -> Ints:
        answer = np.flatnonzero(self._text[self.prompt_len : self.length] == token) + self.prompt_len
        return np.concatenate([self._index.result().positions(token), answer])

    def _preferred(self, where: Ints) -> Ints:
        """The latest of the best matches; those in retrieved spans come first."""
        if len(self.spans):
            starts, ends = self.spans[:, 0], self.spans[:, 1]
            at = np.searchsorted(starts, where, side="right") - 1
            inside = where[(at >= 0) & (where < ends[at])]
            if len(inside):
                return inside[-1]
        return where[-1]
