"""Vectors of chunks, each text embedded once: memory first, then the store, then the model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rapid_sgl.retrieval.embedding import Embedder
from rapid_sgl.retrieval.lru import Lru, content_key

# 48 MB for vectors of 384 numbers: four documents of a million tokens in chunks of 128.
REMEMBERED_CHUNKS = 32768
REMEMBERED_QUERIES = 256
_BATCH = 128  # texts made before another thread's document has its turn


class VectorStore(Protocol):
    """Where vectors outlive the process; ``rapid_sgl.retrieval.store.ChunkStore`` is one."""

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [len(texts), dimension] unit rows; what is missing is embedded and kept."""


class ChunkVectors:
    """Vectors by content. Safe to share between threads.

    Args:
        embedder: turns a text into a vector.
        store: asked for what memory does not hold; None to embed it right away.
        remembered: chunks held in memory.
    """

    def __init__(
        self, embedder: Embedder, store: VectorStore | None = None, remembered: int = REMEMBERED_CHUNKS
    ) -> None:
        self.embedder = embedder
        self._store = store
        self._memory: Lru[str, np.ndarray] = Lru(remembered)
        self._queries: Lru[str, np.ndarray] = Lru(REMEMBERED_QUERIES)
        self._cold = threading.Lock()

    def documents(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [len(texts), dimension], rows of length 1; each different text is embedded at most once."""
        keys = [content_key([text]) for text in texts]
        known = {key: self._memory.get(key) for key in keys}
        missing = [
            (key, text) for key, text in dict(zip(keys, texts, strict=True)).items() if known[key] is None
        ]
        for first in range(0, len(missing), _BATCH):
            known |= self._made(dict(missing[first : first + _BATCH]))
        rows = [vector for vector in (known[key] for key in keys) if vector is not None]
        return np.stack(rows) if rows else np.zeros((0, self.embedder.dimension), dtype=np.float32)

    def _made(self, batch: dict[str, str]) -> dict[str, np.ndarray]:
        """Vectors of texts by key, from the store or the model.

        One thread at a time: many requests about the same new document wait for its first one
        and find the vectors made.
        """
        with self._cold:
            known = {key: self._memory.get(key) for key in batch}
            missing = [key for key in batch if known[key] is None]
            if missing:
                source = self._store.vectors if self._store else self.embedder.documents
                for key, vector in zip(missing, source([batch[key] for key in missing]), strict=True):
                    known[key] = vector
                    self._memory.put(key, vector)
        return {key: vector for key, vector in known.items() if vector is not None}

    def query(self, text: str) -> np.ndarray:
        """float32 [dimension], length 1."""
        return self._queries.get_or_make(text, lambda: self.embedder.query(text))

    def forget_queries(self) -> None:
        """Embed every question anew, as a first asker would; for measurements."""
        self._queries = Lru(REMEMBERED_QUERIES)
