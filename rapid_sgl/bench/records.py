"""From what one run shows (stream events, the server's step totals) to one row per method and cell.

Definitions, also in ``rapid-sgl bench --help``:

- The *window* of a run opens when the last request of the batch has its first token and closes
  when the first one has ``new_tokens``: in between, the whole batch is decoding. Each request
  counts from its first to its last event inside the window.
- ``ms_per_token``: those times summed over the requests, divided by their tokens. It is the decode
  time that one request waits per token, whatever the batch; prefill is not in it.
- Step times and acceptance come from the server's own totals over the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
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


@dataclass(frozen=True)
class StepMeans:
    """Means over the decode steps of one run, from the server's totals; times in ms."""

    batch: float  # requests per step
    accept_length: float  # tokens committed per request and step, bonus included
    accept_rate: float | None  # accepted / proposed; None when nothing was drafted
    draft_ms: float  # all draft passes of a step
    verify_ms: float
    step_ms: float


@dataclass(frozen=True)
class Run:
    """One method on one batch of prompts, once."""

    ms_per_token: float
    ttft_ms: float  # mean over the requests
    cached_share: float  # of the prompt tokens
    steps: StepMeans | None  # None when the server keeps no RAPID statistics


def make_run(traces: Sequence[Trace], new_tokens: int, steps: StepMeans | None) -> Run:
    """Condense one run; raises BenchError when it is too short to time."""
    seconds, tokens = window(traces, new_tokens)
    return Run(
        ms_per_token=1e3 * seconds / tokens,
        ttft_ms=1e3 * sum(trace.events[0][0] - trace.sent for trace in traces) / len(traces),
        cached_share=sum(t.cached_tokens for t in traces) / max(1, sum(t.prompt_tokens for t in traces)),
        steps=steps,
    )


def window(traces: Sequence[Trace], new_tokens: int) -> tuple[float, int]:
    """Seconds and tokens inside the window, summed over the requests (see the module's text).

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
            seconds = sum(events[-1][0] - events[0][0] for events in timed)
            return seconds, sum(events[-1][1] - events[0][1] for events in timed)
    raise BenchError("the answers came in one piece, so decoding cannot be timed; raise --new-tokens")


def step_means(before: Mapping[str, Any], after: Mapping[str, Any]) -> StepMeans | None:
    """Means of the steps between two of ``StepStats.snapshot``; None when there were none.

    Steps that drafted are preferred: beside them, plain ones are the exception.
    """
    for kind in ("drafted", "plain"):
        total = {name: after[kind][name] - before[kind][name] for name in after[kind]}
        if total["steps"] > 0:
            return _means(total)
    return None


def _means(total: Totals) -> StepMeans:
    steps, requests, proposed = total["steps"], total["requests"], total["proposed"]
    return StepMeans(
        batch=requests / steps,
        accept_length=(requests + total["accepted"]) / requests,
        accept_rate=total["accepted"] / proposed if proposed else None,
        draft_ms=1e3 * total["draft_s"] / steps if proposed else 0.0,
        verify_ms=1e3 * total["verify_s"] / steps,
        step_ms=1e3 * total["step_s"] / steps,
    )


def predicted_speedup(accept_length: float, decode_ms: float, draft_ms: float, verify_ms: float) -> float:
    """DESIGN section 7: tokens of a step times what each would have cost, over what the step costs."""
    return accept_length * decode_ms / (draft_ms + verify_ms)


def make_row(
    method: str, weights: str, context: int, batch: int, runs: Sequence[Run], target: Sequence[Run]
) -> dict[str, Any]:
    """One row of the report: medians over ``runs``, compared with the target's runs of the same cell.

    Args:
        weights: what drafts ran on.
        target: empty when the target was not measured; comparisons are then None.
    """
    means = [run.steps for run in runs if run.steps]
    row: dict[str, Any] = {"method": method, "context": context, "batch": batch}
    row["ms_per_token"] = median(run.ms_per_token for run in runs)
    for name in ("accept_length", "accept_rate", "draft_ms", "verify_ms"):
        row[name] = _median(getattr(mean, name) for mean in means)
    row["decode_ms"] = _median(run.steps.step_ms for run in target if run.steps)
    row["speedup_vs_target"] = None
    if target:
        row["speedup_vs_target"] = median(run.ms_per_token for run in target) / row["ms_per_token"]
    row["drafter_weights"] = weights
    row["step_ms"] = _median(mean.step_ms for mean in means)
    row["outside_share"] = None
    if means:
        row["outside_share"] = 1 - (row["draft_ms"] + row["verify_ms"]) / row["step_ms"]
    row |= _prediction(row)
    row["ms_per_token_range"] = [pick(run.ms_per_token for run in runs) for pick in (min, max)]
    pairs = [one.ms_per_token / other.ms_per_token for one, other in zip(target, runs, strict=False)]
    row["speedup_range"] = [min(pairs), max(pairs)] if pairs else None
    row["ttft_ms"] = median(run.ttft_ms for run in runs)
    row["ttft_over_target"] = None
    if target:
        row["ttft_over_target"] = row["ttft_ms"] / median(run.ttft_ms for run in target)
    row["cached_share"] = median(run.cached_share for run in runs)
    row["mean_batch"] = _median(mean.batch for mean in means)
    row["repeats"] = len(runs)
    return {name: _rounded(value) for name, value in row.items()}


def _prediction(row: Mapping[str, Any]) -> dict[str, float | None]:
    if row["decode_ms"] is None or row["verify_ms"] is None or row["method"] == "target":
        return {"predicted_speedup": None, "measured_over_predicted": None}
    predicted = predicted_speedup(row["accept_length"], row["decode_ms"], row["draft_ms"], row["verify_ms"])
    return {
        "predicted_speedup": predicted,
        "measured_over_predicted": row["speedup_vs_target"] / predicted,
    }


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
