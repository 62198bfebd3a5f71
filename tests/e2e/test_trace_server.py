"""``rapid_trace``: where each token came from, with the numbers that decided it."""

from __future__ import annotations

import math

import pytest
from conftest import chat_ids, generate, reference_text

IDS = chat_ids(reference_text(1500), "Quote the first three sentences of the text.")


def test_origins_and_probabilities(rapid_server):
    answer = generate(
        rapid_server, IDS, 48, ignore_eos=True, rapid_trace="on", rapid_draft_length=4, return_logprob=True
    )
    info = answer["meta_info"]
    trace = info["rapid_trace"][: len(answer["output_ids"]) - 1]  # the first token is the prefill's
    assert len(trace) == len(answer["output_ids"]) - 1
    origins = [origin for origin, *_ in trace]
    assert {"model", "correction", "bonus"} & set(origins) and "plain" in origins[:1]
    assert (
        abs(origins.count("copy") - info["rapid_copied_tokens"]) <= 4
    )  # of the last chain, some may be cut off
    logprobs = [entry[0] for entry in info["output_token_logprobs"][1:]]
    for (origin, p, q, p_hat), logprob in zip(trace, logprobs, strict=True):
        assert p == pytest.approx(math.exp(logprob), abs=1e-3) and p_hat == p
        assert (q is None) == (origin in ("bonus", "plain"))
        if origin == "copy":
            assert q == 1
    assert "rapid_trace" not in generate(rapid_server, IDS, 4)["meta_info"]


def test_what_a_transfer_did_is_in_the_trace(rapid_server):
    options = {"rapid_transfer": "mixture", "rapid_lambda": 0.3, "rapid_trace": "on"}
    answer = generate(rapid_server, IDS, 32, temperature=1.0, sampling_seed=5, ignore_eos=True, **options)
    drafted = [record for record in answer["meta_info"]["rapid_trace"] if record[2] is not None]
    assert len(drafted) > 10
    for _, p, q, p_hat in drafted:
        assert p_hat == pytest.approx(0.7 * p + 0.3 * q, abs=1e-5)
