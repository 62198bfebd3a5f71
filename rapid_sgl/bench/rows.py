"""From the runs of one method in one cell to a row of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from rapid_sgl.bench.records import Run, accept_by_position, add_histograms


def predicted_speedup(accept_length: float, decode_ms: float, draft_ms: float, verify_ms: float) -> float:
    """DESIGN section 7: tokens of a step times what each would have cost, over what the step costs."""
    return accept_length * decode_ms / (draft_ms + verify_ms)


def make_row(
    method: str,
    weights: str,
    context: int,
    batch: int,
    runs: Sequence[Run],
    target: Sequence[Run],
    **facts: Any,
) -> dict[str, Any]:
    """One row of the report: medians over ``runs``, compared with the target's runs of the same cell.

    Args:
        weights: what drafts ran on.
        target: empty when the target was not measured; comparisons are then None.
        facts: further entries of the row, which other entries may follow from: ``new_tokens``, ``retrieval_ms`` and
            ``cold_ttft_ms`` make ``end_to_end_ms``.
    """
    means = [run.steps for run in runs if run.steps]
    kept = [run.acceptance for run in runs if run.acceptance]
    row: dict[str, Any] = {"method": method, "context": context, "batch": batch}
    row["ms_per_token"] = median(run.ms_per_token for run in runs)
    # Totals of the window where the server keeps them, else of whole answers.
    row["accept_length"] = _median([mean.accept_length for mean in means] or [one.length for one in kept])
    row["accept_rate"] = _median([mean.accept_rate for mean in means] or [one.rate for one in kept])
    for name in ("draft_ms", "verify_ms"):
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
    row["tokens_per_s"] = 1e3 * batch / row["ms_per_token"]
    gaps = sorted(gap for run in runs for gap in run.gaps_ms)
    row["inter_token_p50_ms"], row["inter_token_p99_ms"] = percentile(gaps, 0.5), percentile(gaps, 0.99)
    row["accept_by_position"] = accept_by_position(add_histograms([one.histogram for one in kept])) or None
    row["copied_share"] = _median(mean.copied_share for mean in means)
    row |= facts
    row["end_to_end_ms"] = _end_to_end(row)
    row["repeats"] = len(runs)
    return {name: _rounded(value) for name, value in row.items()}


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that is not exceeded by ``share`` of them (nearest rank); None of none."""
    if not ordered:
        return None
    rank = -int(-share * len(ordered) // 1)  # rounded up
    return ordered[max(0, rank - 1)]


def _end_to_end(row: Mapping[str, Any]) -> float | None:
    """Choosing spans, first token of an uncached prompt, and the rest of the answer at the measured pace."""
    if row.get("cold_ttft_ms") is None:
        return None
    rest = (row["new_tokens"] - 1) * row["ms_per_token"]
    return (row.get("retrieval_ms") or 0.0) + row["cold_ttft_ms"] + rest


def _prediction(row: Mapping[str, Any]) -> dict[str, float | None]:
    """None where a pass over another context was timed, or no drafts were."""
    unknown = row["decode_ms"] is None or row["verify_ms"] is None
    if unknown or row["method"] in ("target", "rag-only"):
        return {"predicted_speedup": None, "measured_over_predicted": None}
    predicted = predicted_speedup(row["accept_length"], row["decode_ms"], row["draft_ms"], row["verify_ms"])
    return {
        "predicted_speedup": predicted,
        "measured_over_predicted": row["speedup_vs_target"] / predicted,
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
