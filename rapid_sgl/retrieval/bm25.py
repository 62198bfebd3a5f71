"""BM25 scores of chunks against a question, by the bm25s library."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

# Words are runs of word characters. Chinese and Japanese write no spaces, so each of their
# characters is a term of its own: coarse, but it needs no dictionary and BM25's idf discounts
# the common ones.
_UNSPACED = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TERM = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+")


def terms(text: str) -> list[str]:
    """The lower-cased index terms of a text, in order."""
    return _TERM.findall(text.lower())


def bm25_scores(texts: Sequence[str], query: str) -> np.ndarray:
    """Lucene-style BM25 of ``query`` for each text.

    Question words and other English stop words of the query are ignored, unless it has
    nothing else.

    Returns:
        float32 [len(texts)]; 0 where no term of the query occurs.
    """
    # Imported late: bm25s brings numba and scipy, a second or two that a refused document need not cost.
    import bm25s
    from bm25s.stopwords import STOPWORDS_EN_PLUS

    words = terms(query)
    query_terms = [word for word in words if word not in STOPWORDS_EN_PLUS] or words
    corpus = [terms(text) for text in texts]
    vocabulary = {term for text in corpus for term in text}
    query_terms = [term for term in query_terms if term in vocabulary]
    if not query_terms:
        return np.zeros(len(texts), dtype=np.float32)
    index = bm25s.BM25()
    index.index(corpus, show_progress=False)
    return index.get_scores(query_terms)
