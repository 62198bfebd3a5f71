"""Spans that the server chooses for clients which have never heard of them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import requests
from conftest import DRAFTED, body, chat_ids, flush, generate, in_parallel, reference_text, serve, tokenizer
from test_identity import assert_same_tokens

from rapid_sgl.models import embedded_model_path

NEEDLE = "The lighthouse keeper at Cape Sorrow named his parrot Balthazar."
QUESTION = "What did the lighthouse keeper call his parrot?"
UNTOUCHED = {"rapid_auto_spans", "rapid_auto_missed", "rapid_auto_ms"}


def haystack(tokens: int = 3000) -> str:
    """The reference text with the needle in its middle."""
    text = reference_text(tokens)
    middle = text.index("\n\n", len(text) // 2)
    return f"{text[:middle]}\n\n{NEEDLE}{text[middle:]}"


PROMPT = chat_ids(haystack(), QUESTION)


@pytest.fixture(scope="module")
def auto_server(tmp_path_factory):
    """Also with a draft model, which only re-encoded rows use: the embedded model itself."""
    model = f"--speculative-draft-model-path={embedded_model_path()}"
    yield from serve(tmp_path_factory.mktemp("auto"), "--rapid-auto-spans=bm25", model)


def covers_needle(ids, flat):
    return any(NEEDLE in tokenizer().decode(ids[a:b]) for a, b in zip(flat[::2], flat[1::2], strict=True))


def test_unmodified_openai_client(auto_server):
    client = openai.OpenAI(base_url=auto_server.url + "/v1", api_key="none", max_retries=0)
    ask = {
        "model": "default",
        "messages": [{"role": "user", "content": f"{haystack()}\n\n{QUESTION}"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    # `return_meta_info` is SGLang's own, for this test to look on
    answer = client.chat.completions.create(**ask, extra_body={"return_meta_info": True})
    info = answer.choices[0].meta_info
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert (info["rapid_spans_source"], info["rapid_drafter"]) == ("auto", "view")
    assert covers_needle(PROMPT, info["rapid_auto_spans"])
    plain = client.chat.completions.create(**ask, extra_body={"custom_params": {"rapid_drafter": "off"}})
    assert answer.choices[0].message.content == plain.choices[0].message.content
    text = "".join(
        event.choices[0].delta.content or "" for event in client.chat.completions.create(**ask, stream=True)
    )
    assert text == plain.choices[0].message.content


def test_every_road_to_the_scheduler(auto_server):
    """Text, ids, batches of either, samples of one prompt, a stream, and both drafters."""
    client, text = auto_server.client, tokenizer().decode(PROMPT)
    params = {"temperature": 0, "max_new_tokens": 8}
    answers = [client.generate(text=text, sampling_params=params)]
    answers += client.generate(text=[text, text], sampling_params=params)
    answers += client.generate(**body([PROMPT, PROMPT], 8))
    answers += generate(auto_server, PROMPT, 8, n=3)
    answers += [generate(auto_server, PROMPT, 8, rapid_drafter="rag")]
    for answer in answers:
        assert answer["meta_info"]["rapid_spans_source"] == "auto"
    chosen = [answer["meta_info"].get("rapid_auto_spans") for answer in answers]
    assert sum(spans is None for spans in chosen) == 2  # the samples after the first one share its spans
    assert all(covers_needle(PROMPT, spans) for spans in chosen if spans is not None)
    *_, last = client.stream(**body(PROMPT, 8))
    assert covers_needle(PROMPT, last.meta_info["rapid_auto_spans"])


@pytest.mark.parametrize(
    ("tokens", "options", "source"),
    [
        (1500, {}, "none"),  # below the threshold
        (3000, {"rapid_drafter": "off"}, "none"),
        (3000, {"rapid_budget": 4000}, "none"),
        (3000, {"rapid_spans": []}, "none"),
        (3000, {"rapid_spans": [100, 200]}, "request"),
    ],
)
def test_untouched(auto_server, tokens, options, source):
    info = generate(auto_server, chat_ids(haystack(tokens), QUESTION), 8, **options)["meta_info"]
    assert info["rapid_spans_source"] == source
    assert not UNTOUCHED & set(info)


def test_windows_of_the_request(auto_server):
    info = generate(auto_server, PROMPT, 8, rapid_budget=400, rapid_head=0, rapid_recent=100)["meta_info"]
    flat = info["rapid_auto_spans"]
    assert covers_needle(PROMPT, flat)
    assert sum(flat[1::2]) - sum(flat[::2]) <= 300


def test_conversation_with_a_tool(auto_server):
    """The user's question counts, not the tool result that ends the prompt."""
    messages = [
        {"role": "system", "content": haystack()},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "I look into the log."},
        {"role": "tool", "content": "Nothing in the log. " * 120},
    ]
    ids = tokenizer().apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert covers_needle(ids, generate(auto_server, ids, 8)["meta_info"]["rapid_auto_spans"])


def test_many_at_once(auto_server):
    prompts = [chat_ids(haystack(2200 + 40 * i), QUESTION) for i in range(16)]

    def ask(ids):
        return generate(auto_server, ids, 4)["meta_info"]["rapid_spans_source"]

    assert in_parallel(16, ask, prompts) == ["auto"] * 16


@pytest.mark.parametrize("attempt", range(5))
def test_abort_while_spans_are_chosen(auto_server, attempt):
    """SGLang sends the first abort of a request only; it must not be lost on the way."""
    ids, rid = chat_ids(haystack(2500 + 100 * attempt), QUESTION), f"aborted-{attempt}"
    with ThreadPoolExecutor(1) as pool:
        payload = {**body(ids, 1500, ignore_eos=True), "rid": rid}
        answer = pool.submit(requests.post, f"{auto_server.url}/generate", json=payload, timeout=600)
        while not answer.done():
            requests.post(f"{auto_server.url}/abort_request", json={"rid": rid}, timeout=60)
            time.sleep(0.002)
    response = answer.result()
    assert response.status_code != 200 or response.json()["meta_info"]["completion_tokens"] < 1500


def test_off_by_default(auto_server, rapid_server):
    """The same answer, and no word of spans."""
    drafted = generate(auto_server, PROMPT)
    plain = generate(rapid_server, PROMPT)
    assert_same_tokens(rapid_server, PROMPT, plain, drafted)
    assert not (UNTOUCHED | {"rapid_spans_source"}) & set(plain["meta_info"])


def test_own_weights_as_a_separate_model_accept_alike(auto_server, rapid_server):
    """The embedded model drafting for itself from a second copy of its weights: the same drafts, the same fate."""
    ids = chat_ids(reference_text(1500), QUESTION)
    spans = {"rapid_drafter": "rag", "rapid_spans": [300, 500, 900, 1000]}
    infos = []
    for server in (rapid_server, auto_server):
        flush(server)
        for _ in range(2):
            answer = generate(server, ids, 64, ignore_eos=True, **spans, **DRAFTED)
        infos.append(answer["meta_info"])
    alone, separate = infos
    assert separate["rapid_draft_cached_tokens"] == alone["rapid_draft_cached_tokens"] > 900
    assert separate["spec_accept_length"] == pytest.approx(alone["spec_accept_length"])
