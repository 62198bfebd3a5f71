"""Connections to Chroma: a folder that processes take turns on, or a server by URL."""

from __future__ import annotations

import contextlib
import fcntl
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

# A turn lasts milliseconds: texts are embedded between turns, not within.
LOCK_TIMEOUT_S = 60.0
# Chroma's own client waits for ever, and so would a request that needs its spans.
SERVER_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0  # a host that is gone does not answer at all


class StoreError(RuntimeError):
    """The store cannot be used; the text names its place, the fault and the fix."""


class Connection(Protocol):
    """A place where Chroma keeps its data."""

    place: str

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Chroma's client for the length of a block; other clients may come at the next turn.

        Raises:
            StoreError: the place cannot be reached, or Chroma failed inside the block.
        """


def connect(place: str) -> Connection:
    """The connection to a folder or to ``http(s)://host[:port]`` (port 8000 if none is named); nothing is opened yet.

    Raises:
        StoreError: a malformed URL.
    """
    if "://" in place:
        return _Server(place)
    return _Folder.at(Path(place).expanduser().absolute())


class _Server:
    def __init__(self, url: str) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port or 8000
        except ValueError as error:
            raise StoreError(f"{url!r} is no URL of a Chroma server ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise StoreError(f"{url!r} is no URL of a Chroma server; use http://HOST:PORT, or a folder")
        self.place = f"{parts.scheme}://{parts.netloc}" if parts.port else f"{url.rstrip('/')}:{port}"
        self._host, self._port, self._ssl = parts.hostname, port, parts.scheme == "https"
        self._client: Any = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[Any]:
        import chromadb
        import httpx

        try:
            with self._lock:
                if self._client is None:
                    self._client = self._open()
                client = self._client
            yield client
        except (chromadb.errors.ChromaError, httpx.HTTPError, OSError, ValueError) as error:
            self._client = None  # the server may come back as another one
            raise StoreError(
                f"the Chroma server at {self.place} fails ({_reason(error)}); is it running? "
                "`chroma run --path FOLDER` starts one, a folder as the store needs none"
            ) from error

    def _open(self) -> Any:
        import chromadb
        import httpx

        # First a request with a time limit: the constructor below makes some without.
        url = self.place.rstrip("/") + "/api/v2/heartbeat"
        timeout = httpx.Timeout(SERVER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        if httpx.get(url, timeout=timeout).status_code != 200:
            raise ValueError("it does not answer like Chroma")
        client = chromadb.HttpClient(self._host, self._port, self._ssl, settings=_settings())
        session = getattr(getattr(client, "_server", None), "_session", None)
        if isinstance(session, httpx.Client):  # Chroma has no option for it
            session.timeout = timeout
        return client


class _Folder:
    """Chroma's embedded client is not process-safe: two processes overwrite each other's vector
    index. So each turn holds a lock file, and a process that finds another one's mark in it opens
    the folder afresh. Not to be used across a fork, which Chroma's threads do not survive.
    """

    _all: ClassVar[dict[Path, _Folder]] = {}  # one per folder, like Chroma's own clients
    _all_lock = threading.Lock()

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._client: Any = None
        self._lock = threading.Lock()

    @classmethod
    def at(cls, folder: Path) -> _Folder:
        with cls._all_lock:
            if folder not in cls._all:
                cls._all[folder] = cls(folder)
            return cls._all[folder]

    @contextlib.contextmanager
    def turn(self) -> Iterator[Any]:
        import chromadb

        try:
            with self._lock, self._alone() as was_ours:
                if self._client is None or not was_ours:
                    self._reopen()
                yield self._client
        except OSError as error:
            raise StoreError(
                f"the store cannot be kept in {self.place} ({_reason(error)}); choose a folder that you can write"
            ) from error
        # Chroma's Rust core raises plain RuntimeErrors and ValueErrors too.
        except (chromadb.errors.ChromaError, ValueError, RuntimeError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"the store in {self.place} fails ({_reason(error)}); if the folder is damaged, delete it "
                "and index again, or choose another one"
            ) from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the folder's lock; yields whether the last holder was this process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "rapid-sgl.lock").open("a+") as handle:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreError(
                            f"another process has held {self.place} for {LOCK_TIMEOUT_S:.0f} s; "
                            "end it, or share the store through a Chroma server"
                        ) from None
                    time.sleep(0.005)
            handle.seek(0)
            was_ours = handle.read() == self._mark
            if not was_ours:
                handle.truncate(0)
                handle.write(self._mark)
                handle.flush()
            yield was_ours

    def _reopen(self) -> None:
        import chromadb
        from chromadb.api.shared_system_client import SharedSystemClient

        if self._client is not None:
            self._client.close()
        self._client = None  # stays so when opening fails
        try:
            self._client = chromadb.PersistentClient(self._folder, settings=_settings())
        except Exception:
            # Chroma keeps what it could not start, and would hand it out the next time.
            SharedSystemClient._identifier_to_system.pop(str(self._folder), None)
            raise


def _settings() -> Any:
    """Chroma's settings from nothing but these: it would also read a ``.env`` in the working folder."""
    from chromadb.config import Settings

    return Settings(_env_file=None, anonymized_telemetry=False)  # type: ignore[call-arg]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
