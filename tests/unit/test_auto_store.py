"""Auto mode on a store that others share: embedded once, tenants apart, gone and back again."""

import logging
from types import SimpleNamespace

import pytest
from retrieval_world import ChromaServer, HashEmbedder

from rapid_sgl.auto import STORE, AutoSpans
from rapid_sgl.config import RapidConfig
from rapid_sgl.retrieval.breaker import CircuitBreaker
from rapid_sgl.retrieval.chroma import StoreError
from rapid_sgl.retrieval.pipeline import chunker_id
from rapid_sgl.retrieval.store import ChunkStore

pytest_plugins = ("retrieval_fixtures",)

NO_TENANT = (None, None)  # extra_key and cache_salt of a request that names none


@pytest.fixture
def selectors(monkeypatch, tokenizer):
    """Makes a server process's selector; its embedder counts and loads no model."""
    from rapid_sgl.retrieval import auto
    from rapid_sgl.retrieval.pipeline import RetrievalOptions

    def make(place):
        embedder = HashEmbedder("hash-for-auto")
        monkeypatch.setattr(auto, "Embedder", lambda name: embedder)
        # HashEmbedder's cosines mean nothing: no threshold, so that something is always found
        options = RetrievalOptions("dense", store=place, threshold=0.0)
        selector = auto.PromptSelector(tokenizer, options)
        return SimpleNamespace(selector=selector, embedder=embedder)

    return make


def prompt(tokenizer, subject="weather"):
    text = "".join(f"Chapter {n} tells of the {subject} in town {n}.\n\n" for n in range(200))
    return tokenizer(text + "What was it like?")["input_ids"]


def select(process, ids, tenant=NO_TENANT):
    return process.selector.select(ids, budget=400, head=10, recent=100, tenant=tenant)


def test_a_document_is_embedded_once_whoever_sends_it(place, selectors, tokenizer):
    ids = prompt(tokenizer, place[-6:])
    one, two = selectors(place), selectors(place)
    spans = select(one, ids)
    assert spans and one.embedder.embedded
    assert select(two, ids) == spans and two.embedder.embedded == []
    longer = prompt(tokenizer, place[-6:]) + tokenizer(" Tell me more about it. " * 20)["input_ids"]
    select(two, longer)
    assert len(two.embedder.embedded) <= 3, "only what is new"


def test_tenants_share_nothing(place, selectors, tokenizer):
    ids = prompt(tokenizer, "tenants" + place[-6:])
    tenants = (NO_TENANT, (None, "salt"), ("key", None))
    embedded = []
    for tenant in tenants:
        process = selectors(place)
        select(process, ids, tenant)
        embedded.append(len(process.embedder.embedded))
    assert min(embedded) > 0 and len(set(embedded)) == 1
    again = selectors(place)
    for tenant in tenants:
        select(again, ids, tenant)
    assert again.embedder.embedded == []


def test_what_was_indexed_is_not_embedded_again(tmp_path, selectors, tokenizer):
    from rapid_sgl.retrieval.chunking import chunk, tokenize

    text = "".join(f"Chapter {n} tells of the weather in town {n}.\n\n" for n in range(200))
    process = selectors(str(tmp_path))
    store = ChunkStore(str(tmp_path), process.embedder, chunker_id(128, 0))
    document = tokenize(text, tokenizer)
    pieces = chunk(document)
    assert store.add("file.txt", document, pieces) == len(pieces)
    process.embedder.embedded.clear()
    select(process, prompt(tokenizer))
    assert len(process.embedder.embedded) <= 2, "the question's end of the last chunk"


def test_a_store_that_goes_and_comes_back(tmp_path, selectors, tokenizer, caplog):
    server = ChromaServer(tmp_path)
    try:
        process = selectors(server.url)
        clock = SimpleNamespace(now=0.0)
        process.selector._breaker = CircuitBreaker(5.0, lambda: clock.now)
        auto = AutoSpans(tokenizer, RapidConfig(auto_spans="dense", auto_deadline=60.0))
        auto._selector = process.selector
        first, second = prompt(tokenizer), prompt(tokenizer, "harvest")
        windows = {"budget": 400, "head": 10, "recent": 100, "tenant": NO_TENANT}
        with caplog.at_level(logging.INFO):
            assert auto._safely(process.selector.select, first, **windows)[0]
            server.kill()
            for _ in range(3):
                assert auto._safely(process.selector.select, second, **windows) == ([], STORE)
            assert auto._safely(process.selector.select, first, **windows)[0], "memory goes on working"
            server.start()
            assert auto._safely(process.selector.select, second, **windows) == ([], STORE), "not asked yet"
            clock.now = 5.0
            assert auto._safely(process.selector.select, second, **windows)[0]
        texts = [record.getMessage() for record in caplog.records if "auto spans" in record.getMessage()]
        assert len(texts) == 2, "told once, and once when it is over"
        assert server.url in texts[0] and "without spans" in texts[0] and "answers again" in texts[1]
    finally:
        server.kill()


def test_a_broken_store_is_not_asked_all_the_time():
    clock, calls = SimpleNamespace(now=0.0), []

    def work():
        calls.append(clock.now)
        if clock.now < 10:
            raise StoreError("gone")
        return "fine"

    breaker = CircuitBreaker(5.0, lambda: clock.now)
    for now in (0, 1, 4.9, 5, 6, 9.9):
        clock.now = now
        with pytest.raises(StoreError, match="gone"):
            breaker.call(work)
    assert calls == [0, 5]
    clock.now = 10
    assert breaker.call(work) == "fine" and breaker.call(work) == "fine"
