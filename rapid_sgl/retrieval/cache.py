"""Selections that are used again when nearly the same question comes back."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from rapid_sgl.retrieval.bm25 import query_terms
from rapid_sgl.retrieval.spans import Span

# Of all-MiniLM-L6-v2: rewordings of a question lie above 0.92, the same question about another
# subject between 0.83 and 0.87.
SIMILARITY = 0.92
TTL_S = 600.0
MAX_ENTRIES = 1024


@dataclass
class _Entry:
    query: str
    terms: frozenset[str]
    vector: np.ndarray | None  # float32 [dimension], unit length
    spans: tuple[Span, ...]
    expires: float


class SelectionCache:
    """Spans chosen for a question, by document and options. Safe to share between threads.

    A question finds the selection of the same question, or of one with a similar vector *and*
    the same content words: in long questions a name or a number moves the vector little, but
    it changes what has to be retrieved.

    Args:
        similarity: least cosine between two questions that share a selection.
        ttl_s: seconds until a selection is forgotten.
        size: selections held; the one unused for longest goes first.
        clock: seconds, rising; for tests.
    """

    def __init__(
        self,
        similarity: float = SIMILARITY,
        ttl_s: float = TTL_S,
        size: int = MAX_ENTRIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._similarity, self._ttl, self._size, self._clock = similarity, ttl_s, size, clock
        # Least recently used first; the key's second part is the question's text.
        self._entries: OrderedDict[tuple[Hashable, str], _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self, key: Hashable, query: str, vector: Callable[[], np.ndarray] | None = None
    ) -> list[Span] | None:
        """The selection for ``query`` or a near-duplicate of it, None when there is none.

        Args:
            key: document and everything else that a selection depends on.
            vector: makes the question's vector, float32 [dimension] of unit length; called only
                when the words of another question agree. None: only the same question counts.
        """
        exact = (key, _normal(query))
        with self._lock:
            self._forget_expired()
            if exact in self._entries:
                return self._use(exact)
        if vector is None:
            return None
        terms = frozenset(query_terms(query))
        with self._lock:
            near = [
                (name, entry.vector)
                for name, entry in self._entries.items()
                if name[0] == key and entry.terms == terms and entry.vector is not None
            ]
        if not near:
            return None
        similarities = np.stack([other for _, other in near]) @ vector()
        best = int(similarities.argmax())
        if similarities[best] < self._similarity:
            return None
        with self._lock:
            return self._use(near[best][0])

    def put(self, key: Hashable, query: str, spans: Sequence[Span], vector: np.ndarray | None = None) -> None:
        """Remember what was selected for ``query``; ``vector`` lets near-duplicates find it."""
        expires = self._clock() + self._ttl
        entry = _Entry(query, frozenset(query_terms(query)), vector, tuple(spans), expires)
        with self._lock:
            self._entries[key, _normal(query)] = entry
            self._entries.move_to_end((key, _normal(query)))
            self._forget_expired()
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)

    def _use(self, name: tuple[Hashable, str]) -> list[Span] | None:
        entry = self._entries.get(name)
        if entry is None:  # another thread's `put` has pushed it out
            return None
        self._entries.move_to_end(name)
        return list(entry.spans)

    def _forget_expired(self) -> None:
        now = self._clock()
        for name in [name for name, entry in self._entries.items() if entry.expires <= now]:
            del self._entries[name]


def _normal(query: str) -> str:
    return " ".join(query.split())
