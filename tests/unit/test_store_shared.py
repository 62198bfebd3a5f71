"""A store that processes and threads share, and servers that are killed or are not Chroma."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from retrieval_world import RAPID_SGL, ChromaServer, HashEmbedder

from rapid_sgl.client import free_port
from rapid_sgl.retrieval.chroma import StoreError
from rapid_sgl.retrieval.embedding import Embedder
from rapid_sgl.retrieval.store import ChunkStore
from rapid_sgl.retrieval.vectors import ChunkVectors

pytest_plugins = ("retrieval_fixtures",)


def test_a_store_outlives_its_process(place, request):
    texts = [f"text {number}" for number in range(300)]
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from retrieval_world import *\n"
        "ChunkStore(sys.argv[2], HashEmbedder(), 'c', 'outlives').vectors([f'text {n}' for n in range(300)])"
    )
    subprocess.run([sys.executable, "-c", script, Path(__file__).parent, place], check=True)
    embedder = HashEmbedder()
    vectors = ChunkStore(place, embedder, "c", "outlives").vectors(texts)
    assert embedder.embedded == []
    np.testing.assert_allclose(vectors, [embedder.query(text) for text in texts], atol=1e-6)


def test_a_server_that_is_not_chroma(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(100):
                with pytest.raises(StoreError) as caught:
                    ChunkStore(f"http://127.0.0.1:{port}", HashEmbedder(), "c").count()
                if "refused" not in str(caught.value):
                    break
                time.sleep(0.05)
            assert "does not answer like Chroma" in str(caught.value)
        finally:
            process.kill()


def test_two_processes_interleaved_keep_everything(tmp_path):
    """More records than Chroma's vector index is synced after, written in turns: without the lock
    and the reopening, one process's index overwrites the other's."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from retrieval_world import *\n"
        "store = ChunkStore(sys.argv[2], HashEmbedder(), 'c')\n"
        "for round in range(8):\n"
        "    texts = [f'{sys.argv[3] if n % 2 else \"both\"} {round} {n}' for n in range(200)]\n"
        "    vectors = store.vectors(texts)\n"
        "    np.testing.assert_allclose(vectors, [HashEmbedder().query(text) for text in texts], atol=1e-6)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, Path(__file__).parent, tmp_path, name], stderr=subprocess.PIPE
        )
        for name in ("left", "right")
    ]
    for process in processes:
        assert process.communicate()[1].decode() == ""
        assert process.returncode == 0
    embedder = HashEmbedder()
    store = ChunkStore(str(tmp_path), embedder, "c")
    assert store.count() == 8 * 300
    texts = [
        f"{who} {round} {n}" for round in range(8) for n in range(1, 200, 2) for who in ("left", "right")
    ]
    np.testing.assert_allclose(store.vectors(texts), [embedder.query(text) for text in texts], atol=1e-6)
    assert embedder.embedded == []


def test_threads_share_a_store(store, hash_embedder):
    texts = [f"text {number}" for number in range(400)]
    expected = np.stack([hash_embedder.query(text) for text in texts])

    def read(first):
        return np.abs(store.vectors(texts[first : first + 200]) - expected[first : first + 200]).max()

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(read, [0, 50, 100, 150, 200] * 4)) < 1e-5
    assert store.count() == 400


def test_a_stopped_holder_of_the_lock_is_named(tmp_path, monkeypatch, hash_embedder):
    holder = (
        "import fcntl, sys, time; handle = open(sys.argv[1], 'a'); "
        "fcntl.flock(handle, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", holder, tmp_path / "rapid-sgl.lock"]
    monkeypatch.setattr("rapid_sgl.retrieval.chroma.LOCK_TIMEOUT_S", 0.2)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with pytest.raises(StoreError, match=r"another process has held .* for"):
            ChunkStore(str(tmp_path), hash_embedder, "c").count()
        process.kill()
    assert ChunkStore(str(tmp_path), hash_embedder, "c").count() == 0, "the lock dies with its holder"


def test_two_commands_index_the_same_files(tmp_path):
    """The whole way with the real embedding model: two `rapid-sgl index` at once, then a search."""
    text = (
        "The vault in the cellar is painted blue.\n\n" + "The harvest was good and the weather fine.\n\n" * 30
    )
    (tmp_path / "one.txt").write_text(text)
    (tmp_path / "two.md").write_text("# Harvest\n\n" + text)
    files = [tmp_path / "one.txt", tmp_path / "two.md"]
    env = os.environ | {"RAPID_STORE": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1"}
    processes = [
        subprocess.Popen(
            [RAPID_SGL, "index", *files, "--json"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    reports = [json.loads(output) for output, _ in outputs]
    embedder = Embedder()
    store = ChunkStore(str(tmp_path / "store"), embedder, "tokens-128-0-v2")
    assert reports[0]["documents"][0]["document"] == str(files[0])
    hits = store.search("Which colour has the strongroom?", 50)
    assert len(hits) == store.count() == len({hit.text for hit in hits})
    assert "vault" in hits[0].text
    assert {place.document for place in hits[0].places} <= {str(path) for path in files}
    # A third time needs no model, and so no torch.
    script = (
        "import sys; from rapid_sgl.cli.index import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    again = subprocess.run([sys.executable, "-c", script, *files], env=env, capture_output=True, text=True)
    assert f"{files[0]}: " in again.stdout and again.stdout.endswith("False\n"), again.stderr
    # A prompt that contains an indexed document finds its vectors.
    vectors = ChunkVectors(HashEmbedder(embedder.id, 384), store)
    vectors.documents([hit.text for hit in hits])
    assert vectors.embedder.embedded == []


def test_killing_the_server_is_one_clear_error_until_it_is_back(tmp_path, hash_embedder):
    server = ChromaServer(tmp_path)
    try:
        store = ChunkStore(server.url, hash_embedder, "c", "killed")
        assert len(store.vectors(["before"])) == 1
        server.kill()
        for _ in range(2):
            with pytest.raises(
                StoreError, match=r"the Chroma server at http://127\.0\.0\.1:\d+ fails .*chroma run"
            ):
                store.vectors(["after"])
        server.start()
        assert len(store.vectors(["before", "after"])) == store.count() == 2
        assert hash_embedder.embedded.count("before") == 1, "the folder still has it"
    finally:
        server.kill()
