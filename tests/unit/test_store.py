"""The Chroma store: embedded, on a real Chroma server, shared by processes, and refused when foreign."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chromadb
import numpy as np
import pytest

from rapid_sgl.client import free_port
from rapid_sgl.retrieval import store as store_module
from rapid_sgl.retrieval.chroma import StoreError, connect
from rapid_sgl.retrieval.chunking import TokenizedText, chunk
from rapid_sgl.retrieval.embedding import Embedder
from rapid_sgl.retrieval.store import ChunkStore, Place
from rapid_sgl.retrieval.vectors import ChunkVectors

RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")
CHROMA = Path(sys.executable).with_name("chroma")


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


@pytest.fixture
def embedder():
    return HashEmbedder()


def words(text):
    """A text as tokens of one word and the space behind it."""
    starts = [index for index in range(len(text)) if index == 0 or text[index - 1] == " "]
    return TokenizedText(text, list(range(len(starts))), starts, [True] * len(starts))


def add(store, name, text, size=4, overlap=0):
    document = words(text)
    return store.add(name, document, chunk(document, size=size, overlap=overlap))


TEXT = " ".join(f"word{number}" for number in range(40))


@pytest.fixture(scope="module")
def chroma_server(tmp_path_factory):
    """URL and process of a Chroma server."""
    folder, port = tmp_path_factory.mktemp("chroma"), free_port()
    command = [CHROMA, "run", "--path", folder, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    probe = ChunkStore(url, HashEmbedder(), "c")
    for _ in range(200):
        try:
            probe.count()
            break
        except StoreError:
            assert process.poll() is None, "the Chroma server ended"
            time.sleep(0.1)
    yield url, process
    process.kill()
    process.wait()


@pytest.fixture(params=["folder", "server"])
def place(request, tmp_path):
    return (
        str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("chroma_server")[0]
    )


@pytest.fixture
def store(place, embedder, request):
    # One server serves all tests, so each has a collection to itself.
    return ChunkStore(
        place, embedder, "c", f"test-{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}"
    )


def test_vectors_are_embedded_once_and_come_back_in_order(store, embedder):
    texts = ["b", "a\x00", "שלום 你好 👩‍👩‍👧", "b", "\ud800", ""]
    first = store.vectors(texts)
    assert sorted(embedder.embedded) == sorted(set(texts))
    again = store.vectors(texts[::-1])
    assert len(embedder.embedded) == len(set(texts)), "nothing is embedded again"
    np.testing.assert_allclose(first, [embedder.query(text) for text in texts], atol=1e-6)
    np.testing.assert_allclose(again, first[::-1], atol=1e-6)
    assert store.count() == len(set(texts))
    assert store.vectors([]).shape == (0, 8)


def test_a_store_outlives_its_process(place, request):
    texts = [f"text {number}" for number in range(300)]
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_store import *\n"
        "ChunkStore(sys.argv[2], HashEmbedder(), 'c', 'outlives').vectors([f'text {n}' for n in range(300)])"
    )
    subprocess.run([sys.executable, "-c", script, Path(__file__).parent, place], check=True)
    embedder = HashEmbedder()
    vectors = ChunkStore(place, embedder, "c", "outlives").vectors(texts)
    assert embedder.embedded == []
    np.testing.assert_allclose(vectors, [embedder.query(text) for text in texts], atol=1e-6)


def test_batches_keep_to_the_clients_limit(store, monkeypatch):
    monkeypatch.setattr(store_module, "EMBED_BATCH", 10_000)
    with store._turn() as (client, _):
        most = client.get_max_batch_size()
    texts = [str(number) for number in range(most + 3)]
    assert len(store.vectors(texts)) == store.count() == most + 3


def test_indexing_twice_leaves_one_copy(store, embedder):
    assert add(store, "one.txt", TEXT) == 10
    count = store.count()
    assert add(store, "two.txt", TEXT) == 0
    assert add(store, "longer.txt", TEXT + " more words behind it") == 2, "only what is new is embedded"
    assert store.count() == count + 2 == len(embedder.embedded)


def test_search_finds_text_and_places(store):
    add(store, "one.txt", TEXT)
    add(store, "longer.txt", TEXT + " more words behind it")
    piece = "word4 word5 word6 word7 "
    best = store.search(piece, 3)[0]
    assert best.text == piece and best.similarity == pytest.approx(1, abs=1e-5)
    start = TEXT.index(piece)
    assert best.places == [Place(name, start, start + len(piece)) for name in ("longer.txt", "one.txt")]
    assert [hit.similarity for hit in store.search(piece, 3)] == sorted(
        (hit.similarity for hit in store.search(piece, 3)), reverse=True
    )


def test_places_of_overlapping_chunks(store):
    add(store, "one.txt", TEXT, size=6, overlap=2)
    hits = store.search("anything", 100)
    assert len(hits) > 7
    assert all(TEXT[place.start : place.end] == hit.text for hit in hits for place in hit.places)


def test_prompts_are_not_kept_as_text(store, embedder):
    store.vectors(["a secret prompt"])
    assert store.search("a secret prompt", 5) == []
    with store._turn() as (_, collection):
        assert collection.get(include=["documents"])["documents"] == [None]
    # Indexing the same chunk later makes it searchable without embedding it again.
    assert add(store, "file.txt", "a secret prompt") == 0
    assert store.search("a secret prompt", 5)[0].text == "a secret prompt"


def test_chunkers_do_not_see_each_others_chunks(tmp_path, embedder):
    one, two = (ChunkStore(str(tmp_path), embedder, name) for name in ("one", "two"))
    add(one, "a.txt", TEXT)
    assert two.search(TEXT, 5) == []
    assert add(two, "a.txt", TEXT) == 10
    assert len(two.search(TEXT, 100)) == 10


def test_collections_are_separate_per_embedder(tmp_path):
    for embedder in (
        HashEmbedder("one"),
        HashEmbedder("two"),
        HashEmbedder("org/three", 16),
        HashEmbedder("org-three", 4),
    ):
        assert ChunkStore(str(tmp_path), embedder, "c").vectors(["x"]).shape == (1, embedder.dimension)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (HashEmbedder("other"), "vectors of embedder hash-8, not other"),
        (HashEmbedder("hash-8", 16), "vectors of dimension 8, not 16"),
    ],
)
def test_another_embedders_collection_is_refused(place, store, other, reason):
    store.vectors(["x"])
    with pytest.raises(StoreError) as caught:
        ChunkStore(place, other, "c", store._name).vectors(["x"])
    assert reason in str(caught.value) and "--collection" in str(caught.value)


def test_a_foreign_collection_is_refused_and_left_alone(place, store):
    with connect(place).turn() as client:
        client.create_collection(store._name, metadata={"owner": "somebody"}, embedding_function=None)
    with pytest.raises(StoreError, match="not made by rapid-sgl"):
        store.vectors(["x"])
    with connect(place).turn() as client:
        assert client.get_collection(store._name, embedding_function=None).metadata == {"owner": "somebody"}


def test_another_schema_is_refused(place, store, monkeypatch):
    store.vectors(["x"])
    monkeypatch.setattr(store_module, "SCHEMA", 99)
    with pytest.raises(StoreError, match=r"has schema 1, this version of rapid-sgl has 99"):
        ChunkStore(place, HashEmbedder(), "c", store._name).count()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("ftp://host", "no URL of a Chroma server"),
        ("http://host:many", "no URL of a Chroma server"),
        ("http://host/path", "no URL of a Chroma server"),
        ("http://127.0.0.1:9", "127.0.0.1:9 fails .*refused.*chroma run"),
        ("/proc/store", "cannot be kept in /proc/store"),
        (__file__, "cannot be kept in .*choose a folder"),
    ],
)
def test_unusable_places_are_one_clear_error(place, reason):
    with pytest.raises(StoreError, match=reason) as caught:
        ChunkStore(place, HashEmbedder(), "c").count()
    assert "\n" not in str(caught.value)


def test_a_damaged_folder_is_one_clear_error_until_it_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "RETRY_PAUSES_S", (0.01,))
    store = ChunkStore(str(tmp_path), HashEmbedder(), "c")
    (tmp_path / "chroma.sqlite3").write_bytes(b"this is no database" * 100)
    for _ in range(2):
        with pytest.raises(StoreError, match="if the folder is damaged, delete it"):
            store.count()
    (tmp_path / "chroma.sqlite3").unlink()
    assert store.count() == 0


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
        "from test_store import *\n"
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
        assert process.communicate(timeout=120)[1].decode() == ""
        assert process.returncode == 0
    embedder = HashEmbedder()
    store = ChunkStore(str(tmp_path), embedder, "c")
    assert store.count() == 8 * 300
    texts = [
        f"{who} {round} {n}" for round in range(8) for n in range(1, 200, 2) for who in ("left", "right")
    ]
    np.testing.assert_allclose(store.vectors(texts), [embedder.query(text) for text in texts], atol=1e-6)
    assert embedder.embedded == []


def test_threads_share_a_store(store, embedder):
    texts = [f"text {number}" for number in range(400)]
    expected = np.stack([embedder.query(text) for text in texts])

    def read(first):
        return np.abs(store.vectors(texts[first : first + 200]) - expected[first : first + 200]).max()

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(read, [0, 50, 100, 150, 200] * 4)) < 1e-5
    assert store.count() == 400


def test_a_stopped_holder_of_the_lock_is_named(tmp_path, monkeypatch, embedder):
    holder = (
        "import fcntl, sys, time; handle = open(sys.argv[1], 'a'); "
        "fcntl.flock(handle, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", holder, tmp_path / "rapid-sgl.lock"]
    monkeypatch.setattr("rapid_sgl.retrieval.chroma.LOCK_TIMEOUT_S", 0.2)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with pytest.raises(StoreError, match=r"another process has held .* for"):
            ChunkStore(str(tmp_path), embedder, "c").count()
        process.kill()
    assert ChunkStore(str(tmp_path), embedder, "c").count() == 0, "the lock dies with its holder"


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
    outputs = [process.communicate(timeout=180) for process in processes]
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


def test_killing_the_server_is_one_clear_error(chroma_server, embedder):
    """Last: it ends the server that the tests above share."""
    url, process = chroma_server
    store = ChunkStore(url, embedder, "c", "killed")
    assert len(store.vectors(["before"])) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(
            StoreError, match=r"the Chroma server at http://127\.0\.0\.1:\d+ fails .*chroma run"
        ):
            store.vectors(["after"])
        assert time.monotonic() - began < 5


def test_chroma_sends_no_telemetry(tmp_path):
    with connect(str(tmp_path)).turn() as client:
        assert isinstance(client, chromadb.api.ClientAPI)
        assert client.get_settings().anonymized_telemetry is False
