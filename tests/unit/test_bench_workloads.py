"""Workloads of `rapid-sgl bench`: exact prompts, sources where they are said to be, spans by kind of retrieval."""

import os

import pytest

from rapid_sgl.bench import RETRIEVALS, BenchError
from rapid_sgl.bench.prompts import SpanChooser, bench_prompts
from rapid_sgl.config import RapidConfig
from rapid_sgl.models import embedded_model_path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PLANTED = ("quote", "extract", "rewrite")
CONFIG = RapidConfig()


@pytest.fixture(scope="module")
def builder():
    from transformers import AutoTokenizer

    from rapid_sgl.retrieval.prompt import PromptBuilder

    return PromptBuilder(AutoTokenizer.from_pretrained(embedded_model_path()))


def text(builder, ids):
    return builder.tokenizer.decode(ids)


@pytest.mark.parametrize("workload", PLANTED)
def test_the_answer_is_begun_and_goes_on_in_the_source(builder, workload):
    for prompt in bench_prompts(builder, 1500, 3, workload):
        assert len(prompt.ids) == 1500 and prompt.ids[-len(prompt.prefix) :] == prompt.prefix
        start, end = prompt.source
        assert (
            CONFIG.head < start and end < 1500 and end - start - len(prompt.prefix) >= 100
        )  # more than an answer takes
        source, begun = text(builder, prompt.ids[start:end]), text(builder, prompt.prefix)
        last_line = begun.splitlines()[-1]
        assert last_line in source and not source.endswith(last_line)
        kept = [line for line in begun.splitlines() if line in source]
        # rewrite has one changed line, the others none
        assert len(kept) == len(begun.splitlines()) - (workload == "rewrite")


def test_members_differ_in_text_and_in_what_is_planted(builder):
    one, other = bench_prompts(builder, 1500, 2, "extract")
    assert one.prefix != other.prefix and one.ids[100:200] != other.ids[100:200]


@pytest.mark.parametrize("retrieval", RETRIEVALS)
def test_spans_fit_between_the_windows(builder, retrieval):
    room = CONFIG.budget - CONFIG.head - CONFIG.recent
    chooser = SpanChooser()
    for prompt in bench_prompts(builder, 2500, 2, "rewrite"):
        found = chooser.find(prompt, retrieval, CONFIG)
        assert chooser.find(prompt, retrieval, CONFIG) is found and found.ms > 0
        assert 0 < sum(end - start for start, end in found.spans) <= room
        assert all(CONFIG.head <= start < end <= 2500 - CONFIG.recent for start, end in found.spans)
        if retrieval == "oracle":
            assert found.spans == [prompt.source]


def test_what_retrieval_knows_shows_in_the_spans(builder):
    """BM25 finds the passage by the question's words; random chunks hardly meet it."""

    def covered(prompt, retrieval):
        spans = SpanChooser().find(prompt, retrieval, CONFIG).spans
        start, end = prompt.source
        return sum(max(0, min(end, right) - max(start, left)) for left, right in spans) / (end - start)

    prompts = [one for workload in PLANTED for one in bench_prompts(builder, 6000, 3, workload)]
    bm25, chance = (sum(covered(one, kind) for one in prompts) / len(prompts) for kind in ("bm25", "random"))
    assert bm25 > 2 * chance


def test_there_is_no_oracle_of_an_ordinary_answer(builder):
    (prompt,) = bench_prompts(builder, 1500, 1)
    with pytest.raises(BenchError, match="--workload quote"):
        SpanChooser().find(prompt, "oracle", CONFIG)


def test_plain_rag_asks_the_same_about_its_budget(builder):
    (prompt,) = bench_prompts(builder, 3000, 1, "quote")
    ids = SpanChooser().excerpt(builder, prompt, "oracle", 600)
    assert len(ids) <= 600 and ids[-len(prompt.prefix) :] == prompt.prefix
    asked, whole = text(builder, ids), text(builder, prompt.ids)
    assert prompt.question in asked and prompt.question in whole
    assert text(builder, prompt.ids[slice(*prompt.source)]) in asked
    with pytest.raises(BenchError, match="budget 100"):
        SpanChooser().excerpt(builder, prompt, "oracle", 100)


def test_a_context_without_room_for_the_passage(builder):
    with pytest.raises(BenchError, match="use 2000 or more"):
        bench_prompts(builder, 450, 1, "extract")
