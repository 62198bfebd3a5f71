"""What a forward pass costs, learned while serving."""

from __future__ import annotations

import math
from bisect import insort

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# Only ratios of this guess count, and only until passes of the size in question were seen. Weights are read once
# per pass (1), each row adds arithmetic, each cached token is read; values are those of a small model on a CPU.
ROW, CONTEXT, CONTEXT_ROW = 0.026, 5.6e-5, 4.5e-6
# Passes whose rows, width or context differ by this factor tell less about each other (e-folding of a Gaussian).
REACH = math.log(1.5)
HALF_LIFE = 2000  # observations after which an old one counts half as much as a new one of the same distance
NEW_SHARE = 0.1  # of the newest observation in the average of its bucket, once the bucket is settled
OUTLIER = math.log(1.5)  # a single pass moves a settled average as if it were at most this far off
MAX_BUCKETS = 256  # a prediction looks at all of them; the one unseen for longest goes
# Until then the lower median of a bucket's passes counts. (The fastest would make whatever is seldom run look cheaper
# than it is.)
SETTLED = 5


class PassCosts:
    """Seconds of one kind of forward pass as a function of its size.

    A size is (rows, width, context): requests in the batch, new tokens per request, cached tokens of all requests
    together. What was observed is kept per bucket of sizes; a prediction is the weighted mean of buckets nearby,
    carried over by the shape of the guess above. So a size that is served now is known exactly, one that was never
    seen is scaled from its neighbours, and everything adapts when the machine changes its pace.

    Args:
        first_guess: seconds of the smallest pass before anything was observed.
    """

    def __init__(self, first_guess: float = 0.02):
        self.first_guess = first_guess
        self._met: set[tuple[int, int]] = set()  # rows and width of passes that were run
        self._observed = 0
        # buckets of passes of nearly one size: the number of each, and what is known of it
        self._number: dict[tuple[int, int, int], int] = {}
        self._first: list[list[float]] = []  # levels of the first observations, rising
        self._where = np.zeros((MAX_BUCKETS, 3))  # log rows, log width, log context
        self._level = np.zeros(MAX_BUCKETS)  # log of seconds over ``shape``
        self._count = np.zeros(MAX_BUCKETS)
        self._seen = np.zeros(MAX_BUCKETS)  # ``_observed`` at the last one

    @property
    def known(self) -> bool:
        """Whether any pass was observed, so that predictions are seconds and not only ratios."""
        return bool(self._number)

    def observe(self, rows: int, width: int, context: float, seconds: float) -> None:
        """File the time of one pass; not of the first of its shape, which may have compiled or recorded something.

        (Such a time would make the shape look too expensive to be run again, and so never be corrected.)
        """
        if seconds <= 0 or rows == 0:
            return
        if (rows, width) not in self._met:
            self._met.add((rows, width))
            return
        self._observed += 1
        where = _where(rows, width, context)
        level = math.log(seconds) - math.log(float(shape(rows, width, context)))
        key = (round(3 * where[0]), round(6 * where[1]), round(2 * where[2]))
        n = self._number.get(key)
        if n is None:
            n = self._new_bucket(key)
        self._where[n], self._seen[n] = where, self._observed
        self._count[n] += 1
        if self._count[n] <= SETTLED:
            first = self._first[n]
            insort(first, level)
            self._level[n] = first[(len(first) - 1) // 2]
        else:
            self._level[n] += NEW_SHARE * max(-OUTLIER, min(OUTLIER, level - self._level[n]))

    def _new_bucket(self, key: tuple[int, int, int]) -> int:
        """Its number: the next, or that of the bucket unseen for longest."""
        n = len(self._number)
        if n == MAX_BUCKETS:
            n = int(self._seen.argmin())
            del self._number[next(other for other, number in self._number.items() if number == n)]
            self._first[n] = []
        else:
            self._first.append([])
        self._number[key], self._count[n] = n, 0
        return n

    def predict(self, rows: ArrayLike, width: ArrayLike, context: ArrayLike) -> Floats:
        """Seconds for each size; arguments broadcast."""
        rows, width, context = np.broadcast_arrays(
            *(np.asarray(x, dtype=float) for x in (rows, width, context))
        )
        guess = shape(rows, width, context)
        used = len(self._number)
        if not used:
            return self.first_guess * guess
        age = self._observed - self._seen[:used]
        trust = np.log(np.minimum(self._count[:used], 10)) - age * math.log(2) / HALF_LIFE
        target = np.stack([np.log(np.maximum(x, 1.0)) for x in (rows, width, context)], axis=-1)
        distance = ((target[..., None, :] - self._where[:used]) ** 2).sum(-1) / REACH**2
        score = trust - distance
        score = np.exp(score - score.max(-1, keepdims=True))
        mean: Floats = (score * self._level[:used]).sum(-1) / score.sum(-1)
        return np.exp(mean) * guess

    def age(self, rows: int, width: int, context: float) -> int:
        """Observations since a pass of about this size was seen; a large number when none was."""
        used = len(self._number)
        near = ((np.array(_where(rows, width, context)) - self._where[:used]) ** 2).sum(-1) < REACH**2
        return int(self._observed - self._seen[:used][near].max()) if near.any() else 1 << 30


def shape(rows: ArrayLike, width: ArrayLike, context: ArrayLike) -> Floats:
    """Relative cost of a pass before anything is known of the machine."""
    rows, width, context = (np.asarray(x, dtype=float) for x in (rows, width, context))
    result: Floats = 1 + ROW * rows * width + context * (CONTEXT + CONTEXT_ROW * (width - 1))
    return result


def _where(rows: float, width: float, context: float) -> tuple[float, float, float]:
    return math.log(max(rows, 1)), math.log(max(width, 1)), math.log(max(context, 1.0))
