"""RapidConfig and the wire keys: defaults, round trips, one clear error for each way to be wrong."""

import pytest

from rapid_sgl.config import RapidConfig, RapidOptionError
from rapid_sgl.request import Limits, RequestOptions, parse_options, spans_to_wire, tokenize_draft_prompt

DEFAULTS = RapidConfig()


def parse(params, prompt_len=100, max_draft_length=4):
    return parse_options(params, DEFAULTS, Limits(prompt_len, max_draft_length, 500, 1000))


def test_environment_round_trip():
    config = RapidConfig(budget=2048, lam=0.25, transfer="mixture", drafter="off")
    assert RapidConfig.from_env(config.to_env()) == config
    assert RapidConfig.from_env({"PATH": "/bin"}) == DEFAULTS


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RAPID_SGL_BUGET": "5"}, "unknown environment variable RAPID_SGL_BUGET"),
        ({"RAPID_SGL_BUDGET": "many"}, "RAPID_SGL_BUDGET='many' is not an integer"),
        ({"RAPID_SGL_LAMBDA": "1.5"}, "rapid_lambda=1.5 is out of range"),
        ({"RAPID_SGL_ETA": "nan"}, "rapid_eta=nan is out of range"),
    ],
)
def test_bad_environment(env, text):
    with pytest.raises(RapidOptionError, match=text):
        RapidConfig.from_env(env)


def test_request_overrides_only_what_it_names():
    options = parse(
        {"rapid_lambda": 1, "rapid_transfer": "mixture", "rapid_spans": [3, 5, 5, 9], "other": object()}
    )
    assert options.spans == ((3, 5), (5, 9))
    assert options.config == RapidConfig(lam=1.0, transfer="mixture")
    assert spans_to_wire(options.spans) == [3, 5, 5, 9]
    assert parse(None) == parse({}) == parse({"other": 1}) == RequestOptions(DEFAULTS)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"rapid_spam": 1}, "unknown option 'rapid_spam'"),
        ({"rapid_draft_length": True}, "rapid_draft_length=True is a boolean, not an integer or 'auto'"),
        ({"rapid_draft_length": "many"}, "'many' is a string, not an integer or 'auto'"),
        ({"rapid_copy": True}, "is a boolean, not a string"),
        ({"rapid_max_draft_length": 5}, "unknown option 'rapid_max_draft_length'"),
        ({"rapid_draft_length": 2.0}, "is a number, not an integer"),
        ({"rapid_draft_length": 5}, "exceeds the server's 4"),
        ({"rapid_draft_length": 0}, "out of range"),
        ({"rapid_drafter": "rags"}, "'rags' is not one of view, rag, auto, off"),
        ({"rapid_lambda": "0.1"}, "is a string, not a number"),
        ({"rapid_lambda": -0.1}, "out of range"),
        ({"rapid_eta": float("inf")}, "out of range"),
        ({"rapid_budget": 100}, "exceeds rapid_budget=100"),
        ({"rapid_spans": [0, 101]}, "outside the prompt of 100 tokens"),
        ({"rapid_spans": [-1, 5]}, "outside the prompt"),
        ({"rapid_spans": [5, 5]}, "empty"),
        ({"rapid_spans": [5]}, "come in pairs"),
        ({"rapid_spans": [0, 5, 4, 9]}, "sorted and disjoint"),
        ({"rapid_spans": "0,5"}, "flat list of integers"),
        ({"rapid_spans": [0, 5.0]}, "flat list of integers"),
        ({"rapid_spans": None}, "flat list of integers"),
        ({"rapid_residual": None}, "is a NoneType, not a string"),
        ({"rapid_schedule": "retrieval"}, "transfers nothing without rapid_score"),
        ({"rapid_schedule": "rising"}, "not one of constant, linear, confidence, retrieval"),
        ({"rapid_gate": 1.1}, "out of range"),
        ({"rapid_draft_tokens": 5}, "unknown option 'rapid_draft_tokens'"),
        ({"rapid_draft_ids": [1, 2]}, "rapid_drafter='view', which has no use for it"),
        ({"rapid_draft_ids": [1, 1000], "rapid_drafter": "rag"}, "outside the vocabulary of 1000"),
        ({"rapid_draft_ids": [1, -1], "rapid_drafter": "rag"}, "outside the vocabulary"),
        ({"rapid_draft_ids": [1, True], "rapid_drafter": "rag"}, "list of token ids"),
        ({"rapid_draft_ids": "12", "rapid_drafter": "rag"}, "list of token ids"),
        ({"rapid_draft_ids": [1] * 500, "rapid_drafter": "rag"}, "the drafter takes 500 with the answer"),
        ({"rapid_draft_prompt": "x", "rapid_drafter": "rag"}, "needs a server with a tokenizer"),
    ],
)
def test_bad_request(params, text):
    with pytest.raises(RapidOptionError, match=text):
        parse(params)


