"""How well each chunk answers a question: words (BM25), meaning (vectors), both, and refinements.

A score above 0 is evidence, 0 is none; only the order of scores means something across scorers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rapid_sgl.retrieval.bm25 import Bm25Index
from rapid_sgl.retrieval.embedding import Reranker
from rapid_sgl.retrieval.lru import Lru, content_key
from rapid_sgl.retrieval.vectors import ChunkVectors

# Cosine below which a chunk is no evidence; the paper's value for BGE-M3.
SIMILARITY_THRESHOLD = 0.3
# all-MiniLM-L6-v2 gives lower cosines than BGE-M3: at 0.3 it misses half of the paraphrased
# needles that it finds at 0.1 (docs/retrieval.md).
EMBEDDED_THRESHOLD = 0.1
# Reciprocal rank fusion's constant, as in Cormack et al. 2009.
FUSION_CONSTANT = 60
# Share of a question's words, by weight, that a chunk must have to count in fusion. Chunks with less
# match by chance: of 48 questions in the words of the text the right chunk had 0.50 or more, and no
# chunk had over 0.36 for 48 questions in other words (docs/retrieval.md). Without this bound chance
# matches take half of the budget from what vectors have found.
WORD_SHARE = 0.4
# Documents whose BM25 index is kept: one takes about as much memory as its text.
INDEXED_DOCUMENTS = 16
RERANKED_CHUNKS = 32
DIVERSE_CHUNKS = 64


class Scorer(Protocol):
    """Scores texts against a question. Safe to share between threads."""

    def scores(self, texts: Sequence[str], query: str) -> np.ndarray:
        """float32 [len(texts)], not negative; 0 where a text has nothing to say about ``query``."""


class Bm25Scorer:
    """BM25; the index of a document is built at its first question.

    Args:
        least_share: of the question's words, by weight, that a text must have; 0: any word will do.
    """

    def __init__(self, least_share: float = 0.0, remembered: int = INDEXED_DOCUMENTS) -> None:
        self._least_share = least_share
        self._indexes: Lru[str, Bm25Index] = Lru(remembered)

    def scores(self, texts: Sequence[str], query: str) -> np.ndarray:
        index = self._indexes.get_or_make(content_key(texts), lambda: Bm25Index(texts))
        scores = index.scores(query)
        if self._least_share:
            scores = np.where(scores >= self._least_share * index.full_score(query), scores, 0)
        return scores.astype(np.float32)


class DenseScorer:
    """Cosine similarity of embeddings; 0 below ``threshold``."""

    def __init__(self, vectors: ChunkVectors, threshold: float = SIMILARITY_THRESHOLD) -> None:
        self._vectors = vectors
        self._threshold = threshold

    def scores(self, texts: Sequence[str], query: str) -> np.ndarray:
        vector = self._vectors.query(query)
        cosine = self._vectors.documents(texts) @ vector
        return np.where(cosine >= self._threshold, np.maximum(cosine, 0), 0).astype(np.float32)


class HybridScorer:
    """Reciprocal rank fusion: the sum of 1 / (k + rank) over scorers that have evidence for a text."""

    def __init__(self, scorers: Sequence[Scorer], k: float = FUSION_CONSTANT) -> None:
        self._scorers = scorers
        self._k = k

    def scores(self, texts: Sequence[str], query: str) -> np.ndarray:
        total = np.zeros(len(texts), dtype=np.float32)
        for scorer in self._scorers:
            scores = scorer.scores(texts, query)
            order = _ranked(scores)
            total[order] += 1 / (self._k + 1 + np.arange(len(order), dtype=np.float32))
        return total


class RerankingScorer:
    """The best chunks of another scorer, put in order by a cross-encoder.

    Args:
        pool: how many; each costs a pass of the cross-encoder.
    """

    def __init__(self, base: Scorer, reranker: Reranker, pool: int = RERANKED_CHUNKS) -> None:
        self._base, self._reranker, self._pool = base, reranker, pool

    def scores(self, texts: Sequence[str], query: str) -> np.ndarray:
        scores = _below_one(self._base.scores(texts, query))
        pool = _ranked(scores)[: self._pool]
        if len(pool):
            scores[pool] = 1 + self._reranker.scores([texts[index] for index in pool], query)
        return scores


class DiverseScorer:
    """Maximal marginal relevance: a chunk that repeats a better one comes later.

    Args:
        weight: of relevance against novelty, 0 to 1; 1 leaves the order as it is.
        pool: best chunks that are ordered.
    """

    def __init__(
        self, base: Scorer, vectors: ChunkVectors, weight: float = 0.7, pool: int = DIVERSE_CHUNKS
    ) -> None:
        if not 0 <= weight <= 1:
            raise ValueError(f"diversity weight {weight} is out of range; use 0 to 1 (1: relevance alone)")
        self._base, self._vectors, self._weight, self._pool = base, vectors, weight, pool

    def scores(self, texts: Sequence[str], query: str) -> np.ndarray:
        scores = _below_one(self._base.scores(texts, query))
        pool = _ranked(scores)[: self._pool]
        vectors = self._vectors.documents([texts[index] for index in pool])
        order = mmr_order(scores[pool], vectors @ vectors.T, self._weight)
        scores[pool[order]] = 2 - np.arange(len(pool), dtype=np.float32) / max(1, len(pool))
        return scores


def mmr_order(relevance: np.ndarray, similarity: np.ndarray, weight: float) -> list[int]:
    """Order of maximal marginal relevance (Carbonell and Goldstein 1998).

    Args:
        relevance: float32 [n], 0 to 1.
        similarity: float32 [n, n] between the chunks.
        weight: of relevance; the rest weighs the similarity to the nearest chunk already taken.
    """
    order: list[int] = []
    left = np.ones(len(relevance), dtype=bool)
    nearest = np.zeros(len(relevance), dtype=np.float32)
    while left.any():
        gain = np.where(left, weight * relevance - (1 - weight) * nearest, -np.inf)
        best = int(gain.argmax())
        order.append(best)
        left[best] = False
        nearest = np.maximum(nearest, similarity[best])
    return order


def _ranked(scores: np.ndarray) -> np.ndarray:
    """int64: places of the positive scores, best first; ties in document order."""
    order = np.argsort(-scores, kind="stable")
    return order[scores[order] > 0]


def _below_one(scores: np.ndarray) -> np.ndarray:
    """float32: the same order, scaled into [0, 1]."""
    return (scores / max(float(scores.max(initial=0.0)), 1e-9)).astype(np.float32)
