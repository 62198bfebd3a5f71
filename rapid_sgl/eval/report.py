"""From predictions to the table: scores with intervals, differences to long context, speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rapid_sgl.eval.methods import TARGET, Method
from rapid_sgl.eval.samples import Sample
from rapid_sgl.eval.store import Key

Z = 1.959964  # of 95 %
RESAMPLES = 10_000


def wilson(successes: float, count: int) -> tuple[float, float]:
    """95 % interval of a share, by Wilson."""
    share, scale = successes / count, 1 + Z**2 / count
    middle = (share + Z**2 / (2 * count)) / scale
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean: percentiles of 10,000 resamples, the same ones at each call."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(0)
    means = data[rng.integers(len(data), size=(RESAMPLES, len(data)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Wilson's for right or wrong, a bootstrap for scores in between."""
    if all(score in (0.0, 1.0) for score in scores):
        return wilson(sum(scores), len(scores))
    return bootstrap(scores)


def make_report(
    cells: Sequence[tuple[str, str, Sequence[Sample]]],
    methods: Sequence[Method],
    predictions: dict[Key, dict[str, Any]],
    greedy: bool,
) -> dict[str, Any]:
    """``{"rows": …, "averages": …, "lossless": …}``.

    Args:
        cells: task, length and samples of each line of the table.
        predictions: by sample and method, complete.
        greedy: whether answers of lossless methods have to be the target's.
    """
    rows, averages = [], []
    by_method: dict[str, list[dict[str, Any]]] = {method.name: [] for method in methods}
    has_target = any(method.name == TARGET for method in methods)
    for task, length, samples in cells:
        target = [predictions[sample.id, TARGET] for sample in samples] if has_target else None
        for method in methods:
            found = [predictions[sample.id, method.name] for sample in samples]
            row = {"task": task, "length": length, "method": method.name, **_row(found, target)}
            rows.append(row)
            by_method[method.name].append(row)
    for method in methods:
        mean = np.mean([row["score"] for row in by_method[method.name]])
        averages.append({"method": method.name, "cells": len(cells), "score": round(float(mean), 2)})
    report: dict[str, Any] = {"rows": rows, "averages": averages, "lossless": None}
    compared = [method for method in methods if method.lossless and method.name != TARGET]
    if has_target and compared:
        report["lossless"] = _lossless(cells, compared, predictions, greedy)
    return report


def _row(found: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """Scores in percent."""
    scores = [record["score"] for record in found]
    row: dict[str, Any] = {
        "samples": len(found),
        "score": _percent(sum(scores) / len(scores)),
        "interval": [_percent(bound) for bound in interval(scores)],
        "difference": None,
        "difference_interval": None,
        "better": None,
        "worse": None,
        "changed": None,
        "prompt_tokens": round(sum(record["prompt_tokens"] for record in found) / len(found), 1),
        "ms_per_token": _ms_per_token(found),
        "speedup": None,
        "accept_length": _mean(record["accept_length"] for record in found),
        "e2e_s": _mean(record["e2e_s"] for record in found),
        "answer_tokens": round(sum(record["completion_tokens"] for record in found) / len(found), 1),
    }
    if target is not None:
        gains = [record["score"] - other["score"] for record, other in zip(found, target, strict=True)]
        row["difference"] = _percent(sum(gains) / len(gains))
        row["difference_interval"] = [_percent(bound) for bound in bootstrap(gains)]
        row["better"], row["worse"] = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        row["changed"] = sum(
            record["prediction"] != other["prediction"] for record, other in zip(found, target, strict=True)
        )
        base = _ms_per_token(target)
        if base and row["ms_per_token"]:
            row["speedup"] = round(base / row["ms_per_token"], 3)
    return row


def _ms_per_token(records: Sequence[dict[str, Any]]) -> float | None:
    """Decode time from the first event of each answer to its last, by the tokens that came in between."""
    tokens = sum(record["decode_tokens"] for record in records)
    return round(1e3 * sum(record["decode_s"] for record in records) / tokens, 2) if tokens else None


def _lossless(
    cells: Sequence[tuple[str, str, Sequence[Sample]]],
    methods: Sequence[Method],
    predictions: dict[Key, dict[str, Any]],
    greedy: bool,
) -> dict[str, Any]:
    """How many answers of lossless methods are not the target's; comparable only under greedy decoding."""
    pairs = [
        (predictions[sample.id, method.name], predictions[sample.id, TARGET])
        for _, _, samples in cells
        for sample in samples
        for method in methods
    ]
    return {
        "comparable": greedy,
        "answers": len(pairs),
        "texts_differ": sum(one["prediction"] != other["prediction"] for one, other in pairs),
        "scores_differ": sum(one["score"] != other["score"] for one, other in pairs),
        "samples": sorted(
            {one["sample"] for one, other in pairs if one["prediction"] != other["prediction"]}
        )[:20],
    }


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 3) if known else None


def _percent(share: float) -> float:
    return round(100 * share, 2)
