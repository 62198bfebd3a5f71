"""Pace: decides in every step how far each request drafts, and learns from what came of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from rapid_sgl.control.acceptance import Acceptance
from rapid_sgl.control.costs import PassCosts
from rapid_sgl.control.plan import Choices, Costs, Plan, plan_step
from rapid_sgl.control.step import Candidate, Drafted, DraftPass, Lane
from rapid_sgl.control.stop import ChainStop

# Part of the time that may be lost to trying what does not seem to pay.
PROBE_SHARE = 0.005
PROBE_GAP = 25  # steps between two probes at least: one is enough to learn from
PROBE_RETRY = 5  # steps to the next look, where there was nothing to try or no time for it
STALE = 300  # verify passes after which the cost of a plain one is looked at again
# A prescribed chain copies only after so many equal tokens; where the length is chosen, acceptance decides.
FIXED_MATCH = 8
# Predicting costs takes longer than choosing by them, and from one step to the next they hardly change.
REUSE = 8  # steps for which costs are kept,
REUSED = 0.05  # while the load changes by less than this share of itself
SURPRISE = 0.15  # and steps take as long as planned, but for this share
HICCUP = 3.0  # a step that took so many times as long as planned compiled something and tells nothing about its plan
EDGE_SHARE = 0.01  # of one step in the running average of what plans keep of their promise
EDGE_MOST = 5.0  # times its promise that a step may count for


class Pace:
    """Costs and acceptance of one server, and the plans that follow from them.

    Args:
        length: drafts per chain at most.
    """

    def __init__(self, length: int):
        self.length = length
        self.acceptance = Acceptance(length)
        self.verify = PassCosts()
        self.draft: dict[Lane, PassCosts] = {}
        self.between = 0.0  # seconds from the end of a step to the start of the next
        # what plans came to over what they promised, by size of the load and kind of plan: draft or copy
        self.edges: dict[tuple[int, int, str], float] = {}
        self.allowance: float | None = None
        self.costs = Costs(np.zeros(length + 1), np.zeros(1))  # of the step planned last
        self._costs_of: Hashable = None  # size of the load that they were predicted for
        self._costs_used = 0  # steps
        # steps by what was decided: plain, copy, draft, fixed, probe
        self.decisions: Counter[str] = Counter()
        self.decision = ""  # the latest
        self._since_probe = PROBE_GAP

    def plan(self, candidates: Sequence[Candidate]) -> Plan:
        """Chains for one step."""
        if not any(one.model or one.copied for one in candidates):
            return self._decided("plain", Plan.plain(candidates))
        costs = self._predict(candidates)
        if self._hopeless(candidates, costs):
            return self._decided("plain", Plan.plain(candidates, float(costs.verify[0])))
        choices = [self._choices(candidate) for candidate in candidates]
        edge, copy_edge = (self.edges.get((*_load(candidates), kind), 1.0) for kind in ("draft", "copy"))
        plan = plan_step(choices, costs, edge=edge, copy_edge=copy_edge)
        probe = self._probe(candidates, choices, costs, plan)
        name = _name(plan, choices) if probe is None else "probe"
        return self._decided(name, self._open_ended(probe or plan, choices))

    def _decided(self, name: str, plan: Plan) -> Plan:
        self.decisions[name] += 1
        self.decision = name
        return plan

    def stop(self, candidates: Sequence[Candidate], plan: Plan) -> ChainStop | None:
        """The rule that ends chains of the step planned last; None when every chain is prescribed."""
        if not any(
            count > 1 and (auto or candidate.stop_below)
            for count, auto, candidate in zip(plan.model, plan.auto, candidates, strict=True)
        ):
            return None
        return ChainStop(
            plan,
            self.costs,
            rates=[self._model_rates(candidate) for candidate in candidates],
            calibrations=[self.acceptance.calibration(_kind(candidate)) for candidate in candidates],
            stop_below=[candidate.stop_below for candidate in candidates],
        )

    def observe(
        self,
        candidates: Sequence[Candidate],
        plan: Plan,
        drafts: Drafted,
        accepted: Sequence[int],
        *,
        draft_s: float,
        other_s: float,
        gap_s: float = 0.0,
    ) -> None:
        """Learn from a finished step.

        All that is known of time comes in here and in ``drafts.passes``: given the same times, ranks that decode the
        same batch together decide the same.

        Args:
            candidates, plan: of this step.
            drafts: as they were verified.
            accepted: drafts committed per request.
            draft_s, other_s: seconds of all draft passes, and of the rest of the step.
            gap_s: seconds from the end of the step before to its start.
        """
        if gap_s < 0.01:  # longer ones had a prefill or nothing to do in between
            self.between += 0.05 * (gap_s - self.between)
        lengths = [len(chain) for chain in drafts.chains]
        context = sum(candidate.context for candidate in candidates)
        self.verify.observe(len(candidates), max(lengths) + 1, context, other_s)
        self._observe_passes(drafts.passes, draft_s)
        for b, candidate in enumerate(candidates):
            candidate.memory.copying = plan.copied[b] > 0
            if not lengths[b]:
                continue
            if plan.copied[b]:
                kind, memory = (
                    self.acceptance.copies(candidate.match, candidate.sampled),
                    candidate.memory.copies,
                )
                candidate.memory.copied += accepted[b]
            else:
                kind, memory = self.acceptance.model(_kind(candidate)), candidate.memory.model
                calibration = self.acceptance.calibration(_kind(candidate))
                calibration.observe(np.asarray(drafts.confidence[b], dtype=float), accepted[b])
            memory.observe(kind, lengths[b], accepted[b])
            kind.observe(lengths[b], accepted[b])
        took = draft_s + other_s + self.between
        if plan.seconds and abs(took / plan.seconds - 1) > SURPRISE:
            self._costs_of = None
        drafting = any(plan.model)
        if (drafting or any(plan.copied)) and any(plan.auto) and took < HICCUP * plan.seconds:
            promise = plan.tokens / plan.seconds
            kept = (len(candidates) + sum(accepted)) / took / promise
            key = (*_load(candidates), "draft" if drafting else "copy")
            edge = self.edges.get(key, 1.0)
            self.edges[key] = edge + EDGE_SHARE * (min(kept, EDGE_MOST) - edge)

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers for ``/server_info``."""
        return {"decisions": dict(self.decisions), "between_ms": 1000 * self.between}

    def _hopeless(self, candidates: Sequence[Candidate], costs: Costs) -> bool:
        """Whether copies would not pay if all of them were verified at the price of one; looked at before anything
        is planned, because planning has a price too."""
        more = 0.0
        for one in candidates:
            if one.model or one.fixed:
                return False
            if one.copied:
                most = one.memory.copies.most(self.acceptance.copies(one.match, one.sampled))
                more += most / (1 - most)
        count = len(candidates)
        return (count + more) * costs.verify[0] < count * costs.verify[1]

    def _choices(self, candidate: Candidate) -> Choices:
        copied = candidate.copied
        if candidate.fixed and candidate.match < FIXED_MATCH:
            copied = 0
        copy_rates = None
        if copied:
            kind = self.acceptance.copies(candidate.match, candidate.sampled)
            copy_rates = candidate.memory.copies.rates(kind)
        return Choices(candidate.model, self._model_rates(candidate), copied, copy_rates, candidate.fixed)

    def _model_rates(self, candidate: Candidate) -> np.ndarray | None:
        if not candidate.model:
            return None
        return candidate.memory.model.rates(self.acceptance.model(_kind(candidate)))

    def _predict(self, candidates: Sequence[Candidate]) -> Costs:
        """Costs of this step's passes: while the load stays about the same, those of the step before."""
        context, row = (
            sum(sizes) for sizes in zip(*((one.context, one.row) for one in candidates), strict=True)
        )
        lanes = Counter(candidate.lane for candidate in candidates if candidate.model)
        size = (len(candidates), round(math.log(context) / REUSED), round(math.log(row + 1) / REUSED), lanes)
        self._costs_used += 1
        if size != self._costs_of or self._costs_used >= REUSE:
            self.costs, self._costs_of, self._costs_used = self._costs(candidates), size, 0
        return self.costs

    def _costs(self, candidates: Sequence[Candidate]) -> Costs:
        count, context = len(candidates), sum(candidate.context for candidate in candidates)
        verify = self.verify.predict(count, np.arange(1, self.length + 2), context) + self.between
        draft = np.zeros(count + 1)
        rows = np.arange(1, count + 1)
        able = [candidate for candidate in candidates if candidate.model and candidate.lane]
        for lane in sorted({candidate.lane for candidate in able if candidate.lane}):
            members = [candidate.row for candidate in able if candidate.lane == lane]
            here = np.maximum(rows * len(members) / len(able), 1)
            share = np.minimum(rows * len(members) / len(able), 1)
            draft[1:] += share * self._draft_costs(lane, here, sum(members) / len(members))
        return Costs(verify, draft)

    def _draft_costs(self, lane: Lane, rows: np.ndarray, row: float) -> np.ndarray:
        """Seconds of one draft pass by rows in it, ``row`` tokens each."""
        if lane in self.draft and self.draft[lane].known:
            return self.draft[lane].predict(rows, 1, rows * row)
        # a pass over a short row with the target's weights is a decode step with a short context
        return self.verify.predict(rows, 1, rows * row) * (0.9 if lane[1] == "same" else 0.6)

    def _probe(
        self, candidates: Sequence[Candidate], choices: Sequence[Choices], costs: Costs, plan: Plan
    ) -> Plan | None:
        """What to try in place of ``plan``, when there is something to learn and time left for it."""
        if not plan.seconds or any(choice.fixed for choice in choices):
            return None
        if self.allowance is None:
            self.allowance = 2 * plan.seconds
        self.allowance = min(self.allowance + PROBE_SHARE * plan.seconds, 4 * plan.seconds)
        self._since_probe += 1
        if self._since_probe < PROBE_GAP:
            return None
        self._since_probe -= PROBE_RETRY  # looking for one in every step would cost more than the probe
        other = None
        if not any(plan.model) and any(choice.model for choice in choices):
            other = plan_step(choices, costs, must_draft=True)
            if not any(other.model):
                return None
        elif plan.longest:
            context = sum(candidate.context for candidate in candidates)
            if self.verify.age(len(candidates), 1, context) > STALE:
                other = Plan.plain(choices, float(costs.verify[0]))
        if other is None:
            return None
        loss = max(other.seconds - other.tokens * plan.seconds / plan.tokens, 0.0)
        if loss > self.allowance:
            return None
        self.allowance -= loss
        self._since_probe = 0
        return other

    def _open_ended(self, plan: Plan, choices: Sequence[Choices]) -> Plan:
        """Chains that may be ended early can be as long as their rows allow: the rule that ends them knows more."""
        for b, choice in enumerate(choices):
            if plan.model[b] and not choice.fixed:
                plan.model[b] = choice.model
        return plan

    def _observe_passes(self, passes: Sequence[DraftPass], seconds: float) -> None:
        """Turn by turn: the first one may have compiled something, and those behind it have not."""
        turns = [list(together) for _, together in groupby(passes, key=lambda one: one.turn)]
        around = (seconds - sum(together[0].turn_s for together in turns)) / max(
            1, len(turns)
        )  # the loop's own
        for together in turns:
            expected = [
                float(self._draft_costs(one.lane, np.array([one.rows]), one.tokens / one.rows)[0])
                for one in together
            ]
            scale = (together[0].turn_s + around) / sum(expected)
            for one, guess in zip(together, expected, strict=True):
                self.draft.setdefault(one.lane, PassCosts()).observe(one.rows, 1, one.tokens, guess * scale)


def _kind(candidate: Candidate) -> Hashable:
    return candidate.lane, candidate.sampled


def _load(candidates: Sequence[Candidate]) -> tuple[int, int]:
    """Batches of about the same size and context have the same."""
    context = sum(candidate.context for candidate in candidates)
    return len(candidates).bit_length(), (context // len(candidates)).bit_length()


def _name(plan: Plan, choices: Sequence[Choices]) -> str:
    if any(choice.fixed for choice in choices):
        return "fixed"
    return "draft" if any(plan.model) else "copy" if any(plan.copied) else "plain"
