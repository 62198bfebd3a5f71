"""BM25 over token ids, for a process that has no text: windows of a prompt against the latest tokens of its answer.

The formula is that of ``bm25.Bm25Index``. bm25s, which computes it for texts, takes about as long for a query, but a
second of the interpreter to import and 90 ms of it to index 128K tokens: here that time would be the decode steps'.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rapid_sgl.retrieval.spans import Span

_K1, _B = 1.5, 0.75


class TokenBm25:
    """Lucene-style BM25 of overlapping windows of token ids; 12 bytes per token and window that it is in.

    Args:
        ids: int64 [n].
        size: tokens of a window.
        stride: from one window's start to the next one's; at most ``size``.

    Raises:
        ValueError: ``stride`` leaves gaps between the windows.
    """

    def __init__(self, ids: NDArray[np.int64], size: int, stride: int):
        if not 1 <= stride <= size:
            raise ValueError(f"stride {stride} is out of range; use 1 to {size} for windows of {size} tokens")
        total = len(ids)
        starts = range(0, max(total - (size - stride), min(total, 1)), stride)
        self.windows: list[Span] = [(start, min(start + size, total)) for start in starts]
        if not self.windows:
            return
        count = len(self.windows)
        lengths = np.array([end - start for start, end in self.windows])
        keys = np.concatenate([ids[start:end] for start, end in self.windows]) * count
        keys, frequency = np.unique(keys + np.repeat(np.arange(count), lengths), return_counts=True)
        self._vocabulary, first, windows_of = np.unique(keys // count, return_index=True, return_counts=True)
        self._first = np.append(first, len(keys))  # of a token's entries in the two arrays below
        self._window = (keys % count).astype(np.int32)
        weight = np.log(1 + (count - windows_of + 0.5) / (windows_of + 0.5))
        norm = _K1 * (1 - _B + _B * lengths / lengths.mean())
        self._weight = np.repeat(weight, windows_of) * frequency / (frequency + norm[self._window])

    def scores(self, tokens: Sequence[int], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [windows]: BM25 of ``tokens``, each as much as its weight says; 0 where none of them occurs.

        Args:
            tokens: of the query, in any order, repeated ones count repeatedly.
            weights: float64 [len(tokens)].
        """
        if not self.windows:
            return np.zeros(0)
        query, place = np.unique(np.asarray(tokens, dtype=np.int64), return_inverse=True)
        at = np.searchsorted(self._vocabulary, query).clip(max=len(self._vocabulary) - 1)
        known = self._vocabulary[at] == query
        weight, at = np.bincount(place, weights, len(query))[known], at[known]
        first = self._first[at]
        counts = self._first[at + 1] - first
        # entries of all tokens, one after the other
        skipped = np.cumsum(counts) - counts
        entries = np.repeat(first - skipped, counts) + np.arange(counts.sum())
        share = self._weight[entries] * np.repeat(weight, counts)
        return np.bincount(self._window[entries], share, len(self.windows)).astype(np.float64, copy=False)
