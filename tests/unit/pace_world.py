"""A simulated machine for the pace: passes with known costs, drafts with known acceptance, no wall clock."""

import numpy as np

from rapid_sgl.control.pace import Pace
from rapid_sgl.control.step import Candidate, DraftPass, RequestPace

LANE = ("view", "same")
LENGTH = 10
ROW_TOKENS = 1100


class Machine:
    """Times passes as a small model on two cores does, with 4 % of noise and a hiccup in fifty.

    The first pass of each size takes ``first`` times as long: something is compiled. ``compiling`` counts the seconds.
    """

    def __init__(self, *, base=0.022, draft_factor=1.0, seed=0, first=1.0):
        self.base, self.draft_factor, self.rng = base, draft_factor, np.random.default_rng(seed)
        self.first, self.known, self.compiling = first, set(), 0.0

    def verify(self, rows, width, context):
        return self.base + 6e-4 * rows * width + context * 1.4e-6 * (1 + 0.08 * (width - 1))

    def draft(self, rows):
        return self.draft_factor * self.verify(rows, 1, rows * ROW_TOKENS)

    def measured(self, seconds, *size):
        if size not in self.known:
            self.known.add(size)
            self.compiling += (self.first - 1) * seconds
            return self.first * seconds
        hiccup = 3.0 if self.rng.random() < 0.02 else 1.0
        return seconds * hiccup * float(np.exp(self.rng.normal(0, 0.04)))


class Drafted:
    def __init__(self, chains, passes, confidence):
        self.chains, self.passes, self.confidence = chains, passes, confidence


class Request:
    """Drafts are accepted with the probability that the drafter states, drawn around ``mean``."""

    def __init__(self, context, mean, rng, *, copies=0.0, fixed=None):
        self.context, self.mean, self.rng, self.fixed = context, mean, rng, fixed
        self.copies = copies  # share of the steps in which there is a copy, which then always holds
        self.memory = RequestPace()

    def candidate(self):
        copied = LENGTH if self.rng.random() < self.copies else 0
        wanted = self.fixed if self.fixed is not None else LENGTH
        return Candidate(
            memory=self.memory,
            context=self.context,
            fixed=self.fixed is not None,
            sampled=False,
            lane=LANE if wanted else None,
            model=wanted,
            row=ROW_TOKENS,
            copied=copied,
            match=20 if copied else 0,
        )

    def confidence(self):
        """Mostly sure, sometimes lost."""
        return 0.99 if self.rng.random() < (self.mean - 0.4) / 0.59 else 0.4


def run(pace, machine, requests, steps):
    """Decode ``steps`` steps; returns (tokens, seconds, drafts int [steps, requests])."""
    tokens = seconds = 0.0
    history = []
    for _ in range(steps):
        candidates = [request.candidate() for request in requests]
        plan = pace.plan(candidates)
        drafted, draft_s = _draft(pace, machine, requests, candidates, plan)
        accepted = [
            len(chain) if plan.copied[b] else _accepted(chain, requests[b])
            for b, chain in enumerate(drafted.chains)
        ]
        width = 1 + max(map(len, drafted.chains))
        context = sum(request.context for request in requests)
        other_s = machine.measured(machine.verify(len(requests), width, context), len(requests), width)
        pace.observe(candidates, plan, drafted, accepted, draft_s=draft_s, other_s=other_s)
        tokens += len(requests) + sum(accepted)
        seconds += draft_s + other_s
        history.append([len(chain) for chain in drafted.chains])
    return tokens, seconds, np.array(history)


def rate(requests, steps=1500, *, machine=None, skip=100):
    """Tokens per second once the pace has settled; what is compiled even then is left out."""
    pace, machine = Pace(LENGTH), machine or Machine()
    run(pace, machine, requests, skip)
    before = machine.compiling
    tokens, seconds, _ = run(pace, machine, requests, steps)
    return tokens / (seconds - (machine.compiling - before))


def _draft(pace, machine, requests, candidates, plan):
    """The draft loop: chains of confidences, as far as the plan and the stop rule go."""
    stop = pace.stop(candidates, plan)
    chains = [[1.0] * count for count in plan.copied]
    confidence, passes, seconds = [[] for _ in requests], [], 0.0
    going, step = [b for b, count in enumerate(plan.model) if count], 0
    while going:
        turn_s = machine.measured(machine.draft(len(going)), len(going))
        passes.append(DraftPass(LANE, len(going), len(going) * ROW_TOKENS, step, turn_s))
        seconds += turn_s
        for b in going:
            chains[b].append(requests[b].confidence())
        going = [b for b in going if plan.model[b] > step + 1]
        if stop is not None and going:
            for b in going:
                confidence[b].append(chains[b][-1])
            keep = stop.keep(step, going, [chains[b][-1] for b in going])
            going = [b for b, stays in zip(going, keep, strict=True) if stays]
        step += 1
    return Drafted(chains, passes, confidence), seconds


def _accepted(chain, request):
    for position, probability in enumerate(chain):
        if request.rng.random() >= probability:
            return position
    return len(chain)
