"""Penalties along a draft chain equal SGLang's penalties applied token by token."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rapid_sgl.verify.inputs import chain_mask
from rapid_sgl.verify.penalties import Penalties, penalties_of

VOCAB = 12
STOPS = (3, 7)


def sglang_penalised(logits, settings, output):
    """One row through SGLang's own penalizers after ``output`` was generated token by token."""
    from sglang.srt.sampling import penaltylib

    params = SimpleNamespace(
        frequency_penalty=settings.frequency_penalty,
        presence_penalty=settings.presence_penalty,
        repetition_penalty=settings.repetition_penalty,
        min_new_tokens=settings.min_new_tokens,
        stop_token_ids=set(STOPS),
    )
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
    req = SimpleNamespace(sampling_params=params, eos_token_ids=None, tokenizer=tokenizer)

    class Batch:
        device = "cpu"
        reqs = (req,)

    batch = Batch()
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=VOCAB,
        batch=batch,
        penalizers={
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
        },
    )
    for token in output:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    row = logits.clone()[None]
    orchestrator.apply(row)
    return row[0]


@given(
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.integers(0, 6),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=3),
)
def test_every_position_sees_every_token_before_it(frequency, presence, least, output, chain):
    settings = Penalties(frequency, presence, 1.0, least, STOPS)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    got = logits.clone()
    settings.apply_(got, output, chain)
    for i in range(4):
        torch.testing.assert_close(got[i], sglang_penalised(logits[i], settings, output + chain[:i]))


@given(
    st.floats(0.5, 2),
    st.lists(st.integers(0, VOCAB - 1), max_size=5),
    st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=2),
)
def test_repetition_penalty_scales_seen_tokens_once(factor, output, chain):
    settings = Penalties(0.0, 0.0, factor, 0, ())
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    got = logits.clone()
    settings.apply_(got, output, chain)
    for i in range(3):
        seen = set(output + chain[:i])
        for token in range(VOCAB):
            value = logits[i, token].item()
            wanted = value if token not in seen else value * factor if value < 0 else value / factor
            assert got[i, token].item() == pytest.approx(wanted, rel=1e-6)


def test_stop_ids_come_from_request_and_tokenizer():
    params = SimpleNamespace(
        frequency_penalty=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        min_new_tokens=2,
        stop_token_ids={5},
    )
    tokenizer = SimpleNamespace(additional_stop_token_ids={6}, eos_token_id=2)
    req = SimpleNamespace(sampling_params=params, tokenizer=tokenizer, eos_token_ids={4})
    assert penalties_of(req).stop_ids == (2, 4, 5, 6)
    assert penalties_of(req).active
    params.min_new_tokens = 0
    assert not penalties_of(req).active


def test_chain_mask_is_causal_over_prefix_and_chain():
    mask = chain_mask(torch.tensor([2, 0]), 3)
    first, second = mask[:15].view(3, 5), mask[15:].view(3, 3)
    assert first.tolist() == [
        [True, True, True, False, False],
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]
    assert second.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
