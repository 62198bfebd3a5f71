"""Embedding and scorers on the real model, fusion and diversity in closed form."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_sgl.retrieval.bm25 import Bm25Index, bm25_scores
from rapid_sgl.retrieval.embedding import Embedder, EmbeddingError, Reranker, embedded_embedder_path
from rapid_sgl.retrieval.lru import Lru, content_key
from rapid_sgl.retrieval.scorers import (
    Bm25Scorer,
    DenseScorer,
    DiverseScorer,
    HybridScorer,
    RerankingScorer,
    mmr_order,
)

pytest_plugins = ("retrieval_fixtures",)


TEXTS = [
    "The harvest was good this year, said the farmers.",
    "A physician prescribed ginger tea for the crew's seasickness.",
    "The code of the strongroom is 7391.",
    "Rain fell on the fields for eleven days.",
]


class Fixed:
    """A scorer whose scores are given."""

    def __init__(self, scores):
        self._scores = np.array(scores, dtype=np.float32)

    def scores(self, texts, query):
        return self._scores.copy()


# Embedding


def test_vectors_are_normalised_and_the_models_own(embedder):
    vectors = embedder.documents(TEXTS)
    assert vectors.shape == (4, embedder.dimension) == (4, 384) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert embedder.documents([]).shape == (0, 384)
    assert (embedder.id, embedder.max_tokens) == ("all-MiniLM-L6-v2", 256)
    from sentence_transformers import SentenceTransformer

    plain = SentenceTransformer(str(embedded_embedder_path()), device="cpu").encode(
        TEXTS, normalize_embeddings=True
    )
    np.testing.assert_allclose(vectors, plain, atol=1e-5)


def test_a_folder_is_identified_by_its_weights(tmp_path):
    source = embedded_embedder_path()
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        for path in source.iterdir():
            if path.is_file():
                (folder / path.name).write_bytes(path.read_bytes()) if path.suffix != ".safetensors" else None
        (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert Embedder(str(one)).id.split("@")[1] == Embedder(str(two)).id.split("@")[1]
    with (two / "model.safetensors").open("r+b") as handle:
        handle.seek((two / "model.safetensors").stat().st_size // 2)
        handle.write(b"another fine-tuning")
    assert Embedder(str(one)).id.startswith("one@")
    assert Embedder(str(one)).id.split("@")[1] != Embedder(str(two)).id.split("@")[1]


def test_models_that_cannot_be_loaded_are_one_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EmbeddingError, match=r"cannot load .*--embedder") as caught:
        Embedder(str(tmp_path)).query("x")
    assert "\n" not in str(caught.value)
    with pytest.raises(EmbeddingError, match="/nowhere/model: no such folder"):
        Embedder("/nowhere/model")
    with pytest.raises(EmbeddingError, match=r"cannot load .*--rerank"):
        Reranker(str(tmp_path)).scores(["x"], "y")


def test_hostile_texts_are_embedded(embedder):
    vectors = embedder.documents(["", "\x00", "\ud800 lone", "עברית ملف 你好 👩‍👩‍👧", "x" * 100_000])
    assert np.isfinite(vectors).all()


def test_each_text_is_embedded_once(vectors, embedder):
    first = vectors.documents(["a", "b", "a"])
    assert embedder.passages == ["a", "b"]
    vectors.documents(["b", "c", "a"])
    assert embedder.passages == ["a", "b", "c"]
    np.testing.assert_array_equal(first[0], first[2])
    assert vectors.documents([]).shape == (0, 384)


def test_many_requests_about_a_new_document_embed_it_once(vectors, embedder):
    passages = [f"Passage {number} of a new document." for number in range(150)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: vectors.documents(passages), range(8)))
    assert sorted(embedder.passages) == sorted(passages)
    assert all((result == results[0]).all() for result in results)


def test_a_question_does_not_wait_for_a_whole_document(embedder):
    passages = [f"Passage {number} of a document with something in it." for number in range(256)]
    thread = threading.Thread(target=embedder.documents, args=(passages,))
    thread.start()
    embedder.query("a question")
    assert thread.is_alive()
    thread.join()


# Scorers


def test_dense_finds_what_shares_no_word(vectors):
    question = "Which remedy did the doctor give to nauseous sailors?"
    assert bm25_scores(TEXTS, question).max() == 0
    assert DenseScorer(vectors).scores(TEXTS, question).argmax() == 1


def test_dense_scores_are_cosines_above_the_threshold(vectors, embedder):
    cosines = embedder.documents(TEXTS) @ embedder.query("a doctor")
    for threshold in (-1, 0, 0.1, 0.3, 2):
        scores = DenseScorer(vectors, threshold).scores(TEXTS, "a doctor")
        expected = np.where(cosines >= threshold, np.maximum(cosines, 0), 0)
        np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_bm25_index_is_kept_per_document():
    scorer = Bm25Scorer(remembered=1)
    scorer.scores(TEXTS, "harvest")
    kept = scorer._indexes.get(content_key(TEXTS))
    for query in ("the strongroom's code", "rain", "zebra"):
        np.testing.assert_allclose(scorer.scores(TEXTS, query), bm25_scores(TEXTS, query))
    assert scorer._indexes.get(content_key(TEXTS)) is kept
    scorer.scores(TEXTS[:2], "harvest")
    assert scorer._indexes.get(content_key(TEXTS)) is None


def test_chance_matches_are_no_evidence():
    texts = [*TEXTS, *(f"Chapter {number} tells of the weather." for number in range(50))]
    index = Bm25Index(texts)
    whole, chance = "code of the strongroom is 7391", "code of an ethical hacker in Siberia"
    assert index.scores(whole)[2] > 0.7 * index.full_score(whole)
    assert Bm25Scorer(0.4).scores(texts, whole).argmax() == 2
    assert 0 < index.scores(chance)[2] < 0.4 * index.full_score(chance)
    assert not Bm25Scorer(0.4).scores(texts, chance).any()
    assert Bm25Scorer().scores(texts, chance)[2] > 0


def test_the_full_score_is_that_of_a_text_with_every_word():
    texts = ["one two three", "four five six", "seven eight nine"]
    assert Bm25Index(texts).full_score("one two three") == pytest.approx(
        bm25_scores(texts, "one two three")[0]
    )


def test_long_questions_do_not_need_every_word():
    texts = ["alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi", *TEXTS]
    question = texts[0] + " " + " ".join(f"word{number}" for number in range(200))
    assert Bm25Scorer(0.4).scores(texts, question).argmax() == 0


@pytest.mark.parametrize("texts", [[], [""], ["", "?!", "\x00"], ["👩‍👩‍👧"]])
def test_texts_without_words_score_zero(texts, vectors):
    assert Bm25Index(texts).scores("any word").tolist() == [0] * len(texts)
    scores = HybridScorer([Bm25Scorer(), DenseScorer(vectors)]).scores(texts, "any word")
    assert scores.shape == (len(texts),) and np.isfinite(scores).all()


def test_fusion_adds_reciprocal_ranks():
    one, two = Fixed([3, 0, 2, 1]), Fixed([0, 0.1, 0.9, 0.5])
    scores = HybridScorer([one, two], k=60).scores(TEXTS, "")
    expected = [1 / 61, 1 / 63, 1 / 62 + 1 / 61, 1 / 63 + 1 / 62]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


def test_diversity_postpones_repetition(vectors):
    texts = [TEXTS[1], TEXTS[1] + " ", TEXTS[3]]
    base = Fixed([1.0, 0.99, 0.6])
    assert np.argsort(-DiverseScorer(base, vectors, 1.0).scores(texts, "")).tolist() == [0, 1, 2]
    assert np.argsort(-DiverseScorer(base, vectors, 0.5).scores(texts, "")).tolist() == [0, 2, 1]
    scores = DiverseScorer(base, vectors, 0.5, pool=1).scores(texts, "")
    assert np.argsort(-scores).tolist() == [0, 1, 2], "beyond the pool the order stays"
    assert (DiverseScorer(Fixed([0, 0, 0]), vectors).scores(texts, "") == 0).all()
    with pytest.raises(ValueError, match="weight 2 is out of range"):
        DiverseScorer(base, vectors, 2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), max_size=8), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_mmr_takes_the_largest_gain_each_time(relevance, weight, seed):
    chance = np.random.default_rng(seed)
    points = chance.normal(size=(len(relevance), 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    similarity = points @ points.T
    order = mmr_order(np.array(relevance, dtype=np.float32), similarity, weight)
    assert sorted(order) == list(range(len(relevance)))

    def gain(index, taken):
        nearest = max((similarity[index, other] for other in taken), default=0.0)
        return weight * relevance[index] - (1 - weight) * max(nearest, 0.0)

    for place, index in enumerate(order):
        best = max(gain(other, order[:place]) for other in order[place:])
        assert gain(index, order[:place]) >= best - 1e-4


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    """Folder of a real, tiny, untrained cross-encoder on the embedded model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cross")
    tokenizer = AutoTokenizer.from_pretrained(embedded_embedder_path())
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=1, initializer_range=0.5, **size)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_reranking_orders_the_pool_by_the_cross_encoder(cross_encoder):
    from sentence_transformers import CrossEncoder

    question = "What is the code?"
    expected = CrossEncoder(cross_encoder, device="cpu").predict([(question, text) for text in TEXTS])
    assert len(set(expected)) == 4
    reranker = Reranker(cross_encoder)
    np.testing.assert_allclose(reranker.scores(TEXTS, question), expected, atol=1e-5)
    whole = RerankingScorer(Fixed([1, 2, 3, 4]), reranker).scores(TEXTS, question)
    assert np.argsort(-whole).tolist() == np.argsort(-expected).tolist()
    scores = RerankingScorer(Fixed([1, 9, 8, 0]), reranker, pool=2).scores(TEXTS, question)
    assert min(scores[1], scores[2]) >= 1 > scores[0] > scores[3] == 0
    assert (scores[1] > scores[2]) == (expected[1] > expected[2])


def test_lru_forgets_the_least_recently_used():
    lru = Lru(2)
    lru.put("a", 1)
    lru.put("b", 2)
    assert lru.get("a") == 1
    lru.put("c", 3)
    assert (lru.get("a"), lru.get("b"), lru.get("c"), len(lru)) == (1, None, 3, 2)


def test_content_keys_depend_on_where_texts_end():
    assert len({content_key(texts) for texts in ([], [""], ["ab"], ["a", "b"], ["", "ab"], ["\ud800"])}) == 6


def test_retrieval_imports_neither_sglang_nor_torch():
    script = (
        "import importlib, pkgutil, sys, rapid_sgl.retrieval as package\n"
        "for module in pkgutil.iter_modules(package.__path__):\n"
        "    importlib.import_module(f'rapid_sgl.retrieval.{module.name}')\n"
        "print({'sglang', 'torch', 'chromadb', 'sentence_transformers', 'bm25s'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
