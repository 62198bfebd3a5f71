"""What one run shows: stream events at the client, the server's step totals.

Definitions, also in docs/benchmark.md:

- The *window* of a run opens when the last request of the batch has its first token and closes
  when the first one has ``new_tokens``: in between, the whole batch is decoding. Each request
  counts from its first to its last event inside the window.
- ``ms_per_token``: those times summed over the requests, divided by their tokens. It is the decode
  time that one request waits per token, whatever the batch; prefill is not in it.
- *Inter-token times* are those between the events of the window. An event that brings k tokens counts as k times a
  k-th of its wait, as in SGLang's ``bench_serving``.
- Step times and acceptance come from the server's own totals over the same steps; on a server without RAPID,
  acceptance comes from the answers' ``meta_info``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rapid_sgl.bench import BenchError

Totals = Mapping[str, float]


@dataclass(frozen=True)
class Trace:
    """What the client saw of one request; times are ``time.perf_counter()`` seconds."""

    sent: float
    events: list[tuple[float, int]]  # arrival, tokens generated so far
    prompt_tokens: int
    cached_tokens: int
    # from SGLang's meta_info: target passes, drafts proposed and kept, and passes by number of kept drafts
    passes: int = 0
    proposed: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepMeans:
    """Means over the decode steps of one run, from the server's totals; times in ms."""

    batch: float  # requests per step
    accept_length: float  # tokens committed per request and step, bonus included
    accept_rate: float | None  # accepted / proposed; None when nothing was drafted
    draft_ms: float  # all draft passes of a step
    verify_ms: float
    step_ms: float
    copied_share: float | None = None  # of the proposed drafts, those that were copied and not computed


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafts of whole answers."""

    length: float  # tokens committed per request and step, bonus included
    rate: float | None  # accepted / proposed
    histogram: tuple[int, ...] = ()  # steps by number of accepted drafts


@dataclass(frozen=True)
class Run:
    """One method on one batch of prompts, once."""

    ms_per_token: float
    ttft_ms: float  # mean over the requests
    cached_share: float  # of the prompt tokens
    steps: StepMeans | None  # None when the server keeps no RAPID statistics
    gaps_ms: tuple[float, ...] = field(default=(), repr=False)  # inter-token times
    acceptance: Acceptance | None = None  # None without speculation


def make_run(traces: Sequence[Trace], new_tokens: int, steps: StepMeans | None) -> Run:
    """Condense one run; raises BenchError when it is too short to time."""
    timed = window_events(traces, new_tokens)
    seconds, tokens = _totals(timed)
    return Run(
        ms_per_token=1e3 * seconds / tokens,
        ttft_ms=1e3 * sum(trace.events[0][0] - trace.sent for trace in traces) / len(traces),
        cached_share=sum(t.cached_tokens for t in traces) / max(1, sum(t.prompt_tokens for t in traces)),
        steps=steps,
        gaps_ms=tuple(inter_token_ms(timed)),
        acceptance=acceptance(traces),
    )


def window(traces: Sequence[Trace], new_tokens: int) -> tuple[float, int]:
    """Seconds and tokens inside the window, summed over the requests (see the module's text).

    Raises:
        BenchError: as for ``window_events``.
    """
    return _totals(window_events(traces, new_tokens))


def window_events(traces: Sequence[Trace], new_tokens: int) -> list[list[tuple[float, int]]]:
    """The events inside the window, per request.

    Requests with a single event inside are left out; where that is all of them, the whole run counts.

    Raises:
        BenchError: the whole run has no two events to measure between.
    """
    opened = max(trace.events[0][0] for trace in traces)
    closed = min(
        next((time for time, tokens in trace.events if tokens >= new_tokens), math.inf) for trace in traces
    )
    inside = [[event for event in trace.events if opened <= event[0] <= closed] for trace in traces]
    for groups in (inside, [trace.events for trace in traces]):
        timed = [events for events in groups if len(events) > 1]
        if timed:
            return timed
    raise BenchError("the answers came in one piece, so decoding cannot be timed; raise --new-tokens")


def _totals(timed: Sequence[Sequence[tuple[float, int]]]) -> tuple[float, int]:
    seconds = sum(events[-1][0] - events[0][0] for events in timed)
    return seconds, sum(events[-1][1] - events[0][1] for events in timed)


def inter_token_ms(timed: Sequence[Sequence[tuple[float, int]]]) -> list[float]:
    """Inter-token times of all requests, in ms (see the module's text)."""
    gaps = []
    for events in timed:
        for (before, had), (now, has) in pairwise(events):
            if has > had:
                gaps += [1e3 * (now - before) / (has - had)] * (has - had)
    return gaps


def acceptance(traces: Sequence[Trace]) -> Acceptance | None:
    """Over whole answers, from their ``meta_info``; None on a server that does not speculate."""
    passes = sum(trace.passes for trace in traces)
    if not passes:
        return None
    proposed, accepted = sum(t.proposed for t in traces), sum(t.accepted for t in traces)
    return Acceptance(
        1 + accepted / passes,
        accepted / proposed if proposed else None,
        add_histograms([trace.histogram for trace in traces]),
    )


def add_histograms(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Element-wise sum; shorter ones end in zeros."""
    longest = max(map(len, histograms), default=0)
    return tuple(
        sum(counts[index] for counts in histograms if index < len(counts)) for index in range(longest)
    )


def accept_by_position(histogram: Sequence[int]) -> list[float]:
    """Share of the steps that kept draft 1, of those the share that kept draft 2 too, and so on.

    Where chains differ in length, ends of chains count as refusals.
    """
    reached = [sum(histogram[index:]) for index in range(len(histogram))]
    return [now / before for before, now in pairwise(reached) if before]


def step_means(before: Mapping[str, Any], after: Mapping[str, Any]) -> StepMeans | None:
    """Means of all steps between two of ``StepStats.snapshot``, drafted or not; None when there were none."""
    kinds = ("drafted", "plain")
    total = {name: sum(after[kind][name] - before[kind][name] for kind in kinds) for name in after["drafted"]}
    return _means(total) if total["steps"] > 0 else None


def _means(total: Totals) -> StepMeans:
    steps, requests, proposed = total["steps"], total["requests"], total["proposed"]
    return StepMeans(
        batch=requests / steps,
        accept_length=(requests + total["accepted"]) / requests,
        accept_rate=total["accepted"] / proposed if proposed else None,
        draft_ms=1e3 * total["draft_s"] / steps if proposed else 0.0,
        verify_ms=1e3 * total["verify_s"] / steps,
        step_ms=1e3 * total["step_s"] / steps,
        copied_share=total.get("copied", 0) / proposed if proposed else None,
    )
