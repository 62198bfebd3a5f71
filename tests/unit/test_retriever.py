"""The retriever: from a prompt or bare token ids to spans, and selections used again."""

from itertools import pairwise

import pytest

from rapid_sgl.retrieval.cache import SelectionCache
from rapid_sgl.retrieval.chunking import chunk, tokenize
from rapid_sgl.retrieval.decoding import TokenDecoder
from rapid_sgl.retrieval.pipeline import RetrievalOptions, Retriever
from rapid_sgl.retrieval.prompt import PromptBuilder

pytest_plugins = ("retrieval_fixtures",)


NEEDLE = "A physician prescribed ginger tea for the crew's seasickness."
HAY = [
    f"Chapter {number} tells of the weather in town {number}. It rained for days.\n\n" for number in range(60)
]
DOCUMENT = "".join([*HAY[:30], NEEDLE + "\n\n", *HAY[30:]])
PARAPHRASE = "Which remedy did the doctor give to nauseous sailors?"
VIEW = {"budget": 400, "head": 32, "recent": 200}


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return PromptBuilder(tokenizer).build(DOCUMENT, PARAPHRASE, None)


@pytest.mark.parametrize(("scorer", "found"), [("bm25", False), ("dense", True), ("hybrid", True)])
def test_retriever_finds_a_paraphrased_needle(prompt, vectors, scorer, found):
    spans = Retriever(RetrievalOptions(scorer), vectors=vectors).spans(prompt, PARAPHRASE, **VIEW)
    assert any(NEEDLE in prompt.document_text(span) for span in spans) == found
    assert sum(end - start for start, end in spans) <= 168


def test_retriever_on_bare_token_ids(prompt, tokenizer, vectors):
    """What a server has: ids with the chat template in them, and a question."""
    document = TokenDecoder(tokenizer).decode(prompt.ids)
    options = RetrievalOptions(chunk_tokens=64, overlap=16)
    spans = Retriever(options, vectors=vectors).select(document, PARAPHRASE, **VIEW)
    assert any(NEEDLE in document.slice(*span) for span in spans)
    assert all(32 <= start < end <= len(prompt) - 200 for start, end in spans)


def test_an_indexed_document_is_recognised_inside_a_prompt(tokenizer):
    """Bounds follow the text, so a chat template in front shifts only the first of them."""
    from pydoc_data.topics import topics

    text = topics["string-methods"]
    indexed = {piece.text for piece in chunk(tokenize(text, tokenizer))}
    ids = PromptBuilder(tokenizer).build(text, "What is it?", None).ids
    sent = [piece.text for piece in chunk(TokenDecoder(tokenizer).decode(ids))]
    assert sum(piece in indexed for piece in sent) > 0.9 * len(sent)


def test_windows_are_not_embedded_and_a_longer_prompt_embeds_only_what_is_new(tokenizer, vectors, embedder):
    retriever = Retriever(vectors=vectors)
    one = tokenize(DOCUMENT, tokenizer)
    retriever.select(one, PARAPHRASE, **VIEW)
    first = list(embedder.passages)
    assert DOCUMENT[-200:] not in "".join(first)
    turn = tokenize(
        DOCUMENT + "An answer to the first question, and then another question?\n\n" * 4, tokenizer
    )
    retriever.select(turn, "What did the doctor prescribe?", **VIEW)
    assert len(embedder.passages) - len(first) <= 2
    assert len(set(embedder.passages)) == len(embedder.passages)


@pytest.mark.parametrize(
    "text", ["", " ", "\x00" * 50, "x" * 3000, "字" * 3000, "שלום مرحبا 你好 👩‍👩‍👧 " * 200, "a\n" * 2000]
)
@pytest.mark.parametrize("scorer", ["bm25", "hybrid"])
def test_hostile_documents_give_spans_within_bounds(text, scorer, tokenizer, vectors):
    document = tokenize(text, tokenizer)
    retriever = Retriever(RetrievalOptions(scorer, chunk_tokens=256), vectors=vectors)
    spans = retriever.select(document, "What is 你好?", **VIEW)
    assert sum(end - start for start, end in spans) <= 168
    assert all(32 <= start < end <= len(document.ids) - 200 for start, end in spans)
    assert all(end < start for (_, end), (start, _) in pairwise(spans))


