"""The Chroma store: what it keeps and finds, and what it refuses."""

import chromadb
import numpy as np
import pytest
from retrieval_world import TEXT, HashEmbedder, add

from rapid_sgl.retrieval import store as store_module
from rapid_sgl.retrieval.chroma import StoreError, connect
from rapid_sgl.retrieval.store import ChunkStore, Place

pytest_plugins = ("retrieval_fixtures",)


def test_vectors_are_embedded_once_and_come_back_in_order(store, hash_embedder):
    texts = ["b", "a\x00", "שלום 你好 👩‍👩‍👧", "b", "\ud800", ""]
    first = store.vectors(texts)
    assert sorted(hash_embedder.embedded) == sorted(set(texts))
    again = store.vectors(texts[::-1])
    assert len(hash_embedder.embedded) == len(set(texts)), "nothing is embedded again"
    np.testing.assert_allclose(first, [hash_embedder.query(text) for text in texts], atol=1e-6)
    np.testing.assert_allclose(again, first[::-1], atol=1e-6)
    assert store.count() == len(set(texts))
    assert store.vectors([]).shape == (0, 8)


def test_batches_keep_to_the_clients_limit(store, monkeypatch):
    monkeypatch.setattr(store_module, "EMBED_BATCH", 10_000)
    with store._turn() as (client, _):
        most = client.get_max_batch_size()
    texts = [str(number) for number in range(most + 3)]
    assert len(store.vectors(texts)) == store.count() == most + 3


def test_indexing_twice_leaves_one_copy(store, hash_embedder):
    assert add(store, "one.txt", TEXT) == 10
    count = store.count()
    assert add(store, "two.txt", TEXT) == 0
    assert add(store, "longer.txt", TEXT + " more words behind it") == 2, "only what is new is embedded"
    assert store.count() == count + 2 == len(hash_embedder.embedded)


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


def test_prompts_are_not_kept_as_text(store, hash_embedder):
    store.vectors(["a secret prompt"])
    assert store.search("a secret prompt", 5) == []
    with store._turn() as (_, collection):
        assert collection.get(include=["documents"])["documents"] == [None]
    # Indexing the same chunk later makes it searchable without embedding it again.
    assert add(store, "file.txt", "a secret prompt") == 0
    assert store.search("a secret prompt", 5)[0].text == "a secret prompt"


def test_chunkers_do_not_see_each_others_chunks(tmp_path, hash_embedder):
    one, two = (ChunkStore(str(tmp_path), hash_embedder, name) for name in ("one", "two"))
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


def test_chroma_sends_no_telemetry(tmp_path):
    with connect(str(tmp_path)).turn() as client:
        assert isinstance(client, chromadb.api.ClientAPI)
        assert client.get_settings().anonymized_telemetry is False
