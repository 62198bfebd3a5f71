"""Where a decode step's time goes and what its drafts came to; read through ``/server_info``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class StepStats:
    """Totals since start, kept apart for steps that drafted and steps that did not."""

    def __init__(self) -> None:
        self.drafted = _Totals()
        self.plain = _Totals()

    @contextmanager
    def step(self) -> Iterator[_Step]:
        """Time one decode step; ``_Step.count`` files it."""
        record = _Step()
        start = time.perf_counter()
        yield record
        record.seconds["step"] = time.perf_counter() - start
        (self.drafted if record.proposed else self.plain).add(record)

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers: steps, requests, proposed, accepted and seconds per phase."""
        return {"drafted": vars(self.drafted).copy(), "plain": vars(self.plain).copy()}


class _Step:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.requests = self.proposed = self.accepted = self.longest = 0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start

    def count(self, chains: Sequence[Sequence[int]], accepted: torch.Tensor) -> None:
        """``accepted``: int64 [bs], drafts committed per request."""
        self.requests = len(chains)
        self.proposed = sum(map(len, chains))
        self.longest = max(map(len, chains))
        self.accepted = int(accepted.sum())


class _Totals:
    def __init__(self) -> None:
        self.steps = self.requests = self.proposed = self.accepted = self.draft_passes = 0
        self.encode_s = self.draft_s = self.verify_s = self.step_s = 0.0

    def add(self, step: _Step) -> None:
        self.steps += 1
        self.requests += step.requests
        self.proposed += step.proposed
        self.accepted += step.accepted
        self.draft_passes += step.longest
        self.encode_s += step.seconds["encode"]
        self.draft_s += step.seconds["draft"]
        self.verify_s += step.seconds["verify"]
        self.step_s += step.seconds["step"]
