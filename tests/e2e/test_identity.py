"""Greedy decoding with drafts commits the tokens of greedy decoding without them."""

from __future__ import annotations

import warnings

import pytest
from conftest import DRAFTED, chat_ids, flush, generate, in_parallel, rapid_stats, reference_text, undrafted

TIE = 1e-4  # two logits closer than this may swap between two ways of summing the same numbers

QUESTIONS = (
    "What does the with statement do?",
    "Summarise the text above in two sentences.",
    "List three keywords that the text explains.",
    "What happens when an exception is raised inside try?",
    "Write a short example of a for loop.",
    "What is a decorator?",
)
# (document tokens, question): 4 below the budget, 20 above it, up to the model's 7K
PROMPTS = [(size, question) for size in (0, 300) for question in QUESTIONS[:2]]
PROMPTS += [(size, question) for size in (1300, 2600, 4000) for question in QUESTIONS]
PROMPTS += [(7000, question) for question in QUESTIONS[:2]]
NEW_TOKENS = 24


def assert_same_tokens(server, ids, drafted, plain, **options):
    """Equal token by token, or different first where the target's two best logits tie within TIE (then a warning)."""
    if drafted["output_ids"] == plain["output_ids"]:
        return
    pairs = zip(drafted["output_ids"], plain["output_ids"], strict=False)
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    scored = generate(
        server, ids, at + 1, rapid_drafter="off", return_logprob=True, top_logprobs_num=2, **options
    )
    (first, *_), (second, *_) = scored["meta_info"]["output_top_logprobs"][at]
    assert first - second < TIE, (
        f"differs at token {at} of a {len(ids)}-token prompt where the best two logits are {first - second:.2e} apart"
    )
    warnings.warn(f"tie excused: token {at}, {first - second:.2e} apart", stacklevel=2)


@pytest.fixture(scope="module")
def plain_answers(rapid_server):
    prompts = [chat_ids(reference_text(size) if size else "", question) for size, question in PROMPTS]
    return prompts, undrafted(rapid_server, prompts, NEW_TOKENS)


@pytest.mark.parametrize(
    "options",
    [{**DRAFTED, "rapid_drafter": "view"}, {**DRAFTED, "rapid_drafter": "rag"}, {}],
    ids=["view", "rag", "default"],
)
def test_one_request_at_a_time(rapid_server, plain_answers, options):
    before = rapid_stats(rapid_server)["drafted"]["accepted"]
    for ids, plain in zip(*plain_answers, strict=True):
        assert_same_tokens(rapid_server, ids, generate(rapid_server, ids, NEW_TOKENS, **options), plain)
    if options:  # by default the server may find that drafting does not pay on this machine
        assert rapid_stats(rapid_server)["drafted"]["accepted"] - before > 100, "hardly anything was drafted"


def test_eight_at_once(rapid_server, plain_answers):
    """Long and short, views, re-encoded rows and none, different draft lengths, chosen ones and transfers in one batch.

    Only answers without a transfer have a reference: what a transfer does depends on when a row is ready.
    """
    prompts, plain = plain_answers
    kinds = [
        {"rapid_drafter": "view"},
        {"rapid_drafter": "rag"},
        {"rapid_drafter": "rag", "rapid_transfer": "mixture", "rapid_lambda": 0.3},
        {"rapid_drafter": "off"},
        {"rapid_drafter": "view", "rapid_transfer": "distill"},
    ]
    lengths = ["auto", 1, 2, 3, 4, 10]
    options = [{**kinds[i % 5], "rapid_draft_length": lengths[i % 6]} for i in range(len(prompts))]

    def ask(item):
        return generate(rapid_server, item[0], NEW_TOKENS, **item[1])

    drafted = in_parallel(8, ask, list(zip(prompts, options, strict=True)))
    for ids, answer, reference, asked in zip(prompts, drafted, plain, options, strict=True):
        if "rapid_transfer" not in asked:
            assert_same_tokens(rapid_server, ids, answer, reference)


@pytest.mark.parametrize("drafter", ["view", "rag"])
def test_a_drafter_that_sees_everything_is_always_right(rapid_server, drafter):
    """A row of all prompt tokens but one, or for ``rag`` but the few that the tail's grid costs: the drafter then
    all but is the target, so nearly every chain must be accepted whole. A hole in a row shows here and nowhere else."""
    ids = chat_ids(reference_text(1500), "Summarise the text above.")
    budget = {"rapid_budget": len(ids) - 1, "rapid_head": len(ids) - 1 - 700, "rapid_recent": 700}
    ask = {"max_new_tokens": 80, "ignore_eos": True, "rapid_drafter": drafter, **budget, **DRAFTED}
    generate(rapid_server, ids, **{**ask, "max_new_tokens": 16})
    flush(rapid_server)
    # cold, then with the prompt in the cache: rows may not depend on what their memory held before
    cold, warm = [generate(rapid_server, ids, **ask)["meta_info"]["spec_accept_length"] for _ in range(2)]
    if drafter == "rag":
        # a cold row is prefilled while the first tokens decode undrafted
        assert warm > 4, warm
    else:
        assert min(cold, warm) > 4.5, (cold, warm)


