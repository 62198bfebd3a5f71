"""Schedules: how much of a transfer's weight (λ or η) applies at each position of a request. Pure torch.

With weight v, gate g and n tokens generated before the position:

    CONSTANT    v
    LINEAR      v · max(0, 1 - n/N)           N: the request's answer length
    CONFIDENCE  v where max_x q(x) >= g, else 0
    RETRIEVAL   v · s if s >= g, else 0       s: the request's retrieval score

The weight depends on q, the position and the request, never on the token that was drafted, so that accepting
by p̂/q and drawing from the residual stays exact for the p̂ that it gives.
"""

from __future__ import annotations

import enum

from torch import Tensor


class Schedule(enum.IntEnum):
    """Where a transfer's weight applies."""

    CONSTANT = 0
    LINEAR = 1
    CONFIDENCE = 2
    RETRIEVAL = 3


def retrieval_weight(weight: float, score: float, gate: float) -> float:
    """RETRIEVAL's weight, the same at every position of the request."""
    return weight * score if score >= gate else 0.0


def faded(weight: Tensor, horizon: Tensor, position: Tensor) -> Tensor:
    """LINEAR's weight.

    Args:
        weight: float32 [n], at position 0.
        horizon: float32 [n], tokens after which it is 0; inf leaves it as it is.
        position: int64 [n], tokens generated before each row's position.
    """
    return weight * (1 - position / horizon).clamp_min(0)


def confident(q: Tensor, gate: Tensor) -> Tensor:
    """CONFIDENCE's gate: bool [n], true where some token of q (float [n, V]) has at least ``gate`` (float32 [n])."""
    return q.amax(-1) >= gate
