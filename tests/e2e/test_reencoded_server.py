"""Re-encoded draft rows on the real server: the cache of draft prompts, their memory, a separate draft model."""

from __future__ import annotations

import pytest
from conftest import (
    chat_ids,
    flush,
    generate,
    in_parallel,
    rapid_stats,
    reference_text,
    tokenizer,
    undrafted,
)
from test_identity import QUESTIONS, assert_same_tokens
from test_sampling_law import FALSE_ALARM, TINY_VIEW, first_tokens, p_value, plain_first_tokens

from rapid_sgl.bench.prompts import exact_prompt
from rapid_sgl.config import RapidConfig
from rapid_sgl.http_client import ServerError
from rapid_sgl.retrieval.prompt import PromptBuilder

SPANS = [300, 500, 900, 1000]
# Without copies, for which a draft prompt waits: how soon it is there would hang on what an answer repeats.
RAG = {"rapid_drafter": "rag", "rapid_spans": SPANS, "rapid_copy": "off"}


def cached_share(answer):
    info = answer["meta_info"]
    return info["rapid_draft_cached_tokens"] / info["rapid_draft_prompt_tokens"]


def test_same_chunks_new_question(rapid_server):
    document = reference_text(2000)
    flush(rapid_server)
    first = generate(rapid_server, chat_ids(document, QUESTIONS[0]), **RAG)
    assert cached_share(first) == 0
    for question in QUESTIONS[1:]:
        # greedy and 32 tokens: the first question's row is ready long before it ends
        assert cached_share(generate(rapid_server, chat_ids(document, question), **RAG)) >= 0.9
    flush(rapid_server)
    assert cached_share(generate(rapid_server, chat_ids(document, QUESTIONS[1]), **RAG)) == 0


def test_draft_prompt_waits_while_its_request_copies(rapid_server):
    """An answer that is copied from its first words on needs no row."""
    prompt = exact_prompt(PromptBuilder(tokenizer()), 2500, 1, "quote")
    flush(rapid_server)
    before = rapid_stats(rapid_server)["draft_kv"]["prefilled"]
    options = RAG | {"rapid_copy": "on", "rapid_draft_length": 4}
    info = generate(rapid_server, prompt.ids, 64, **options)["meta_info"]
    prefilled = rapid_stats(rapid_server)["draft_kv"]["prefilled"] - before
    assert info["rapid_copied_tokens"] > 30
    # some steps may find nothing to copy, each of which prefills a little
    assert prefilled <= 2 * RapidConfig().draft_prefill < info["rapid_draft_prompt_tokens"]


def test_tenants_do_not_share_draft_prompts(rapid_server):
    ids = chat_ids(reference_text(2000), QUESTIONS[2])

    def ask(salt):
        request = {"input_ids": ids, "cache_salt": salt}
        params = {"temperature": 0, "max_new_tokens": 24, "custom_params": RAG}
        return cached_share(rapid_server.client.generate(**request, sampling_params=params))

    ask("one")
    assert ask("two") == 0
    assert ask("one") == 1