def test_draft_prompt_text_becomes_ids():
    params = {"rapid_draft_prompt": "ab", "rapid_drafter": "rag", "other": 1}
    ids = tokenize_draft_prompt(params, lambda text: [ord(letter) for letter in text])
    assert ids == {"rapid_draft_ids": [97, 98], "rapid_drafter": "rag", "other": 1}
    assert parse(ids).draft_ids == (97, 98)
    for wrong, text in (("", "not empty"), (3, "must be a text"), (None, "must be a text")):
        with pytest.raises(RapidOptionError, match=text):
            tokenize_draft_prompt({"rapid_draft_prompt": wrong}, list)
    with pytest.raises(RapidOptionError, match="send one of them"):
        tokenize_draft_prompt({"rapid_draft_prompt": "a", "rapid_draft_ids": [1]}, list)


def test_no_draft_memory():
    none = RapidConfig(draft_tokens=0)
    with pytest.raises(RapidOptionError, match="start it with --rapid-draft-tokens"):
        parse_options({"rapid_drafter": "rag"}, none, Limits(5000, 4))
    small = RapidConfig(draft_tokens=10)
    with pytest.raises(RapidOptionError, match="12 tokens, but --rapid-draft-tokens is 10"):
        parse_options({"rapid_drafter": "rag", "rapid_draft_ids": [1] * 12}, small, Limits(5000, 4))


def test_presets_fill_in_what_was_not_set():
    paper = RapidConfig.from_env({"RAPID_SGL_PRESET": "paper", "RAPID_SGL_ETA": "5"})
    assert paper == RapidConfig(transfer="distill", eta=5.0, draft_length=10)
    # per request the draft length of a preset is cut to what the server reserves; one that is asked for is not
    options = parse({"rapid_preset": "paper", "rapid_alpha": 0.2})
    assert options.config == RapidConfig(transfer="distill", alpha=0.2, draft_length=4)
    assert parse({"rapid_preset": "lossless"}).config.transfer == "none"
    mixed = parse_options({"rapid_preset": "lossless"}, paper, Limits(100, 10))
    assert mixed.config.transfer == "none" and mixed.config.eta == 5.0
    for wrong in ("papers", 3, ["paper"]):
        with pytest.raises(RapidOptionError, match="is not one of lossless, paper, mixture"):
            parse({"rapid_preset": wrong})
    with pytest.raises(RapidOptionError, match="RAPID_SGL_PRESET='x'"):
        RapidConfig.from_env({"RAPID_SGL_PRESET": "x"})


def test_weights_that_are_not_loaded():
    twin = RapidConfig(drafter_weights="int8")
    assert parse_options({"rapid_drafter_weights": "same"}, twin, Limits(100, 4)).config == DEFAULTS
    with pytest.raises(RapidOptionError, match="not loaded on this server"):
        parse({"rapid_drafter_weights": "int8"})


def test_draft_slots_are_kept_for_the_longest_chain():
    assert RapidConfig().reserved_length == 10
    assert RapidConfig(draft_length=4).reserved_length == 4
    assert RapidConfig(draft_length=4, max_draft_length=6).reserved_length == 6
    assert RapidConfig(draft_length=8, max_draft_length=6).reserved_length == 8
    assert RapidConfig(max_draft_length=6).reserved_length == 6
    assert RapidConfig.from_env({"RAPID_SGL_DRAFT_LENGTH": "auto"}) == DEFAULTS