OPTIONS = [
    {"stop": ["\n"]},
    {"stop": ["the", "a "]},
    {"stop_token_ids": [28]},
    {"ignore_eos": True, "max_new_tokens": 90},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 24},
    {"logit_bias": {"28": -5.0, "260": 3.0}},
    {"max_new_tokens": 1},
    {"max_new_tokens": 2},
    {"rapid_spans": [200, 400, 900, 1100]},
    {"rapid_budget": 200, "rapid_head": 0, "rapid_recent": 0},
    {"rapid_draft_length": 1},
    {"rapid_draft_length": "auto"},
    {"rapid_stop_below": 0.9},
    {"regex": r"(yes|no), because [a-z ]{10,60}\."},
    {
        "json_schema": '{"type":"object","properties":{"topic":{"type":"string","maxLength":20},"useful":{"type":"boolean"}},"required":["topic","useful"]}'
    },
]


@pytest.fixture(scope="module")
def answers_with_options(rapid_server):
    """The prompt, and per entry of OPTIONS its drafted and its plain answer: eight at once, so that requests of
    every kind share steps."""
    ids = chat_ids(reference_text(1800), QUESTIONS[1])
    generate(rapid_server, ids, 1)  # now the prompt is cached
    asked = [{"max_new_tokens": 40, "rapid_draft_length": 4, **options} for options in OPTIONS]
    plain = [{**without_rapid(options), "rapid_drafter": "off"} for options in asked]
    answers = in_parallel(8, lambda options: generate(rapid_server, ids, **options), asked + plain)
    return ids, list(zip(answers[: len(asked)], answers[len(asked) :], strict=True))


def without_rapid(options):
    return {key: value for key, value in options.items() if not key.startswith("rapid_")}


@pytest.mark.parametrize("which", range(len(OPTIONS)), ids=lambda which: ",".join(OPTIONS[which]))
def test_options_leave_greedy_output_alone(rapid_server, answers_with_options, which):
    ids, answers = answers_with_options
    drafted, plain = answers[which]
    shared = without_rapid(OPTIONS[which])
    shared.pop("max_new_tokens", None)
    assert_same_tokens(rapid_server, ids, drafted, plain, **shared)
    assert drafted["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]
    assert drafted["text"] == plain["text"]


def test_logprobs_are_the_targets(rapid_server):
    ids = chat_ids(reference_text(1800), QUESTIONS[0])
    ask = {"return_logprob": True, "top_logprobs_num": 3, "max_new_tokens": 24}
    drafted = generate(rapid_server, ids, **ask, **DRAFTED)
    plain = generate(rapid_server, ids, **ask, rapid_drafter="off")
    assert drafted["output_ids"] == plain["output_ids"]
    for key in ("output_token_logprobs", "output_top_logprobs"):
        for got, wanted in zip(drafted["meta_info"][key], plain["meta_info"][key], strict=True):
            got, wanted = ([item] if not isinstance(item[0], list) else item for item in (got, wanted))
            assert [entry[1] for entry in got] == [entry[1] for entry in wanted]
            assert [entry[0] for entry in got] == pytest.approx([entry[0] for entry in wanted], abs=2e-4)


def test_parallel_samples(rapid_server):
    ids = chat_ids(reference_text(1800), QUESTIONS[0])
    answers = generate(rapid_server, ids, n=3, **DRAFTED)
    plain = generate(rapid_server, ids, rapid_drafter="off")
    assert [answer["output_ids"] for answer in answers] == [plain["output_ids"]] * 3


def test_short_prompts_ride_undrafted(rapid_server):
    answer = generate(rapid_server, chat_ids("", QUESTIONS[0]), rapid_copy="off")
    assert answer["meta_info"]["spec_accept_length"] == pytest.approx(1.0, abs=0.1)
    assert rapid_stats(rapid_server)["undrafted"]["short_prompt"] > 0


CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return area(width, height) * depth\n"


def test_what_an_answer_quotes_is_copied(rapid_server):
    """Several tokens per pass without a draft pass, and the same answer; under a grammar too."""
    ids = chat_ids(CODE, "Repeat the code above exactly, in a code block.")
    for options in ({}, {"regex": r"[ -~\n]{20,200}"}):
        plain = generate(rapid_server, ids, 60, rapid_drafter="off", **options)
        for length in (4, "auto"):
            before = rapid_stats(rapid_server)["drafted"]["draft_passes"]
            copied = generate(rapid_server, ids, 60, rapid_draft_length=length, **options)
            assert_same_tokens(rapid_server, ids, copied, plain, **options)
            info = copied["meta_info"]
            assert (info["rapid_drafter"], info["rapid_reason"]) == ("copy", "short_prompt")
            assert info["rapid_copied_tokens"] > 15 and info["spec_accept_length"] > 1.4
            assert rapid_stats(rapid_server)["drafted"]["draft_passes"] == before
