"""Requests that end in every other way than politely; nothing is lost and every KV slot comes back."""

from __future__ import annotations

import random
import time

import pytest
import requests
from conftest import DRAFTED, body, chat_ids, flush, generate, in_parallel, rapid_stats, reference_text

VIEW = {"rapid_budget": 96, "rapid_head": 16, "rapid_recent": 48}
REQUESTS, CONCURRENCY, ANSWER = 200, 16, 24


def used_tokens(server) -> int:
    """KV slots in use after the prefix cache was flushed: 0 when nothing leaked."""
    deadline = time.monotonic() + 60
    while rapid_stats(server)["running"] and time.monotonic() < deadline:
        time.sleep(0.2)
    flush(server)
    return server.client._json("GET", "/v1/loads")["loads"][0]["num_used_tokens"]


@pytest.fixture(scope="module")
def prompts(crowded_server):
    """Twelve prompts, 120 to 160 tokens, with their undrafted greedy answers, one at a time."""
    ids = [
        chat_ids(reference_text(80 + 14 * i)[i * 40 :], f"Question {i}: what is explained above?")
        for i in range(12)
    ]
    return ids, [
        generate(crowded_server, prompt, ANSWER, rapid_drafter="off")["output_ids"] for prompt in ids
    ]


def test_overload(crowded_server, prompts):
    """200 requests at concurrency 16 over a pool that holds a fraction of them."""
    ids, answers = prompts
    rng = random.Random(0)
    kinds = [VIEW, {**VIEW, **DRAFTED}, {"rapid_drafter": "off"}]
    work = [(i % len(ids), rng.choice(kinds)) for i in range(REQUESTS)]

    def ask(item):
        which, options = item
        return which, generate(crowded_server, ids[which], ANSWER, **options)

    retractions = 0
    for which, answer in in_parallel(CONCURRENCY, ask, work):
        assert answer["output_ids"] == answers[which]
        retractions += answer["meta_info"]["num_retractions"]
    assert retractions > 0, "the pool was never too small: the test did not test retraction"
    assert used_tokens(crowded_server) == 0


def test_clients_that_hang_up(crowded_server, prompts):
    """Fifty streams are dropped mid-answer while others run to their end."""
    ids, answers = prompts

    def drop(i):
        request = body(ids[i % len(ids)], 200, ignore_eos=True, stream=True, **VIEW)
        with requests.post(
            crowded_server.url + "/generate", json=request, stream=True, timeout=600
        ) as response:
            for _, line in zip(range(1 + i % 4), response.iter_lines(), strict=False):
                assert not line or line.startswith(b"data:")

    def ask(i):
        if i % 2:
            return drop(i)
        return generate(crowded_server, ids[i % len(ids)], ANSWER, **VIEW)["output_ids"]

    for i, answer in enumerate(in_parallel(CONCURRENCY, ask, list(range(100)))):
        assert answer is None or answer == answers[i % len(ids)]
    assert used_tokens(crowded_server) == 0


def test_aborts(crowded_server, prompts):
    """Fifty requests are aborted through /abort_request, queued, prefilling or decoding."""
    ids, answers = prompts

    def ask(i):
        if i % 2 == 0:
            return generate(crowded_server, ids[i % len(ids)], ANSWER, **VIEW)["output_ids"]
        request = body(ids[i % len(ids)], 200, ignore_eos=True, **VIEW) | {"rid": f"abort-{i}"}
        return requests.post(crowded_server.url + "/generate", json=request, timeout=600).json()

    def abort_later(i):
        time.sleep(0.02 * i)
        requests.post(crowded_server.url + "/abort_request", json={"rid": f"abort-{i}"}, timeout=60)

    calls = [lambda i=i: ask(i) for i in range(100)] + [lambda i=i: abort_later(i) for i in range(1, 100, 2)]
    results = in_parallel(len(calls), lambda call: call(), calls)
    for i, answer in enumerate(results[:100]):
        if i % 2 == 0:
            assert answer == answers[i % len(ids)]
    assert used_tokens(crowded_server) == 0


def test_prefix_hits_and_flush(rapid_server):
    """The same document twice is a prefix hit; drafts over cached slots commit the same tokens; a flush empties both."""
    first = chat_ids(reference_text(1500), "What is this text?")
    second = chat_ids(reference_text(1500), "Who should read it?")
    flush(rapid_server)
    cold = generate(rapid_server, second)
    generate(rapid_server, first)
    warm = generate(rapid_server, second)
    assert warm["meta_info"]["cached_tokens"] > 1400
    assert warm["output_ids"] == cold["output_ids"]
    assert used_tokens(rapid_server) == 0
    assert rapid_stats(rapid_server)["running"] == 0


def test_weight_update_keeps_drafting(rapid_server):
    """Weights are reloaded in place; the drafter shares them, so drafts still agree."""
    from rapid_sgl.models import embedded_model_path

    ids = chat_ids(reference_text(1500), "Summarise the text above in two sentences.")
    before = generate(rapid_server, ids, 48, ignore_eos=True, **DRAFTED)
    reply = requests.post(
        rapid_server.url + "/update_weights_from_disk",
        json={"model_path": str(embedded_model_path())},
        timeout=600,
    ).json()
    assert reply["success"], reply
    after = generate(rapid_server, ids, 48, ignore_eos=True, **DRAFTED)
    assert after["output_ids"] == before["output_ids"]
    accepted = [answer["meta_info"]["spec_accept_length"] for answer in (before, after)]
    assert accepted[0] == pytest.approx(accepted[1]) and accepted[0] > 1.5
