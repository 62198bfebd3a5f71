"""Re-selection: while a long answer goes on, a view follows it with spans that its latest words ask for.

A view is a list of slots, so other spans are another list: no prefill, no memory, and as all drafting no change to
what is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rapid_sgl.config import RapidConfig
from rapid_sgl.drafter.rows import DraftRows, View, view_ranges
from rapid_sgl.request import Span, spans_to_wire
from rapid_sgl.retrieval.spans import select_spans
from rapid_sgl.retrieval.token_index import TokenBm25

# The windows that are scored. Shares of the next 16 tokens of answers that quote 60 to 120 tokens from here, then from
# there, found in spans of 176 tokens out of 7,000: 0.84; windows of 64 without overlap 0.71, of 128 0.70, of 32 0.62.
WINDOW, STRIDE = 64, 32
# The query: the latest tokens of the answer, of which one counts half as much as one this much later, and the end of
# the prompt, where the question mostly is. Without the decay 0.73 in place of 0.84: where the answer has gone on to
# another passage most of the query is still about the last one.
RECENT_OUTPUT, HALF_LIFE = 64, 16
QUESTION, QUESTION_WEIGHT = 64, 0.25


class Reselection:
    """Spans of one request's view. They depend on the prompt and the committed tokens alone.

    The prompt's index is made in ``pool``; until it is there the row stays as it is.

    Args:
        prompt: token ids; more than ``config.budget``.
        spans: the request's own, in force for the first ``config.reselect`` tokens and where nothing matches.
        config: the request's.
        pool: one worker thread.
    """

    def __init__(
        self, prompt: Sequence[int], spans: Sequence[Span], config: RapidConfig, pool: ThreadPoolExecutor
    ):
        self.config = config
        self.prompt_len = len(prompt)
        self.own = list(spans)
        self.spans = self.own  # in force
        self.changes: list[tuple[int, list[Span]]] = []  # tokens committed, spans from there on
        self._scored = 0  # committed tokens that the spans in force were chosen by
        self._question = list(prompt[-QUESTION:])
        self._index: Future[TokenBm25] = pool.submit(self._build, prompt)

    def advance(self, rows: DraftRows, view: View, output_ids: Sequence[int], *, wait: bool = False) -> bool:
        """Choose again where a multiple of ``config.reselect`` tokens has been passed, and rewrite the row.

        Args:
            output_ids: committed tokens.
            wait: for the index, where what is drafted must not depend on time.

        Returns:
            Whether the row has other spans now.
        """
        due = len(output_ids) // self.config.reselect * self.config.reselect
        if due == self._scored or not (wait or self._index.done()):
            return False
        self._scored = due
        # not the tokens behind ``due``: how many of them there are depends on what was drafted
        spans = self.select(output_ids[max(0, due - RECENT_OUTPUT) : due]) or self.own
        if spans == self.spans:
            return False
        self.spans = spans
        self.changes.append((due, spans))
        rows.rewrite(view, view_ranges(self.prompt_len, spans, self.config))
        return True

    def select(self, recent: Sequence[int]) -> list[Span]:
        """Spans for an answer that ends with the tokens ``recent``, as ``select_spans``; waits for the index."""
        index, config = self._index.result(), self.config
        decay = 0.5 ** (np.arange(len(recent), 0, -1) / HALF_LIFE)
        weights = np.concatenate([decay, np.full(len(self._question), QUESTION_WEIGHT)])
        scores = index.scores([*recent, *self._question], weights)
        # Of all windows only those that can be chosen: each stride of the room is in two of them, and its two ends
        # may be cut. Sorting and checking the others would be most of the time at 128K tokens.
        room = config.budget - config.head - config.recent
        best = np.sort(np.argsort(-scores, kind="stable")[: 2 * (room // STRIDE + 4)])
        return select_spans(
            [(start + config.head, end + config.head) for start, end in map(index.windows.__getitem__, best)],
            scores[best].tolist(),
            budget=config.budget,
            prompt_len=self.prompt_len,
            head=config.head,
            recent=config.recent,
            overlapping=True,
        )

    def history(self) -> list[list[int]]:
        """Changes as ``meta_info`` carries them: tokens committed, start, end, start, end, …"""
        return [[due, *spans_to_wire(spans)] for due, spans in self.changes]

    def _build(self, prompt: Sequence[int]) -> TokenBm25:
        # the windows that a view keeps anyway would match the question best
        middle = prompt[self.config.head : self.prompt_len - self.config.recent]
        return TokenBm25(np.asarray(middle, dtype=np.int64), WINDOW, STRIDE)


def wants_reselection(config: RapidConfig) -> bool:
    """Whether a view with these options is chosen again: it was asked for and leaves room for spans."""
    return config.reselect > 0 and config.budget > config.head + config.recent
