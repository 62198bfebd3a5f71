"""RAPID in SGLang's Prometheus endpoint (``--enable-metrics``, ``GET /metrics``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Must be imported after SGLang has set PROMETHEUS_MULTIPROC_DIR, which it does before it starts a scheduler.
from prometheus_client import Counter, Gauge, Histogram

from rapid_sgl.stats import Step

PREFIX = "sglang:rapid_"
LENGTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 16, 32)
ROW_SECONDS = (1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0)


class StepMetrics:
    """Counters that a worker feeds once per decode step.

    Args:
        labels: on every series; SGLang's own names (``model_name``, ``tp_rank``).
    """

    def __init__(self, labels: Mapping[str, Any]):
        self._labels = {name: str(value) for name, value in labels.items()}
        self._drafted = self._make(Counter, "draft_tokens", "drafts proposed", "source")
        self._accepted = self._make(Counter, "accepted_tokens", "drafts committed", "source")
        self._decisions = self._make(Counter, "steps", "decode steps by what was decided", "decision")
        self._seconds = self._make(Counter, "step_seconds", "time of decode steps", "phase")
        self._undrafted = self._make(Counter, "undrafted_requests", "requests without drafts", "reason")
        self._length = self._make(
            Histogram, "draft_length", "drafts of a step's longest chain", buckets=LENGTH_BUCKETS
        )
        self._rows = self._make(
            Histogram, "row_build_seconds", "time to build a request's draft row", buckets=ROW_SECONDS
        )
        self._reselections = self._make(Counter, "reselections", "times that a view got other spans")
        self._kv = self._make(
            Gauge,
            "draft_kv_tokens",
            "KV slots of re-encoded draft rows",
            "state",
            multiprocess_mode="mostrecent",
        )

    def step(self, step: Step, decision: str, draft_kv: Mapping[str, int] | None) -> None:
        """File a finished decode step."""
        for source, drafted, accepted in (
            ("model", step.proposed - step.copied, step.accepted - step.copies_accepted),
            ("copy", step.copied, step.copies_accepted),
        ):
            self._of(self._drafted, source).inc(drafted)
            self._of(self._accepted, source).inc(accepted)
        self._of(self._decisions, decision).inc()
        for phase in ("encode", "draft"):
            self._of(self._seconds, phase).inc(step.seconds[phase])
        self._of(self._seconds, "verify").inc(step.other_s)
        self._of(self._length).observe(step.longest)
        if draft_kv is not None:
            for state in ("free", "evictable"):
                self._of(self._kv, state).set(draft_kv[state])
            self._of(self._kv, "used").set(draft_kv["size"] - draft_kv["free"] - draft_kv["evictable"])

    def row(self, seconds: float) -> None:
        """A request's draft row was built."""
        self._of(self._rows).observe(seconds)

    def reselection(self) -> None:
        """A view got other spans."""
        self._of(self._reselections).inc()

    def undrafted(self, reason: str) -> None:
        """A request decodes without drafts."""
        self._of(self._undrafted, reason).inc()

    def _make(self, kind: type, name: str, text: str, *own: str, **options: Any) -> Any:
        return kind(PREFIX + name, text, labelnames=[*self._labels, *own], **options)

    def _of(self, metric: Any, *own: str) -> Any:
        return metric.labels(*self._labels.values(), *own)


def step_metrics() -> StepMetrics | None:
    """For a scheduler process: metrics with SGLang's labels, or None without ``--enable-metrics``."""
    from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

    if not get_observability().enable_metrics:
        return None
    labels: dict[str, Any] = {
        "model_name": get_serving().served_model_name,
        "tp_rank": get_parallel().tp_rank,
        **(get_observability().extra_metric_labels or {}),
    }
    return StepMetrics(labels)