def test_one_line_of_200_thousand_tokens_is_searched(tokenizer):
    """Without a space in it; words are told apart by punctuation, and one chunk holds the needle."""
    line = ";".join(f"v{number}={number % 97}" for number in range(30_000))
    line = line[: len(line) // 2] + ";harpsichord=42;" + line[len(line) // 2 :]
    document = tokenize(line, tokenizer)
    assert len(document.ids) > 190_000 and " " not in line and "\n" not in line
    spans = Retriever(RetrievalOptions("bm25")).select(document, "harpsichord", **VIEW)
    assert len(spans) == 1 and ";harpsichord=42;" in document.slice(*spans[0])


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="unknown scorer 'magic'; use one of bm25, dense, hybrid"):
        RetrievalOptions("magic")
    with pytest.raises(ValueError, match="diversity"):
        RetrievalOptions("bm25", diversity=0.5)


# The selection cache


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_near_duplicate_questions_share_a_selection(embedder):
    cache = SelectionCache()
    asked = "What is the code of the red vault?"
    cache.put("doc", asked, [(1, 2)], embedder.query(asked))
    same = [
        "What is the  code of the red vault? ",
        "what's the code of the red vault",
        "The red vault: what is the code?",
    ]
    for question in same:
        assert cache.get("doc", question, lambda question=question: embedder.query(question)) == [(1, 2)], (
            question
        )
    # Another key, another number, another question: not the same selection.
    others = [
        "What is the code of the blue vault?",
        "What is the code of the red vault 2?",
        "Who painted the red vault?",
    ]
    for question in others:
        assert cache.get("doc", question, lambda question=question: embedder.query(question)) is None, (
            question
        )
    assert cache.get("other doc", asked, lambda: embedder.query(asked)) is None


def test_long_questions_that_differ_in_one_word_are_told_apart(embedder):
    text = "In the correspondence between the shipping company and the port authority about unpaid berthing fees, "
    one, two = (text + f"what was demanded in the letter of {year}?" for year in (2021, 2022))
    assert embedder.query(one) @ embedder.query(two) > 0.92, "vectors alone would not do"
    cache = SelectionCache()
    cache.put("doc", one, [(1, 2)], embedder.query(one))
    assert cache.get("doc", two, lambda: embedder.query(two)) is None


def test_selections_expire_and_are_bounded():
    clock = Clock()
    cache = SelectionCache(ttl_s=10, size=2, clock=clock)
    cache.put("doc", "one", [(1, 2)])
    cache.put("doc", "two", [])
    assert cache.get("doc", "one") == [(1, 2)] and cache.get("doc", "two") == []
    cache.get("doc", "one")
    cache.put("doc", "three", [(3, 4)])
    assert cache.get("doc", "two") is None and len(cache) == 2
    clock.now = 10
    assert cache.get("doc", "one") is None and len(cache) == 0


def test_retriever_uses_the_cache_across_prompt_lengths(tokenizer, vectors, monkeypatch):
    retriever = Retriever(cache=SelectionCache(), vectors=vectors)
    builder = PromptBuilder(tokenizer)
    questions = [PARAPHRASE, "So which remedy did the doctor give to all the nauseous sailors?"]
    prompts = [builder.build(DOCUMENT, question, None) for question in questions]
    assert len(prompts[0]) != len(prompts[1])
    first = retriever.spans(prompts[0], questions[0], **VIEW)
    monkeypatch.setattr(retriever, "_scorer", None)  # a second scoring would fail
    assert retriever.spans(prompts[1], questions[1], **VIEW) == first
    with pytest.raises(AttributeError):
        retriever.spans(prompts[1], "Did it rain in town 7?", **VIEW)
    with pytest.raises(AttributeError):
        retriever.spans(prompts[1], questions[1], **VIEW | {"budget": 300})
