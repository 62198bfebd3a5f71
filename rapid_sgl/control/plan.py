"""How far to draft in one step: the choice that commits most tokens per second, from costs and acceptance.

A step of a batch runs G draft passes and one verify pass W + 1 tokens wide. Model drafts of a request go up to G,
copied ones up to W. Time(G, W) is the sum of its passes; tokens(G, W) the sum over requests of what the better of
both chains commits on average. Every pair is tried: they are few, and numpy does them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rapid_sgl.control.acceptance import expected_tokens
from rapid_sgl.control.costs import Floats
from rapid_sgl.control.step import Candidate

# Drafts must promise this much more than going without: where both are equal, noise picks the worse half of the time,
# and plain steps are the ones whose cost is certain.
DOUBT = 0.015


@dataclass(frozen=True)
class Choices:
    """What one request could draft in this step."""

    model: int = 0  # model drafts that its row can carry now; 0: none
    model_rates: Floats | None = None  # float64 [n], acceptance by position; needed where model > 0
    copied: int = 0  # tokens that a copy offers
    copy_rates: Floats | None = None  # float64 [n]; needed where copied > 0
    fixed: bool = (
        False  # the request prescribes its chain: all copied tokens if there are any, else all model drafts
    )


@dataclass(frozen=True)
class Costs:
    """Seconds of the passes that this step may run, for a batch of m requests and chains of up to n drafts."""

    verify: Floats  # [n + 1], by drafts of the longest chain; everything else that a step does is in it
    draft: Floats  # [m + 1], one draft pass by rows in it; [0] = 0


@dataclass(frozen=True)
class Plan:
    """Chains of one step."""

    model: list[int]  # model drafts per request
    copied: list[int]  # copied drafts per request; never both
    auto: list[bool]  # requests whose chains may be ended early because it pays
    rate: float = 0.0  # tokens per second that are expected
    seconds: float = 0.0  # of the step
    tokens: float = 0.0  # of all requests together

    @classmethod
    def plain(cls, choices: Sequence[Choices | Candidate], seconds: float = 0.0) -> Plan:
        """No drafts at all."""
        none, count = [0] * len(choices), len(choices)
        auto = [not choice.fixed for choice in choices]
        return cls(none, list(none), auto, count / seconds if seconds else 0.0, seconds, float(count))

    @property
    def longest(self) -> int:
        """Drafts of the longest chain."""
        return max(*self.model, *self.copied)


def plan_step(
    choices: Sequence[Choices],
    costs: Costs,
    *,
    edge: float = 1.0,
    copy_edge: float = 1.0,
    must_draft: bool = False,
) -> Plan:
    """The plan with the highest expected rate.

    Args:
        choices: one per request of the batch.
        edge: factor on the rate of plans with draft passes; above 1 where ending chains early helps them.
        copy_edge: the same for plans that only copy; below 1 where they keep less than they promise. (The best of
            many uncertain promises is, on average, one of those that promise too much.)
        must_draft: choose among plans with draft passes only.
    """
    plan = _best(choices, costs, edge, copy_edge, must_draft)
    rows = sum(1 for choice in choices if choice.model)
    if rows > 1 and plan.seconds:
        # at that rate some rows cost more than they bring; without them, another pair may be better still
        own = max(0.0, float(costs.draft[rows] - costs.draft[1]) / (rows - 1))
        without = [_cut(choice, own * plan.tokens / plan.seconds) for choice in choices]
        other = _best(without, costs, edge, copy_edge, must_draft)
        if other.rate > plan.rate or must_draft:
            return other
    return plan


def _best(choices: Sequence[Choices], costs: Costs, edge: float, copy_edge: float, must_draft: bool) -> Plan:
    """The best pair (G, W), all requests with drafts taking part."""
    length = len(costs.verify) - 1
    grid = _Grid(choices, *_gains(choices, length), costs)
    rate = grid.tokens / grid.seconds
    rate[2:] *= edge  # a chain of one cannot be ended early
    rate[0, 1:] *= copy_edge
    rate[1:] = np.where(grid.passes[1:], rate[1:], -1.0)
    certain = rate[0, 0]
    rate *= 1 - DOUBT
    rate[0, 0] = certain
    if must_draft:
        rate[0] = -2.0
    g, w = np.unravel_index(int(rate.argmax()), rate.shape)
    return grid.plan(int(g), int(w), float(rate[g, w]))


def _cut(choice: Choices, price: float) -> Choices:
    """``choice`` without the model drafts that bring fewer tokens than ``price``, the price of a row in a pass."""
    if choice.fixed or not choice.model or choice.model_rates is None:
        return choice
    reached = np.cumprod(choice.model_rates[: choice.model])
    return replace(choice, model=int((reached >= price).sum()))


def _gains(choices: Sequence[Choices], length: int) -> tuple[Floats, Floats]:
    """Expected tokens of a request by allowed drafts, [bs, length + 1] for model drafts and for copies.

    Where a request has no such drafts, 1 everywhere: the target's own token.
    """
    rates = np.zeros((2, len(choices), length))
    for b, choice in enumerate(choices):
        if choice.model and choice.model_rates is not None:
            rates[0, b, : choice.model] = choice.model_rates[: choice.model]
        if choice.copied and choice.copy_rates is not None:
            rates[1, b, : choice.copied] = choice.copy_rates[: choice.copied]
    gains = expected_tokens(rates)
    return gains[0], gains[1]


class _Grid:
    """Tokens and seconds for every pair (G, W); both [g + 1, n + 1], with g the most drafts that any row carries."""

    def __init__(self, choices: Sequence[Choices], model: Floats, copied: Floats, costs: Costs):
        self.choices, self.costs = choices, costs
        length = len(costs.verify) - 1
        steps, turns = np.arange(length + 1), np.arange(1 + max(choice.model for choice in choices))
        fixed = np.array([choice.fixed for choice in choices])
        limit = np.array([choice.model for choice in choices])
        offered = np.array([choice.copied for choice in choices])
        fixed_model = np.where(fixed & (offered == 0), limit, 0)
        fixed_copied = np.where(fixed, offered, 0)

        gain_model, gain_copied = model[:, : len(turns), None], copied[:, None, :]
        # [bs, G, W]: does the request copy (it costs no pass, so it wins ties), or else draft at all?
        self.copies = (gain_copied >= gain_model) & (offered[:, None, None] > 0) & ~fixed[:, None, None]
        self.models = ~self.copies & (limit[:, None, None] > 0) & ~fixed[:, None, None]
        at_own = np.where(offered[:, None, None] > 0, copied[:, -1:, None], model[:, -1:, None])
        gained = np.where(self.copies, gain_copied, gain_model)
        self.tokens: Floats = np.where(fixed[:, None, None], at_own, gained).sum(0)

        model_len = np.where(self.models, np.minimum(limit[:, None, None], turns[:, None]), 0)
        copy_len = np.where(self.copies, np.minimum(offered[:, None, None], steps), 0)
        widest = np.maximum(model_len, copy_len).max(0)
        widest = np.maximum(widest, max(fixed_model.max(), fixed_copied.max()))
        # rows in draft pass i: fixed requests that go on that long, and the others while i < G
        ahead = np.arange(length)
        rows = (model_len[..., None] > ahead).sum(0) + (fixed_model[:, None] > ahead).sum(0)
        self.passes = self.models.any(
            0
        )  # [G, W]: is there anything for a draft pass to do that is not prescribed?
        self.seconds: Floats = costs.verify[widest] + costs.draft[rows].sum(-1)

    def plan(self, g: int, w: int, rate: float) -> Plan:
        model, copied = [], []
        for b, choice in enumerate(self.choices):
            if choice.fixed:
                copied.append(choice.copied)
                model.append(0 if choice.copied else choice.model)
                continue
            copies = bool(self.copies[b, g, w])
            copied.append(min(choice.copied, w) if copies else 0)
            model.append(min(choice.model, g) if self.models[b, g, w] else 0)
        seconds, tokens = float(self.seconds[g, w]), float(self.tokens[g, w])
        return Plan(model, copied, [not choice.fixed for choice in self.choices], rate, seconds, tokens)
