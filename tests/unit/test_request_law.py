"""``LawRow`` and ``Law``: what is refused, what is known on the host, and picking rows."""

import pytest
import torch
from law_cases import random_rows

from rapid_sgl.verify.law import Law, LawRow, Schedule, Transfer


def test_host_facts_of_a_law():
    facts = lambda *rows: Law.from_rows(rows)  # noqa: E731
    assert not facts(LawRow(greedy=True, top_k=3)).any_sampled
    assert not facts(LawRow(greedy=True, top_k=3)).needs_filter
    assert not facts(LawRow()).needs_filter and facts(LawRow()).any_sampled
    for active in (dict(top_k=3), dict(top_p=0.5), dict(min_p=0.1)):
        assert facts(LawRow(), LawRow(**active)).needs_filter
    assert facts(LawRow(), LawRow(transfer=Transfer.LOGITS, weight=0.1)).any_transfer
    mixed = dict(transfer=Transfer.MIXTURE, weight=0.1)
    linear = dict(schedule=Schedule.LINEAR, answer_length=9)
    confident = dict(schedule=Schedule.CONFIDENCE, gate=0.2)
    assert facts(LawRow(), LawRow(**mixed, **linear)).any_fading
    assert not facts(LawRow(**linear), LawRow(**mixed)).any_fading
    assert facts(LawRow(), LawRow(**mixed, **confident)).gated.host.tolist() == [1]
    assert facts(LawRow(**confident), LawRow(**mixed)).gated is None
    assert not facts(LawRow()).any_plain_greedy and facts(LawRow(), LawRow(greedy=True)).any_plain_greedy
    assert not facts(LawRow(greedy=True, transfer=Transfer.DISTILL, weight=1.0)).any_plain_greedy


def test_select_keeps_rows_on_every_device():
    law = Law.from_rows(random_rows(0, 6))
    picked = law.select(torch.tensor([4, 0, 4]))
    assert picked.weight.tolist() == law.weight[[4, 0, 4]].tolist() and len(picked) == 3
    remote = Law.from_rows(random_rows(0, 6), device="meta").select(torch.tensor([4, 0, 4]))
    assert remote.weight.device.type == "meta" and torch.equal(remote.host.weight, picked.weight)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(temperature=0.0), "temperature=0.0.*greedy"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_k=0), "top_k=0"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.5), "top_p=1.5"),
        (dict(min_p=-0.1), "min_p=-0.1"),
        (dict(transfer=Transfer.MIXTURE, weight=1.1), "weight=1.1.*λ <= 1 with MIXTURE"),
        (dict(transfer=Transfer.DISTILL, weight=-1.0), "weight=-1.0"),
        (dict(transfer=Transfer.DISTILL, weight=float("inf")), "weight=inf"),
        (dict(alpha=2.0), "alpha=2.0"),
        (dict(gate=1.01), "gate=1.01.*0 <= gate <= 1"),
        (dict(gate=float("nan")), "gate=nan"),
        (dict(score=-0.5), "score=-0.5.*0 <= score <= 1"),
        (dict(schedule=Schedule.LINEAR), "answer_length=0.*answer_length >= 1 with LINEAR"),
    ],
)
def test_values_without_a_law_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        LawRow(**wrong)
    LawRow(greedy=True, temperature=0.0)