def test_draft_prompt_of_the_clients_own(rapid_server):
    ids = chat_ids(reference_text(1500), QUESTIONS[0])
    plain = generate(rapid_server, ids, rapid_drafter="off")
    text = tokenizer().decode(chat_ids(reference_text(150), QUESTIONS[0]))
    for given in (
        {"rapid_draft_prompt": text},
        {"rapid_draft_ids": tokenizer()(text)["input_ids"]},
    ):
        answer = generate(rapid_server, ids, rapid_drafter="auto", **given)
        assert_same_tokens(rapid_server, ids, answer, plain)
        info = answer["meta_info"]
        assert (info["rapid_drafter"], info["rapid_reason"]) == ("rag", "draft_prompt")
        assert info["rapid_draft_prompt_tokens"] == len(tokenizer()(text)["input_ids"])
    assert info["rapid_draft_cached_tokens"] == info["rapid_draft_prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "drafter", "reason"),
    [
        ({}, "view", "cheapest"),
        ({"rapid_transfer": "distill"}, "rag", "transfer"),
        ({"rapid_budget": 4000}, "copy", "short_prompt"),
        ({"rapid_budget": 4000, "rapid_copy": "off"}, "off", "short_prompt"),
    ],
)
def test_auto_says_what_it_chose(rapid_server, options, drafter, reason):
    ids = chat_ids(reference_text(1500), QUESTIONS[0])
    info = generate(rapid_server, ids, 8, rapid_drafter="auto", **options)["meta_info"]
    assert (info["rapid_drafter"], info["rapid_reason"]) == (drafter, reason)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rapid_draft_ids": [5] * 9000}, "the drafter takes 8192"),
        ({"rapid_draft_ids": [5, 10**7]}, "outside the vocabulary"),
        ({"rapid_draft_prompt": ""}, "not empty"),
        ({"rapid_spans": [10, 10**6]}, "outside the prompt"),
    ],
    ids=["too long", "no token", "empty", "spans"],
)
def test_bad_draft_prompts_are_refused(rapid_server, options, text):
    with pytest.raises(ServerError, match=text):
        generate(rapid_server, chat_ids("", QUESTIONS[0]), rapid_drafter="rag", **options)
    assert rapid_server.alive


class TestDraftModel:
    """The target's four-layers-shorter copy drafts; ``--rapid-draft-tokens`` holds three of its rows."""

    def test_identity_alone_and_in_a_mixed_batch(self, draft_model_server):
        server = draft_model_server
        prompts = [chat_ids(reference_text(1100 + 90 * i), QUESTIONS[i % 6]) for i in range(10)]
        plain = undrafted(server, prompts)
        for ids, reference in zip(prompts[:3], plain, strict=False):
            answer = generate(server, ids)
            assert_same_tokens(server, ids, answer, reference)
            assert answer["meta_info"]["rapid_reason"] == "draft_model"
            assert answer["meta_info"]["spec_accept_length"] > 1.1
        drafters = ["rag", "view", "rag", "rag", "off"] * 2
        answers = in_parallel(
            10,
            lambda item: generate(server, item[0], rapid_drafter=item[1]),
            list(zip(prompts, drafters, strict=True)),
        )
        for ids, answer, reference in zip(prompts, answers, plain, strict=True):
            assert_same_tokens(server, ids, answer, reference)

    def test_sampling_law(self, draft_model_server, rapid_server):
        """As ``test_sampling_law`` has it for the served weights, which are the same; the same false-alarm rate."""
        plain = plain_first_tokens(rapid_server)
        drafted = first_tokens(draft_model_server, **TINY_VIEW, rapid_drafter="rag")
        assert p_value(drafted, plain) > FALSE_ALARM

    def test_more_rows_than_memory(self, draft_model_server):
        """Twelve rows of about 900 tokens where three fit: some wait undrafted, nobody fails, all slots return."""
        server = draft_model_server
        flush(server)
        prompts = [chat_ids(reference_text(1300 + 50 * i), QUESTIONS[i % 6]) for i in range(12)]
        long = {"max_new_tokens": 40, "ignore_eos": True}
        plain = undrafted(server, prompts, **long)
        refused = rapid_stats(server)["draft_kv"]["refused"]
        answers = in_parallel(12, lambda ids: generate(server, ids, **long), prompts)
        for ids, answer, reference in zip(prompts, answers, plain, strict=True):
            assert_same_tokens(server, ids, answer, reference, ignore_eos=True)
        memory = rapid_stats(server)["draft_kv"]
        assert memory["refused"] > refused, "there was room for every row"
        assert memory["free"] + memory["evictable"] == memory["size"]
        flush(server)
        assert rapid_stats(server)["draft_kv"]["free"] == memory["size"]
