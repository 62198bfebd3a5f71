"""The choice of one step against trying every assignment by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_sgl.control.acceptance import expected_tokens
from rapid_sgl.control.plan import DOUBT, Choices, Costs, plan_step

LENGTH = 5


def chances(rate):
    return np.full(LENGTH, rate)


@st.composite
def steps(draw):
    share = st.floats(0.05, 0.98)
    choices = [
        Choices(
            model=draw(st.integers(0, LENGTH)),
            model_rates=chances(draw(share)),
            copied=draw(st.integers(0, LENGTH)),
            copy_rates=chances(draw(share)),
            fixed=draw(st.booleans()) and draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    verify = 1 + np.cumsum([0, *(draw(st.floats(0, 0.4)) for _ in range(LENGTH))])
    pass_cost, row_cost = draw(st.floats(0.05, 1.2)), draw(st.floats(0, 0.2))
    draft = np.array([0, *(pass_cost + row_cost * n for n in range(len(choices)))])
    return choices, Costs(verify, draft)


def value(choices, costs, model, copied):
    """Tokens per second of chains as given."""
    tokens = 0.0
    for choice, drafts, copies in zip(choices, model, copied, strict=True):
        rates = choice.copy_rates if copies else choice.model_rates
        tokens += expected_tokens(rates[: drafts or copies])[-1]
    passes = [sum(drafts > step for drafts in model) for step in range(LENGTH)]
    return tokens / (costs.verify[max(*model, *copied)] + costs.draft[passes].sum())


def by_hand(choices, costs):
    """The best value over all G and W, each request taking the better of its two chains."""
    best = 0.0
    for g in range(LENGTH + 1):
        for w in range(LENGTH + 1):
            model, copied = [], []
            for choice in choices:
                if choice.fixed:
                    copied.append(choice.copied)
                    model.append(0 if choice.copied else choice.model)
                    continue
                drafts, copies = min(g, choice.model), min(w, choice.copied)
                gains = [
                    expected_tokens(rates[:count])[-1]
                    for rates, count in ((choice.model_rates, drafts), (choice.copy_rates, copies))
                ]
                take = choice.copied > 0 and gains[1] >= gains[0]
                copied.append(copies if take else 0)
                model.append(0 if take else drafts)
            best = max(best, value(choices, costs, model, copied))
    return best


@settings(max_examples=200, deadline=None)
@given(steps())
def test_no_pair_of_lengths_is_better(step):
    choices, costs = step
    plan = plan_step(choices, costs)
    reached = value(choices, costs, plan.model, plan.copied)
    # cutting single rows may only help; a plan with passes must promise DOUBT more than one without
    assert reached >= by_hand(choices, costs) * (1 - DOUBT) - 1e-9
    for choice, drafts, copies in zip(choices, plan.model, plan.copied, strict=True):
        assert not (drafts and copies) and drafts <= choice.model and copies <= choice.copied
        if choice.fixed:
            assert copies == choice.copied and drafts == (0 if choice.copied else choice.model)


def test_dear_drafts_are_not_made_and_copies_cost_no_pass():
    costs = Costs(np.linspace(1, 1.2, LENGTH + 1), np.array([0, 0.9]))
    model = Choices(model=LENGTH, model_rates=chances(0.8))
    assert plan_step([model], costs).longest == 0
    both = Choices(LENGTH, chances(0.8), LENGTH, chances(0.8))
    plan = plan_step([both], costs)
    assert (plan.model, plan.copied) == ([0], [LENGTH])
    assert plan_step([model], costs, must_draft=True).model[0] > 0


def test_a_row_that_brings_less_than_its_part_of_a_pass_is_left_out():
    costs = Costs(np.ones(LENGTH + 1), np.array([0, 0.2, 0.5]))
    choices = [Choices(LENGTH, chances(0.95)), Choices(LENGTH, chances(0.05))]
    assert plan_step(choices, costs).model == [LENGTH, 0]


def test_expected_tokens():
    assert expected_tokens(np.array([0.5, 0.5])) == pytest.approx([1, 1.5, 1.75])
    assert expected_tokens(np.ones((2, 3))).tolist() == [[1, 2, 3, 4]] * 2
