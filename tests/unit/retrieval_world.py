"""What the tests of retrieval share: embedders that count, small texts, a Chroma server that can be killed."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from rapid_sgl.client import free_port
from rapid_sgl.retrieval.chroma import StoreError
from rapid_sgl.retrieval.chunking import TokenizedText, chunk
from rapid_sgl.retrieval.embedding import Embedder
from rapid_sgl.retrieval.store import ChunkStore

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is first imported

RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")
CHROMA = Path(sys.executable).with_name("chroma")
TEXT = " ".join(f"word{number}" for number in range(40))


class CountingEmbedder(Embedder):
    """The embedded model; remembers which passages it was given."""

    def __init__(self):
        super().__init__()
        self.passages = []

    def documents(self, texts):
        self.passages += texts
        return super().documents(texts)


class HashEmbedder:
    """Unit vectors made from a hash: for tests of keeping, not of meaning; counts what it embeds."""

    def __init__(self, id="hash-8", dimension=8):
        self.id, self.dimension, self.embedded = id, dimension, []
        self.known_dimension = dimension

    def documents(self, texts):
        self.embedded += texts
        return np.stack([self.query(text) for text in texts]) if texts else np.zeros((0, self.dimension))

    def query(self, text):
        seed = int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "little")
        vector = np.random.default_rng(seed).normal(size=self.dimension).astype(np.float32)
        return vector / np.linalg.norm(vector)


class ChromaServer:
    """A real Chroma server; ``start`` again after ``kill`` for the same folder and port."""

    def __init__(self, folder):
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self):
        command = [CHROMA, "run", "--path", self._folder, "--host", "127.0.0.1", "--port", str(self._port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        probe = ChunkStore(self.url, HashEmbedder(), "c")
        for _ in range(200):
            try:
                probe.count()
                return
            except StoreError:
                assert self.process.poll() is None, "the Chroma server ended"
                time.sleep(0.1)
        raise AssertionError("the Chroma server does not answer")

    def kill(self):
        self.process.kill()
        self.process.wait()


def words(text):
    """A text as tokens of one word and the space behind it."""
    starts = [index for index in range(len(text)) if index == 0 or text[index - 1] == " "]
    return TokenizedText(text, list(range(len(starts))), starts, [True] * len(starts))


def add(store, name, text, size=4, overlap=0):
    document = words(text)
    return store.add(name, document, chunk(document, size=size, overlap=overlap))
