"""RapidConfig and the wire keys: defaults, round trips, one clear error for each way to be wrong."""

import pytest

from rapid_sgl.config import RapidConfig, RapidOptionError
from rapid_sgl.request import RequestOptions, parse_options, spans_to_wire

DEFAULTS = RapidConfig()


def parse(params, prompt_len=100, max_draft_length=4):
    return parse_options(params, DEFAULTS, prompt_len=prompt_len, max_draft_length=max_draft_length)


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
        ({"rapid_draft_length": True}, "rapid_draft_length=True is a boolean, not an integer"),
        ({"rapid_draft_length": 2.0}, "is a number, not an integer"),
        ({"rapid_draft_length": 5}, "exceeds the server's 4"),
        ({"rapid_draft_length": 0}, "out of range"),
        ({"rapid_drafter": "rags"}, "'rags' is not one of view, off"),
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
    ],
)
def test_bad_request(params, text):
    with pytest.raises(RapidOptionError, match=text):
        parse(params)
