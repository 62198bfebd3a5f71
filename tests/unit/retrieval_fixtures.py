"""Fixtures of the tests of retrieval; a test module names this file in its ``pytest_plugins``."""

import hashlib

import pytest
from retrieval_world import ChromaServer, CountingEmbedder, HashEmbedder

from rapid_sgl.models import embedded_model_path
from rapid_sgl.retrieval.store import ChunkStore
from rapid_sgl.retrieval.vectors import ChunkVectors


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="session")
def shared_embedder():
    return CountingEmbedder()


@pytest.fixture
def embedder(shared_embedder):
    shared_embedder.passages.clear()
    return shared_embedder


@pytest.fixture
def vectors(embedder):
    return ChunkVectors(embedder)


@pytest.fixture
def hash_embedder():
    return HashEmbedder()


@pytest.fixture(scope="session")
def chroma_server(tmp_path_factory):
    server = ChromaServer(tmp_path_factory.mktemp("chroma"))
    yield server
    server.kill()


@pytest.fixture(params=["folder", "server"])
def place(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "store")
    return request.getfixturevalue("chroma_server").url


@pytest.fixture
def store(place, hash_embedder, request):
    # One server serves all tests, so each has a collection to itself.
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    return ChunkStore(place, hash_embedder, "c", f"test-{name}")
