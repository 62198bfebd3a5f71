"""A bounded map that forgets what was not used for longest."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """At most ``size`` entries; safe to share between threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value of ``key``, made outside the lock: two threads may make the same one."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value


def content_key(texts: Iterable[str]) -> str:
    """A hash of texts and of where one ends and the next begins; 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        # PDF text and JSON may hold lone surrogates, which strict UTF-8 refuses.
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
