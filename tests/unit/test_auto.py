"""Spans for requests that bring none: whom they are for, what they hold, and what a deadline does."""

import asyncio
import logging
import threading
import time
from array import array
from statistics import median

import pytest

from rapid_sgl.auto import DEADLINE, ERROR, NO_MATCH, AutoSpans
from rapid_sgl.config import RapidConfig
from rapid_sgl.request import SPANS_KEY, Limits, parse_options, spans_to_wire

pytest_plugins = ("retrieval_fixtures",)

NEEDLE = "The lighthouse keeper named his parrot Balthazar."
QUESTION = "What did the keeper of the lighthouse call his parrot?"
HAY = [f"Chapter {n} tells of the weather in town {n}. It rained for days.\n\n" for n in range(220)]


def chat(tokenizer, text):
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return array("q", tokenizer(rendered)["input_ids"])


def document(needle_at=100, hay=HAY):
    return "".join([*hay[:needle_at], NEEDLE + "\n\n", *hay[needle_at:]])


def auto_spans(tokenizer, **options):
    auto = AutoSpans(tokenizer, RapidConfig(**{"auto_spans": "bm25", "auto_deadline": 20.0, **options}))
    auto.warm_up()
    return auto


def choose(auto, *prompts, tenant=None, **options):
    """Outcomes of prompts that arrive at once."""
    config = RapidConfig(**{**vars(auto.config), **options})

    async def all_of_them():
        return await asyncio.gather(*(auto.choose(ids, config, tenant) for ids in prompts))

    return asyncio.run(all_of_them())


def test_spans_hold_the_needle_and_fit_the_budget(tokenizer):
    auto = auto_spans(tokenizer)
    ids = chat(tokenizer, document() + QUESTION)
    for windows in ({}, {"budget": 400, "head": 0, "recent": 0}, {"budget": 900, "head": 7, "recent": 333}):
        (outcome,) = choose(auto, ids, **windows)
        assert not outcome.missed
        texts = [tokenizer.decode(ids[start:end]) for start, end in outcome.spans]
        assert any(NEEDLE in text for text in texts)
        config = RapidConfig(**windows)
        assert all(config.head <= start < end <= len(ids) - config.recent for start, end in outcome.spans)
        wire = {SPANS_KEY: spans_to_wire(outcome.spans)}
        assert parse_options(wire, config, Limits(len(ids), 4)).spans == tuple(outcome.spans)
    assert auto.stats.requests == 3 and not any(auto.stats.missed.values())


def test_needle_at_the_edge_of_the_recent_window(tokenizer):
    """Wherever the needle lies, spans and windows together hold all of it."""
    auto = auto_spans(tokenizer)
    needle = tokenizer(NEEDLE)["input_ids"][1:-1]  # its ends may be tokenised with what is around
    for place in range(180, 221, 3):
        ids = chat(tokenizer, document(place) + QUESTION)
        (outcome,) = choose(auto, ids, budget=900, recent=512)
        at = next(i for i in range(len(ids)) if list(ids[i : i + len(needle)]) == needle)
        kept = {token for span in outcome.spans for token in range(*span)} | set(
            range(len(ids) - 512, len(ids))
        )
        assert kept >= set(range(at, at + len(needle)))


def test_hybrid_finds_what_is_said_in_other_words(tokenizer):
    auto = auto_spans(tokenizer, auto_spans="hybrid")
    ids = chat(tokenizer, document(30, HAY[:70]) + "Which name had the pet bird?")
    for tenant in ("one", "two"):
        (outcome,) = choose(auto, ids, tenant=tenant, budget=500, head=10, recent=100)
        assert any(NEEDLE in tokenizer.decode(ids[start:end]) for start, end in outcome.spans)


@pytest.mark.parametrize(
    ("params", "length", "wanted"),
    [
        (None, 3000, True),
        ({}, 2049, True),
        ({}, 2048, False),  # the threshold
        ({"other": 1}, 3000, True),
        ({"rapid_budget": 4000}, 3000, False),  # not drafted
        ({"rapid_budget": 2900}, 3000, True),
        ({"rapid_drafter": "off"}, 3000, False),
        ({"rapid_drafter": "auto"}, 3000, True),
        ({"rapid_drafter": "rag"}, 3000, True),
        ({"rapid_spans": [5, 9]}, 3000, False),
        ({"rapid_spans": []}, 3000, False),
        ({"rapid_draft_ids": [1], "rapid_drafter": "rag"}, 3000, False),
        ({"rapid_head": 512}, 3000, False),  # no room between the windows
    ],
)
def test_whom_it_concerns(tokenizer, params, length, wanted):
    config = auto_spans(tokenizer).config_for(params, Limits(length, 4))
    assert (config is not None) == wanted
    if wanted:
        assert (
            config
            == parse_options(
                params, RapidConfig(auto_spans="bm25", auto_deadline=20.0), Limits(length, 4)
            ).config
        )


