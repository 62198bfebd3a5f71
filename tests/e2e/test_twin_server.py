"""The int8 twin on the real server: other drafts, the same answers."""

from __future__ import annotations

import pytest
import requests
from conftest import chat_ids, generate, in_parallel, reference_text, undrafted
from test_auto_server import PROMPT
from test_identity import QUESTIONS, assert_same_tokens

from rapid_sgl.http_client import ServerError
from rapid_sgl.models import embedded_model_path

WEIGHTS = "rapid_drafter_weights"


@pytest.fixture(scope="module")
def answers(twin_server):
    prompts = [chat_ids(reference_text(1300 + 200 * i), QUESTIONS[i % 6]) for i in range(8)]
    return prompts, undrafted(twin_server, prompts)


def test_identity_alone(twin_server, answers):
    accepted = []
    for ids, plain in zip(*answers, strict=True):
        answer = generate(twin_server, ids)
        assert_same_tokens(twin_server, ids, answer, plain)
        accepted.append(answer["meta_info"]["spec_accept_length"])
    assert sum(accepted) / len(accepted) > 1.8, accepted


def test_both_weights_both_rows_in_one_batch(twin_server, answers):
    prompts, plain = answers
    kinds = [{WEIGHTS: w, "rapid_drafter": d} for w in ("int8", "same") for d in ("view", "rag")] * 2
    mixed = in_parallel(
        8, lambda item: generate(twin_server, item[0], **item[1]), list(zip(prompts, kinds, strict=True))
    )
    for ids, answer, reference in zip(prompts, mixed, plain, strict=True):
        assert_same_tokens(twin_server, ids, answer, reference)


def test_draft_prompts_of_other_weights_are_not_reused(twin_server):
    ids = chat_ids(reference_text(1700), QUESTIONS[3])
    ask = {"max_new_tokens": 24, "ignore_eos": True, "rapid_drafter": "rag"}
    cached = [
        generate(twin_server, ids, **ask, **{WEIGHTS: weights})["meta_info"]["rapid_draft_cached_tokens"]
        for weights in ("int8", "same", "int8", "same")
    ]
    # the first tokens of every prompt here are the same, so some test before may have left those
    assert max(cached[:2]) < 100 and cached[2] == cached[3] > 700


def test_the_twin_follows_a_weight_update(twin_server, answers):
    ask = {"max_new_tokens": 48, "ignore_eos": True}
    before = generate(twin_server, answers[0][1], **ask)
    reply = requests.post(
        twin_server.url + "/update_weights_from_disk",
        json={"model_path": str(embedded_model_path())},
        timeout=600,
    ).json()
    assert reply["success"], reply
    after = generate(twin_server, answers[0][1], **ask)
    assert after["output_ids"] == before["output_ids"]
    accepted = [answer["meta_info"]["spec_accept_length"] for answer in (before, after)]
    assert accepted[0] == pytest.approx(accepted[1])


def test_weights_that_are_not_loaded_are_refused(twin_server):
    with pytest.raises(ServerError, match="not loaded on this server"):
        generate(twin_server, chat_ids("", QUESTIONS[0]), **{WEIGHTS: "fp8"})


def test_no_time_to_choose_spans(twin_server, rapid_server):
    """Head and recent window draft, with the same answer."""
    late = generate(twin_server, PROMPT)
    assert_same_tokens(twin_server, PROMPT, late, generate(rapid_server, PROMPT, rapid_drafter="off"))
    info = late["meta_info"]
    assert info["rapid_drafter"] == "view" and info["spec_accept_length"] > 1
    assert (info["rapid_spans_source"], info["rapid_auto_missed"]) == ("none", "deadline")
