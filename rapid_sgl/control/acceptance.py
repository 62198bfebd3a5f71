"""Which drafts are accepted, learned while serving: by kind of draft, by position, by request."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable

import numpy as np

from rapid_sgl.control.costs import Floats

MEMORY = 500.0  # trials that a kind's average goes back
REQUEST_MEMORY = 60.0  # the same for one request
PRIOR_TRIALS = 6.0  # what is believed at first counts like this many trials
CEILING = 0.995  # nothing is certain: a chain that always held may break


class KindAcceptance:
    """Share of accepted drafts of one kind at each position of a chain, given that all before it were accepted.

    Args:
        prior: the share to begin with.
        length: positions.
    """

    def __init__(self, prior: float, length: int):
        self.hits = np.full(length, prior * PRIOR_TRIALS)
        self.trials = np.full(length, PRIOR_TRIALS)
        self._rates: Floats | None = None
        self._most = 0.0

    def rates(self) -> Floats:
        """float64 [length]."""
        if self._rates is None:
            self._rates = self.hits / self.trials
            self._most = float(self._rates.max())
        return self._rates

    def most(self) -> float:
        """The highest of them."""
        self.rates()
        return self._most

    def observe(self, proposed: int, accepted: int) -> None:
        """File a chain of ``proposed`` drafts whose first ``accepted`` were kept."""
        tried = min(proposed, accepted + 1)
        self.hits[:accepted] += 1
        self.trials[:tried] += 1
        fade = np.minimum(1.0, MEMORY / self.trials)
        self.hits *= fade
        self.trials *= fade
        self._rates = None


class RequestAcceptance:
    """How one request departs from the average of a kind: a factor on its rates."""

    def __init__(self) -> None:
        self.accepted = self.expected = PRIOR_TRIALS

    def rates(self, kind: KindAcceptance) -> Floats:
        """float64 [length], acceptance of each position given that all before it were accepted."""
        return np.minimum(kind.rates() * (self.accepted / self.expected), CEILING)

    def most(self, kind: KindAcceptance) -> float:
        """The highest of ``rates``, without an array."""
        return min(kind.most() * (self.accepted / self.expected), CEILING)

    def observe(self, kind: KindAcceptance, proposed: int, accepted: int) -> None:
        """File a chain; call before the kind's own ``observe``."""
        tried = min(proposed, accepted + 1)
        self.accepted += accepted
        self.expected += float(kind.rates()[:tried].sum())
        if self.expected > REQUEST_MEMORY:
            fade = REQUEST_MEMORY / self.expected
            self.accepted *= fade
            self.expected *= fade


class Calibration:
    """Acceptance of a draft given the probability that the drafter itself gave it."""

    EDGES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])

    def __init__(self) -> None:
        middles = np.concatenate([[0.05], (self.EDGES[1:] + self.EDGES[:-1]) / 2, [0.985]])
        # a drafter that hesitates between two tokens is still often right
        self.hits = (0.4 + 0.6 * middles) * PRIOR_TRIALS
        self.trials = np.full(len(middles), PRIOR_TRIALS)

    def rates(self, probs: Floats) -> Floats:
        """Acceptance for draft probabilities, of any shape."""
        bins = np.searchsorted(self.EDGES, probs)
        return self.hits[bins] / self.trials[bins]

    def observe(self, probs: Floats, accepted: int) -> None:
        """File a chain by its drafts' own probabilities, float [proposed]."""
        for position, where in enumerate(np.searchsorted(self.EDGES, probs[: accepted + 1])):
            self.hits[where] += position < accepted
            self.trials[where] += 1
            if self.trials[where] > MEMORY:
                self.hits[where] *= MEMORY / self.trials[where]
                self.trials[where] = MEMORY


# Beginnings of the intervals of match lengths whose copies are counted together, and what is believed at first.
MATCH_CLASSES = (2, 3, 4, 6, 8, 12, 16, 24)
MATCH_PRIORS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
SAMPLED_COPIES = 0.6  # what is believed of them where answers are sampled, as a part of that
MODEL_PRIOR = 0.8


class Acceptance:
    """All that is known of acceptance on this server, for chains of up to ``length`` drafts."""

    def __init__(self, length: int):
        self.length = length
        self._model: dict[Hashable, KindAcceptance] = {}
        self._copies = {
            sampled: [KindAcceptance(prior * trust, length) for prior in MATCH_PRIORS]
            for sampled, trust in ((False, 1.0), (True, SAMPLED_COPIES))
        }
        self._calibration: dict[Hashable, Calibration] = defaultdict(Calibration)

    def model(self, kind: Hashable) -> KindAcceptance:
        """Drafts of a model; ``kind`` tells row, weights and greedy from sampled."""
        if kind not in self._model:
            self._model[kind] = KindAcceptance(MODEL_PRIOR, self.length)
        return self._model[kind]

    def calibration(self, kind: Hashable) -> Calibration:
        return self._calibration[kind]

    def copies(self, match: int, sampled: bool) -> KindAcceptance:
        """Copied drafts after ``match`` >= 2 equal tokens, of a greedy or a sampled answer."""
        return self._copies[sampled][bisect_right(MATCH_CLASSES, match) - 1]


def expected_tokens(rates: Floats) -> Floats:
    """Tokens that chains of 0, 1, … drafts commit on average, the target's own included.

    Args:
        rates: float [..., n], acceptance of each position given that all before it were accepted.

    Returns:
        float [..., n + 1].
    """
    reached = np.cumprod(rates, axis=-1)
    one = np.ones((*rates.shape[:-1], 1))
    result: Floats = np.concatenate([one, 1 + np.cumsum(reached, axis=-1)], axis=-1)
    return result
