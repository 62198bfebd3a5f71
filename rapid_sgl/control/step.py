"""One step as the pace sees it: what requests could draft, and the passes that ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rapid_sgl.control.acceptance import RequestAcceptance

Lane = tuple[str, str]  # kind of row and weights: what shares a draft pass


@dataclass
class RequestPace:
    """What is remembered of a running request."""

    model: RequestAcceptance = field(default_factory=RequestAcceptance)
    copies: RequestAcceptance = field(default_factory=RequestAcceptance)
    copied: int = 0  # copied tokens that were committed
    copying: bool = False  # in the latest step


class Candidate(NamedTuple):
    """What a request of the batch could draft in this step."""

    memory: RequestPace
    context: int  # tokens with keys and values
    fixed: bool  # its draft length is prescribed
    sampled: bool
    stop_below: float = 0.0
    lane: Lane | None = None  # None: no model drafts
    model: int = 0  # model drafts that its row can carry
    row: int = 0  # tokens of the row
    copied: int = 0  # tokens that a copy offers
    match: int = 0  # equal tokens before them


class DraftPass(NamedTuple):
    """One draft pass as it ran. Those of one turn of the draft loop, one per lane, are timed together."""

    lane: Lane
    rows: int
    tokens: int  # of all its rows
    turn: int
    turn_s: float  # seconds


class Drafted(Protocol):
    """What a draft loop hands over."""

    @property
    def chains(self) -> Sequence[Sequence[int]]: ...
    @property
    def passes(self) -> Sequence[DraftPass]: ...
    @property
    def confidence(self) -> Sequence[Sequence[float]]:
        """Probability that the drafter gave each of its drafts, where it was looked at."""
        ...
