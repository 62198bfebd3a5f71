"""With a transfer on, the server's tokens follow the p̂ that the two models' own logits give.

The drafter is the served model over a draft prompt that asks something else, so that p and q are far apart.
Prompts end in the middle of the chat template: the first token, which no drafter sees, is then certain, and
the second is the first one that a transfer can change. Chi-square; a false alarm has probability 1e-4 per test.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from conftest import DRAFTED, body, chat_ids, in_parallel
from scipy.stats import chisquare

from rapid_sgl.models import embedded_model_path

FALSE_ALARM = 1e-4
SAMPLES, PER_REQUEST = 2016, 48
PROMPT = chat_ids("", "Name one animal.")[:-1]
DRAFT_PROMPT = chat_ids("", "Name one city in Europe.")[:-1]


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def logits(model):
    """z and w after the certain first token, float64 [vocab]."""
    first = chat_ids("", "x")[-1]
    with torch.no_grad():
        return [model(torch.tensor([[*ids, first]])).logits[0, -1].double() for ids in (PROMPT, DRAFT_PROMPT)]


def expected(z, w, transfer):
    """p̂ by the formulas of the law, from the logits."""
    p, q = z.softmax(-1), w.softmax(-1)
    if transfer == "mixture":
        return 0.7 * p + 0.3 * q
    if transfer == "distill":
        return (z + 10 * (q >= 0.1 * q.max()) * (q - p)).softmax(-1)
    return p


def second_tokens(server, **options):
    request = body(
        PROMPT, 4, temperature=1.0, ignore_eos=True, n=PER_REQUEST,
        rapid_drafter="rag", rapid_draft_ids=DRAFT_PROMPT, **DRAFTED, **options,
    )  # fmt: skip
    server.client.generate(**request)  # from now on the draft prompt is cached, so rows are ready at once
    batches = in_parallel(1, lambda _: server.client.generate(**request), range(SAMPLES // PER_REQUEST))
    answers = [answer["output_ids"] for batch in batches for answer in batch]
    first = Counter(ids[0] for ids in answers).most_common(1)[0][0]
    kept = [ids[1] for ids in answers if ids[0] == first]
    assert len(kept) > 0.95 * SAMPLES
    return Counter(kept)


def p_value(seen: Counter, law: torch.Tensor) -> float:
    """Chi-square of counts against a law; tokens expected fewer than 8 times are one outcome."""
    total = sum(seen.values())
    common = [token for token, share in enumerate(law.tolist()) if share * total >= 8]
    rest = 1 - float(law[common].sum())
    counts = [seen[token] for token in common] + [total - sum(seen[token] for token in common)]
    wanted = [float(law[token]) * total for token in common] + [rest * total]
    return chisquare(counts, wanted).pvalue


@pytest.mark.parametrize(
    ("transfer", "options"),
    [("mixture", {"rapid_lambda": 0.3}), ("distill", {"rapid_eta": 10.0}), ("none", {})],
)
def test_second_token_follows_p_hat(rapid_server, logits, transfer, options):
    seen = second_tokens(rapid_server, rapid_transfer=transfer, **options)
    assert p_value(seen, expected(*logits, transfer)) > FALSE_ALARM
    # and the sample is large enough to tell p̂ from its neighbours
    for other in {"mixture", "distill", "none"} - {transfer}:
        assert p_value(seen, expected(*logits, other)) < FALSE_ALARM
