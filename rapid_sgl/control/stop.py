"""End a chain where its next draft is not worth a pass (the paper's ``assistant_confidence_threshold``, with prices)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rapid_sgl.control.acceptance import Calibration, Floats
from rapid_sgl.control.plan import Costs, Plan


class ChainStop:
    """Decides after every draft pass who goes on.

    A chain survives a draft with the probability that drafts of such confidence are accepted. Another pass is run
    while what it brings on average, the sum over its rows of survival times the acceptance of the next position,
    is worth its time at the rate of the plan; a row stays in it while its own share is worth its own part.

    Args:
        plan, costs: of this step.
        rates: float64 [n] per request, acceptance by position; None where nothing is drafted.
        calibrations: per request.
        stop_below: per request, the confidence under which its chain ends in any case.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        rates: Sequence[Floats | None],
        calibrations: Sequence[Calibration],
        stop_below: Sequence[float],
    ):
        self.plan, self.costs, self.rates = plan, costs, rates
        self.calibrations, self.stop_below = calibrations, stop_below
        self.survival = [1.0] * len(rates)

    def keep(self, position: int, rows: Sequence[int], probs: Sequence[float]) -> list[bool]:
        """Who drafts position ``position + 1``.

        Args:
            position: of the drafts just made.
            rows: requests (batch indices) that may go on.
            probs: probability that the drafter gave the draft of each.
        """
        going = [prob >= self.stop_below[b] for b, prob in zip(rows, probs, strict=True)]
        gains = [self._gain(b, prob, position + 1) for b, prob in zip(rows, probs, strict=True)]
        count = sum(going)
        if count == 0:
            return going
        cost = self.costs.draft
        own = max(0.0, float(cost[count] - cost[1]) / (count - 1)) if count > 1 else 0.0
        auto = [self.plan.auto[b] for b in rows]
        going = [
            stays and (gain >= own * self.plan.rate or not free)
            for stays, gain, free in zip(going, gains, auto, strict=True)
        ]
        if any(stays and not free for stays, free in zip(going, auto, strict=True)):
            return going  # a prescribed chain runs the pass anyway
        wider = float(self.costs.verify[position + 2] - self.costs.verify[position + 1])
        price = (float(cost[sum(going)]) + max(0.0, wider)) * self.plan.rate
        worth = sum(gain for gain, stays in zip(gains, going, strict=True) if stays)
        return going if worth >= price else [False] * len(rows)

    def _gain(self, b: int, prob: float, position: int) -> float:
        rates = self.rates[b]
        if rates is None or position >= len(rates):
            return 0.0
        self.survival[b] *= float(self.calibrations[b].rates(np.asarray(prob)))
        return self.survival[b] * float(rates[position])
