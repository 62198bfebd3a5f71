"""Per-request options over HTTP: what is wrong is a 400 that says so, and nothing crashes the server."""

from __future__ import annotations

from dataclasses import fields

import pytest
import requests
from conftest import body, chat_ids, generate, reference_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rapid_sgl.config import RapidConfig, public_name

PROMPT = "What is a statement?"


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"rapid_spam": 1}, "unknown option 'rapid_spam'"),
        ({"rapid_lambda": 1.5}, "rapid_lambda=1.5 is out of range"),
        ({"rapid_draft_length": 99}, "rapid_draft_length=99"),
        ({"rapid_spans": [0, 100000]}, "outside the prompt"),
        ({"rapid_drafter": "magic"}, "not one of view, rag, auto, off"),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_wrong_options_are_400(rapid_server, path, params, text):
    if path == "/generate":
        payload = body([1, 2, 3], 2)
        payload["sampling_params"]["custom_params"] = params
    else:
        payload = {"model": "default", "max_tokens": 2, "custom_params": params}
        payload |= (
            {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
        )
    response = requests.post(rapid_server.url + path, json=payload, timeout=600)
    assert response.status_code == 400, response.text
    assert text in response.text


def test_openai_client_sends_options(rapid_server):
    import openai

    client = openai.OpenAI(base_url=rapid_server.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": reference_text(1500) + "\n\n" + PROMPT}]
    ask = {"model": "default", "messages": messages, "max_tokens": 16, "temperature": 0}
    drafted = client.chat.completions.create(
        **ask, extra_body={"custom_params": {"rapid_drafter": "view", "rapid_spans": [100, 300]}}
    )
    plain = client.chat.completions.create(**ask, extra_body={"custom_params": {"rapid_drafter": "off"}})
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="rapid_budget"):
        client.chat.completions.create(**ask, extra_body={"custom_params": {"rapid_budget": 0}})


def test_seeded_sampling_repeats(rapid_server):
    ids = chat_ids(reference_text(1500), PROMPT)
    ask = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 24}
    first, second = generate(rapid_server, ids, **ask), generate(rapid_server, ids, **ask)
    other = generate(rapid_server, ids, **{**ask, "sampling_seed": 8})
    assert first["output_ids"] == second["output_ids"]
    assert first["output_ids"] != other["output_ids"]


def test_sampled_grammar_that_ends_inside_a_chain(rapid_server):
    """Every chain of the step is cut short where its grammar is complete."""
    ids = chat_ids(reference_text(1500), "Answer yes or no: is this a manual?")
    ask = {"temperature": 1.0, "regex": "(yes|no)", "max_new_tokens": 30, "n": 4}
    for answer in generate(rapid_server, ids, **ask, rapid_transfer="logits", rapid_lambda=0.5):
        assert answer["text"] in ("yes", "no")
    for answer in generate(rapid_server, ids, **ask):
        assert answer["text"] in ("yes", "no")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = (
    scalars
    | st.lists(scalars | st.lists(scalars, max_size=2), max_size=6)
    | st.dictionaries(st.text(max_size=3), scalars, max_size=2)
)
names = [public_name(field.name) for field in fields(RapidConfig)]
keys = st.sampled_from([*names, "spans", "draft_ids", "draft_prompt", "preset", "x"]).map("rapid_".__add__)
plausible = st.fixed_dictionaries(
    {},
    optional={
        "rapid_drafter": st.sampled_from(["view", "rag", "auto", "off"]),
        "rapid_draft_ids": st.lists(st.integers(-1, 50_000), max_size=40),
        "rapid_draft_prompt": st.text(max_size=20),
        "rapid_preset": st.sampled_from(["lossless", "paper", "mixture"]),
        "rapid_schedule": st.sampled_from(["constant", "linear", "confidence", "retrieval"]),
        "rapid_gate": st.floats(0, 1),
        "rapid_score": st.floats(0, 1),
        "rapid_spans": st.lists(st.integers(-2, 400), max_size=6),
        "rapid_draft_length": st.integers(0, 12) | st.just("auto"),
        "rapid_copy": st.sampled_from(["on", "off"]),
        "rapid_trace": st.sampled_from(["on", "off"]),
        "rapid_stop_below": st.floats(0, 1),
        "rapid_reselect": st.integers(-1, 4),
        "rapid_budget": st.integers(0, 300),
        "rapid_head": st.integers(0, 150),
        "rapid_recent": st.integers(0, 150),
        "rapid_transfer": st.sampled_from(["none", "mixture", "logits", "distill"]),
        "rapid_lambda": st.floats(-0.1, 1.1),
        "rapid_eta": st.floats(0, 1e30) | st.integers(0, 50),
        "rapid_alpha": st.floats(0, 1),
        "rapid_residual": st.sampled_from(["exact", "paper"]),
    },
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    params=st.dictionaries(keys | st.text(max_size=4), values, max_size=4) | plausible,
    temperature=st.sampled_from([0, 0.1, 1.0]),
)
def test_no_options_crash_the_server(rapid_server, params, temperature):
    payload = body(chat_ids(reference_text(330), PROMPT), 4, temperature=temperature)
    payload["sampling_params"]["custom_params"] = params
    # NaN and infinity are not JSON, but Python servers read them: send them as they come
    response = requests.post(
        rapid_server.url + "/generate",
        data=_json(payload),
        headers={"Content-Type": "application/json"},
        timeout=600,
    )
    assert response.status_code in (200, 400), f"{response.status_code}: {response.text[:300]}"
    if response.status_code == 200:
        assert len(response.json()["output_ids"]) >= 1
    assert rapid_server.alive


def _json(payload):
    import json

    return json.dumps(payload)
