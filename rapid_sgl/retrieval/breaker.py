"""A store that fails is left alone for a while, so that nobody waits for it again and again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from rapid_sgl.retrieval.chroma import StoreError
from rapid_sgl.retrieval.vectors import VectorStore

T = TypeVar("T")

logger = logging.getLogger(__name__)

PAUSE_S = 5.0


class CircuitBreaker:
    """Health of one store, shared by everything that uses it. Safe to share between threads.

    After a failure every call fails at once with the same error, until ``pause_s`` are over and a call
    is let through again. Failure and recovery are logged, once each.

    Args:
        pause_s: seconds after a failure in which the store is not asked.
        clock: seconds, rising; for tests.
    """

    def __init__(self, pause_s: float = PAUSE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._clock = pause_s, clock
        self._error: StoreError | None = None  # of the last call, None when it went well
        self._again_at = 0.0
        self._lock = threading.Lock()

    def call(self, work: Callable[[], T]) -> T:
        """What ``work`` returns.

        Raises:
            StoreError: of ``work``, or of an earlier call that failed less than ``pause_s`` ago.
        """
        with self._lock:
            if self._error is not None and self._clock() < self._again_at:
                raise StoreError(str(self._error)) from self._error
        try:
            result = work()
        except StoreError as error:
            with self._lock:
                if self._error is None:
                    logger.warning(
                        "RAPID auto spans: %s; prompts go on without spans until it answers", error
                    )
                self._error, self._again_at = error, self._clock() + self._pause_s
            raise
        with self._lock:
            if self._error is not None:
                logger.info("RAPID auto spans: the store answers again")
            self._error = None
        return result


class GuardedStore:
    """A store behind a circuit breaker; a ``vectors.VectorStore``."""

    def __init__(self, store: VectorStore, breaker: CircuitBreaker) -> None:
        self._store, self._breaker = store, breaker

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [len(texts), dimension] unit rows; what is missing is embedded and kept.

        Raises:
            StoreError: the store fails, or failed just now.
        """
        return self._breaker.call(lambda: self._store.vectors(texts))
