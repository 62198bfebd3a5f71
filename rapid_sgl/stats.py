"""Where a decode step's time goes and what its drafts came to; read through ``/server_info``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class StepStats:
    """Totals since start, kept apart for steps that drafted and steps that did not."""

    def __init__(self) -> None:
        self.drafted = _Totals()
        self.plain = _Totals()
        self.lengths: Counter[int] = Counter()  # steps by drafts of their longest chain
        self._ended = 0.0

    @contextmanager
    def step(self) -> Iterator[Step]:
        """Time one decode step; ``Step.count`` files it."""
        start = time.perf_counter()
        record = Step(start - self._ended)
        yield record
        self._ended = time.perf_counter()
        record.seconds["step"] = self._ended - start
        (self.drafted if record.proposed else self.plain).add(record)
        self.lengths[record.longest] += 1

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers: steps, requests, proposed, accepted, seconds per phase; steps by draft length."""
        lengths = {str(length): count for length, count in sorted(self.lengths.items())}
        return {"drafted": vars(self.drafted).copy(), "plain": vars(self.plain).copy(), "lengths": lengths}


class Step:
    """One decode step: its chains and where its time went.

    Args:
        gap_s: seconds since the one before.
    """

    def __init__(self, gap_s: float) -> None:
        self.gap_s = gap_s
        self.seconds: dict[str, float] = {}
        self.requests = self.proposed = self.accepted = self.passes = self.longest = 0
        self.copied = self.copies_accepted = 0

    @property
    def other_s(self) -> float:
        """Seconds of a finished step that neither drafting nor draft prefill took."""
        return self.seconds["step"] - self.seconds["draft"] - self.seconds["encode"]

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start

    def count(self, chains: Sequence[Sequence[int]], accepted: Sequence[int], copied: Sequence[int]) -> None:
        """File the chains of one step.

        Args:
            accepted: drafts committed per request.
            copied: above 0 where a request's chain is a copy.
        """
        self.requests = len(chains)
        lengths = [len(chain) for chain in chains]
        self.proposed, self.accepted = sum(lengths), sum(accepted)
        self.longest = max(lengths)
        self.passes = max(0 if copy else length for length, copy in zip(lengths, copied, strict=True))
        self.copied = sum(length for length, copy in zip(lengths, copied, strict=True) if copy)
        self.copies_accepted = sum(count for count, copy in zip(accepted, copied, strict=True) if copy)


class _Totals:
    def __init__(self) -> None:
        self.steps = self.requests = self.proposed = self.accepted = self.draft_passes = 0
        self.copied = self.copies_accepted = 0  # of proposed and accepted
        self.encode_s = self.draft_s = self.verify_s = self.step_s = 0.0

    def add(self, step: Step) -> None:
        self.steps += 1
        self.requests += step.requests
        self.proposed += step.proposed
        self.accepted += step.accepted
        self.draft_passes += step.passes
        self.copied += step.copied
        self.copies_accepted += step.copies_accepted
        self.encode_s += step.seconds["encode"]
        self.draft_s += step.seconds["draft"]
        self.verify_s += step.seconds["verify"]
        self.step_s += step.seconds["step"]
