"""BM25 scores of chunks against a question, by the bm25s library."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

# Words are runs of word characters. Chinese and Japanese write no spaces, so each of their
# characters is a term of its own: coarse, but it needs no dictionary and BM25's idf discounts
# the common ones.
_UNSPACED = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TERM = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+")

# bm25s' own defaults, named because `full_score` depends on them.
_K1, _B = 1.5, 0.75
# A long question is never answered word for word: only so many of its rarest words are expected.
_EXPECTED_TERMS = 12


def terms(text: str) -> list[str]:
    """The lower-cased index terms of a text, in order."""
    return _TERM.findall(text.lower())


def query_terms(query: str) -> list[str]:
    """The terms of a question that say what it is about.

    Question words and other English stop words are left out, unless it has nothing else.
    """
    from bm25s.stopwords import STOPWORDS_EN_PLUS

    words = terms(query)
    return [word for word in words if word not in STOPWORDS_EN_PLUS] or words


class Bm25Index:
    """Lucene-style BM25 over fixed texts; a question costs well under a millisecond per thousand.

    Safe to share between threads.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        # Imported late: bm25s brings numba and scipy, a second or two that a refused document need not cost.
        import bm25s

        corpus = [terms(text) for text in texts]
        self._size = len(texts)
        self._index = bm25s.BM25(k1=_K1, b=_B, method="lucene")
        self._frequencies = Counter(term for text in corpus for term in set(text))
        # bm25s cannot index texts without a single term; then nothing can match either.
        self._vocabulary: dict[str, int] = {}
        if any(corpus):
            self._index.index(corpus, show_progress=False)
            self._vocabulary = self._index.vocab_dict

    def scores(self, query: str) -> np.ndarray:
        """float32 [number of texts]: BM25 of ``query``, 0 where no term of it occurs."""
        words = [word for word in query_terms(query) if word in self._vocabulary]
        if not words:
            return np.zeros(self._size, dtype=np.float32)
        return self._index.get_scores(words)

    def full_score(self, query: str) -> float:
        """What a text of average length scores that holds each word of ``query`` once."""
        weights = [self._weight(self._frequencies[word]) for word in query_terms(query)]
        return sum(heapq.nlargest(_EXPECTED_TERMS, weights)) / (1 + _K1)

    def _weight(self, frequency: int) -> float:
        """Lucene's inverse document frequency."""
        return math.log(1 + (self._size - frequency + 0.5) / (frequency + 0.5))


def bm25_scores(texts: Sequence[str], query: str) -> np.ndarray:
    """BM25 of ``query`` for each text, indexed for this one question.

    Returns:
        float32 [len(texts)]; 0 where no term of the query occurs.
    """
    return Bm25Index(texts).scores(query)
