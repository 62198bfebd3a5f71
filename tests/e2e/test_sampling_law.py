"""At T = 1 the real server's drafted output follows the target's law.

Two-sample chi-square tests on the first three tokens; each raises a false alarm with
probability 1e-4 (so about once in 5,000 runs of this file).
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from conftest import DRAFTED, body, chat_ids, in_parallel, rapid_stats, reference_text, tokenizer
from scipy.stats import chi2_contingency

SAMPLES, PER_REQUEST = 2016, 48
FALSE_ALARM = 1e-4
# a view so small that the drafter is often wrong: the accept and residual paths both carry weight
TINY_VIEW = {"rapid_budget": 40, "rapid_head": 8, "rapid_recent": 24, **DRAFTED}


def first_tokens(server, ids=None, count=3, samples=SAMPLES, **options):
    ids = ids or chat_ids(reference_text(160), "Answer in one word: what is this about?")
    request = body(ids, count + 1, temperature=1.0, ignore_eos=True, n=PER_REQUEST, **options)
    batches = in_parallel(1, lambda _: server.client.generate(**request), range(samples // PER_REQUEST))
    return Counter(tuple(answer["output_ids"][:count]) for batch in batches for answer in batch)


def p_value(a: Counter, b: Counter) -> float:
    """Chi-square of a 2 × k table; outcomes seen fewer than 20 times in all are one outcome."""
    rare = [key for key in a | b if a[key] + b[key] < 20]
    table = [[count[key] for key in sorted(a | b) if key not in rare] for count in (a, b)]
    for row, count in zip(table, (a, b), strict=True):
        row.append(sum(count[key] for key in rare))
    return chi2_contingency(table).pvalue


@cache
def plain_first_tokens(server):
    return first_tokens(server, rapid_drafter="off")


@pytest.fixture(scope="module")
def plain(rapid_server):
    return plain_first_tokens(rapid_server)


@pytest.mark.parametrize("drafter", ["view", "rag"])
def test_drafted_law_is_the_targets(rapid_server, plain, drafter):
    drafted = first_tokens(rapid_server, **TINY_VIEW, rapid_drafter=drafter)
    assert sum(drafted.values()) == SAMPLES
    assert p_value(drafted, plain) > FALSE_ALARM


def test_copies_follow_the_law(rapid_server):
    """The answer begins as an earlier one of the conversation did, or does not: copies are accepted and rejected."""
    turns = [
        {"role": "user", "content": "Name an animal."},
        {"role": "assistant", "content": "The cat is an animal."},
        {"role": "user", "content": "Name an animal."},
    ]
    text = tokenizer().apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer()(text)["input_ids"]
    # the first two tokens are the prefill's and those of a step without drafts
    plain = first_tokens(rapid_server, ids, 5, 1008, rapid_drafter="off")
    before = rapid_stats(rapid_server)["drafted"]
    copied = first_tokens(rapid_server, ids, 5, 1008, rapid_draft_length=4)
    after = rapid_stats(rapid_server)["drafted"]
    proposed, accepted = (after[key] - before[key] for key in ("copied", "copies_accepted"))
    assert 0.1 * proposed < accepted < 0.9 * proposed and proposed > 150, (proposed, accepted)
    assert p_value(copied, plain) > FALSE_ALARM


def test_the_test_can_see_a_wrong_law(rapid_server, plain):
    """With λ = 1 the server emits the drafter's law; had that passed for the target's, the test would be blind."""
    wrong = first_tokens(rapid_server, samples=1008, **TINY_VIEW, rapid_transfer="mixture", rapid_lambda=1.0)
    assert p_value(wrong, plain) < FALSE_ALARM
