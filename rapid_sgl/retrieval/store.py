"""Chunks and their vectors in Chroma, kept by content: whoever sends a document, it is embedded once.

A chunk's id is the hash of its text and of the chunker that cut it; the embedder has a collection
to itself and is named in the collection's metadata. A second writer of the same chunk writes the
same record again.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from rapid_sgl.models import cache_dir
from rapid_sgl.retrieval.chroma import Connection, StoreError, connect
from rapid_sgl.retrieval.chunking import Chunk, TokenizedText
from rapid_sgl.retrieval.embedding import Embedder
from rapid_sgl.retrieval.lru import content_key

T = TypeVar("T")

STORE_ENV = "RAPID_STORE"
SCHEMA = 1  # raise when the meaning of a stored record changes
# Texts embedded between two turns in the store: what an interruption loses, a few seconds of work.
EMBED_BATCH = 128
RETRY_PAUSES_S = (0.02, 0.1, 0.5)
_PLACE, _NAME = "at:", "of:"  # metadata keys of an indexed chunk, each followed by the document's key


@dataclass(frozen=True)
class Place:
    """Where a chunk stands in an indexed document."""

    document: str  # the name it was indexed under
    start: int  # characters
    end: int


@dataclass(frozen=True)
class Hit:
    """An indexed chunk that answers a search."""

    text: str
    similarity: float  # cosine, -1 to 1
    places: list[Place]


def default_place() -> str:
    """``$RAPID_STORE`` (a folder or a Chroma server's URL), else a folder in the user's cache."""
    return os.environ.get(STORE_ENV) or str(cache_dir() / "store")


class ChunkStore:
    """One embedder's chunks in a Chroma folder or server. Safe to share between threads.

    Nothing is opened before the first use. Folders may be shared by processes of rapid-sgl, not
    with other users of Chroma's embedded client.

    Args:
        place: a folder, or ``http://host:port`` of a Chroma server.
        embedder: made the vectors that are stored, and makes those that are missing.
        chunker: name of how texts were cut (``chunker_id``); a search sees no other chunker's chunks.
        collection: name of the collection; by default one for each embedder.

    Raises (every method):
        StoreError: the place cannot be used, or the collection is another embedder's or program's.
    """

    def __init__(self, place: str, embedder: Embedder, chunker: str, collection: str | None = None) -> None:
        self._connection: Connection = connect(place)
        self._embedder = embedder
        self._chunker = chunker
        self._name = collection or _collection_name(embedder.id)
        self._opened: tuple[Any, Any] = (None, None)  # client, its collection

    @property
    def place(self) -> str:
        """Folder or URL."""
        return self._connection.place

    def apart(self, namespace: str) -> ChunkStore:
        """The same place and collection for chunks that are nobody else's: not even whether a text is
        stored shows outside of ``namespace``."""
        other = copy.copy(self)
        other._chunker = f"{self._chunker}:{namespace}"
        return other

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [len(texts), dimension], rows of length 1.

        What is missing is embedded and kept. Only its vectors: the text of a prompt does not
        belong on a disk unless somebody indexed it.
        """
        rows: dict[str, np.ndarray] = {}
        ids = [self._id(text) for text in texts]
        for batch in _batches(dict(zip(ids, texts, strict=True)), EMBED_BATCH):
            stored = self._get(list(batch))
            missing = {key: text for key, text in batch.items() if key not in stored}
            rows |= stored
            if missing:
                made = self._embedder.documents(list(missing.values()))
                rows |= dict(zip(missing, made, strict=True))
                self._put(list(missing), made, [{"chunker": self._chunker}] * len(missing), None)
        if not rows:
            return np.zeros((0, self._embedder.dimension), dtype=np.float32)
        return np.stack([rows[key] for key in ids])

    def add(
        self,
        name: str,
        document: TokenizedText,
        chunks: Sequence[Chunk],
        update: Callable[[int], None] = lambda done: None,
    ) -> int:
        """Index a document: its chunks can then be searched, and prompts that contain it find their vectors.

        Args:
            name: how a search calls it; the last name given to a content counts.
            chunks: of ``document``, with offset 0.
            update: called with the number of different chunks done so far.

        Returns:
            How many chunks were embedded; the others were there.
        """
        key = content_key([document.text])[:16]
        records: dict[str, tuple[str, dict[str, Any]]] = {}
        for piece in chunks:
            start = len(document.slice(0, piece.start))
            place = {_NAME + key: name, _PLACE + key: f"{start}-{start + len(piece.text)}"}
            records.setdefault(
                self._id(piece.text), (piece.text, {"chunker": self._chunker, "indexed": True, **place})
            )
        embedded = done = 0
        for batch in _batches(records, EMBED_BATCH):
            stored = self._get(list(batch))
            missing = [text for id_, (text, _) in batch.items() if id_ not in stored]
            made = iter(self._embedder.documents(missing) if missing else ())
            vectors = np.stack([stored[id_] if id_ in stored else next(made) for id_ in batch])
            texts = [text.encode("utf-8", "replace").decode() for text, _ in batch.values()]
            self._put(list(batch), vectors, [data for _, data in batch.values()], texts)
            embedded += len(missing)
            done += len(batch)
            update(done)
        return embedded

    def search(self, query: str, count: int) -> list[Hit]:
        """The ``count`` indexed chunks nearest to ``query``, best first (Chroma's approximate search)."""
        vector = self._embedder.query(query)
        found = self._do(
            lambda client, collection: collection.query(
                query_embeddings=vector[None],
                n_results=count,
                where={"$and": [{"indexed": True}, {"chunker": self._chunker}]},
                include=["documents", "metadatas", "distances"],
            )
        )
        rows = zip(found["documents"][0], found["metadatas"][0], found["distances"][0], strict=True)
        return [Hit(text, 1 - float(distance), _places(data)) for text, data, distance in rows]

    def count(self) -> int:
        """Chunks in the collection, indexed or not, of every chunker."""
        return int(self._do(lambda client, collection: collection.count()))

    def _id(self, text: str) -> str:
        return content_key([self._chunker, text])

    def _get(self, ids: list[str]) -> dict[str, np.ndarray]:
        found = self._do(lambda client, collection: collection.get(ids=ids, include=["embeddings"]))
        vectors = np.asarray(found["embeddings"], dtype=np.float32)
        return dict(zip(found["ids"], vectors, strict=True))

    def _put(
        self, ids: list[str], vectors: np.ndarray, metadatas: list[dict[str, Any]], texts: list[str] | None
    ) -> None:
        def write(client: Any, collection: Any) -> None:
            most = client.get_max_batch_size()
            for first in range(0, len(ids), most):
                part = slice(first, first + most)
                collection.upsert(
                    ids=ids[part],
                    embeddings=vectors[part],
                    metadatas=metadatas[part],
                    documents=texts[part] if texts else None,
                )

        self._do(write)

    def _do(self, work: Callable[[Any, Any], T]) -> T:
        """What ``work`` makes of client and collection, in a turn of its own.

        Tried again when Chroma reports an internal error: a server whose clients read and write a
        new collection at once answers some with "Nothing found on disk", and the next time rightly.
        """
        from chromadb.errors import InternalError

        for pause_s in RETRY_PAUSES_S:
            try:
                with self._turn() as (client, collection):
                    return work(client, collection)
            except StoreError as error:
                if not isinstance(error.__cause__, InternalError):
                    raise
            time.sleep(pause_s)
        with self._turn() as (client, collection):
            return work(client, collection)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[tuple[Any, Any]]:
        """Chroma's client and our collection in it."""
        with self._connection.turn() as client:
            collection = self._found(client)
            if collection is not None:
                yield client, collection
                return
        dimension = self._embedder.dimension  # loads the model: seconds, so not while others wait for us
        with self._connection.turn() as client:
            # Without an embedding function of its own Chroma would fetch a model at first use.
            client.get_or_create_collection(
                self._name,
                metadata={"rapid_sgl_schema": SCHEMA, "embedder": self._embedder.id, "dimension": dimension},
                configuration={"hnsw": {"space": "cosine"}},
                embedding_function=None,
            )
            yield client, self._found(client)

    def _found(self, client: Any) -> Any:
        """The collection, checked; None where there is none yet."""
        from chromadb.errors import NotFoundError

        if self._opened[0] is not client:
            try:
                collection = client.get_collection(self._name, embedding_function=None)
            except NotFoundError:
                return None
            self._opened = (client, collection)
        self._check(self._opened[1].metadata or {})
        return self._opened[1]

    def _check(self, found: dict[str, Any]) -> None:
        where = f"collection {self._name!r} in {self.place}"
        fix = "name another one with --collection, or delete it"
        if "rapid_sgl_schema" not in found:
            raise StoreError(f"{where} was not made by rapid-sgl; {fix}")
        if found["rapid_sgl_schema"] != SCHEMA:
            raise StoreError(
                f"{where} has schema {found['rapid_sgl_schema']}, this version of rapid-sgl has {SCHEMA}; {fix}"
            )
        known = {"embedder": self._embedder.id, "dimension": self._embedder.known_dimension}
        for key, ours in known.items():
            if ours is not None and found.get(key) != ours:
                raise StoreError(f"{where} holds vectors of {key} {found.get(key)}, not {ours}; {fix}")


def _places(metadata: dict[str, Any]) -> list[Place]:
    places = []
    for key, value in metadata.items():
        if key.startswith(_PLACE):
            start, end = map(int, value.split("-"))
            places.append(Place(metadata[_NAME + key.removeprefix(_PLACE)], start, end))
    return sorted(places, key=lambda place: (place.document, place.start))


def _collection_name(embedder_id: str) -> str:
    """``rapid-…`` in the characters that Chroma allows, different for different embedders."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", embedder_id).strip("-._")
    return f"rapid-{slug}" if slug == embedder_id else f"rapid-{slug}-{content_key([embedder_id])[:8]}"


def _batches(records: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    items = iter(records.items())
    while batch := dict(islice(items, size)):
        yield batch