def test_no_spans_where_the_server_cannot_use_them(tokenizer):
    auto = auto_spans(tokenizer, drafter="rag", draft_tokens=0)
    assert auto.config_for(None, Limits(3000, 4)) is None


def test_deadline_zero(tokenizer):
    auto = auto_spans(tokenizer, auto_deadline=0.0)
    outcomes = choose(auto, *[chat(tokenizer, document() + QUESTION)] * 5)
    assert all(outcome.spans == [] and outcome.missed == DEADLINE for outcome in outcomes)
    assert auto.stats.missed[DEADLINE] == 5


def test_a_late_document_does_not_take_every_thread(tokenizer):
    """While its work goes on, requests about the same document go on at once, others get their spans."""
    auto = auto_spans(tokenizer, auto_deadline=1.0)
    go_on, select = threading.Event(), auto._selector.select
    slow, fast = chat(tokenizer, document() + QUESTION), chat(tokenizer, document(hay=HAY[10:]) + QUESTION)

    def select_when_told(ids, **options):
        if ids == slow:
            go_on.wait()
        return select(ids, **options)

    auto._selector.select = select_when_told
    try:
        (first,) = choose(auto, slow)
        *late, other = choose(auto, *[slow] * 5, fast)
    finally:
        go_on.set()
    assert first.missed == DEADLINE and first.seconds >= 1.0
    assert all(outcome.missed == DEADLINE and outcome.seconds < 0.5 for outcome in late)
    assert other.spans
    auto._pool.shutdown()  # waits for the work under way, which has kept what it found
    assert not any(work.running() for work in auto._late._entries.values())


def test_failure_is_told_once_and_costs_only_the_spans(tokenizer, caplog):
    auto = auto_spans(tokenizer)
    broken = array("q", [-1] * 3000)  # no token of any vocabulary
    with caplog.at_level(logging.WARNING):
        outcomes = choose(auto, broken, broken)
    assert [outcome.missed for outcome in outcomes] == [ERROR, ERROR]
    assert len(caplog.records) == 1 and "go on without spans" in caplog.text
    (fine,) = choose(auto, chat(tokenizer, document() + QUESTION))
    assert fine.spans


def test_no_match(tokenizer):
    auto = auto_spans(tokenizer)
    (outcome,) = choose(auto, chat(tokenizer, document() + "Zyxw vuts rqpo?"))
    assert outcome.spans == [] and outcome.missed == NO_MATCH


@pytest.mark.parametrize(
    "text",
    ["\x00" * 3000, "a" * 20000, "船が港を出た。🚢 שלום " * 300, "\n" * 9000, "<|im_start|>user\n" * 900],
)
def test_odd_prompts(tokenizer, text):
    auto = auto_spans(tokenizer)
    ids = chat(tokenizer, text)
    (outcome,) = choose(auto, ids)
    assert outcome.missed in ("", NO_MATCH)
    parse_options({SPANS_KEY: spans_to_wire(outcome.spans)}, auto.config, Limits(len(ids), 4))


def test_next_question_reuses_the_document(tokenizer, monkeypatch):
    import rapid_sgl.retrieval.pipeline as pipeline

    cuts = []
    monkeypatch.setattr(pipeline, "chunk", lambda *args, **kw: cuts.append(1) or chunk(*args, **kw))
    from rapid_sgl.retrieval.chunking import chunk

    auto = auto_spans(tokenizer)
    questions = [QUESTION, "Who was called Balthazar?", "Tell me: was the parrot of the lighthouse old?"]
    for asked in questions:
        (outcome,) = choose(auto, chat(tokenizer, document() + asked))
        assert outcome.spans
    assert len(cuts) == 1
    choose(auto, chat(tokenizer, document() + QUESTION), tenant=("someone", "else"))
    assert len(cuts) == 2  # tenants share nothing


def test_a_hundred_at_once_leave_the_event_loop_free(tokenizer):
    auto = auto_spans(tokenizer)
    prompts = [chat(tokenizer, document(at) + QUESTION) for at in range(40, 140)]
    config = auto.config
    asyncio.run(auto.choose(prompts[0], config, None))
    gaps = []

    async def watch():
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)

    async def all_of_them():
        watcher = asyncio.create_task(watch())
        outcomes = await asyncio.gather(*(auto.choose(ids, config, None) for ids in prompts))
        watcher.cancel()
        return outcomes

    started = time.monotonic()
    outcomes = asyncio.run(all_of_them())
    took = time.monotonic() - started
    assert all(outcome.spans for outcome in outcomes)
    # On the loop itself they would run in one go.
    assert median(gaps) < took / 10
