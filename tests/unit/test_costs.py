"""Learned pass costs on a machine whose true costs are known, and learned acceptance."""

import numpy as np
import pytest

from rapid_sgl.control.acceptance import Acceptance, Calibration, KindAcceptance, RequestAcceptance
from rapid_sgl.control.costs import PassCosts


def true(rows, width, context):
    """Not the shape of the first guess: rows cost more in batches, context less."""
    return 0.01 + 1e-3 * rows * width**0.8 + 0.8e-6 * context


@pytest.fixture
def learned():
    costs, rng = PassCosts(), np.random.default_rng(0)
    for _ in range(40):
        for rows, width, context in ((1, 1, 7000), (1, 5, 7000), (8, 1, 20000), (8, 5, 20000)):
            costs.observe(rows, width, context, true(rows, width, context) * rng.lognormal(0, 0.05))
    return costs


def test_what_was_seen_is_known_and_neighbours_are_near(learned):
    for size in ((1, 1, 7000), (1, 5, 7000), (8, 1, 20000), (8, 5, 20000)):
        assert learned.predict(*size) == pytest.approx(true(*size), rel=0.05)
    for size in ((1, 3, 7000), (1, 6, 9000), (7, 5, 18000)):
        assert learned.predict(*size) == pytest.approx(true(*size), rel=0.2)


def test_arguments_broadcast(learned):
    assert learned.predict(1, np.arange(1, 12), 7000).shape == (11,)
    assert learned.predict([1, 2], 1, [100, 200]).shape == (2,)


def test_compiling_once_and_hiccups_do_not_stick(learned):
    costs = PassCosts()
    costs.observe(1, 1, 1000, 5.0)  # compiled
    for _ in range(3):
        costs.observe(1, 1, 1000, 0.01)
    assert costs.predict(1, 1, 1000) == pytest.approx(0.01)
    for _ in range(3):
        learned.observe(1, 1, 7000, 50 * true(1, 1, 7000))
    assert learned.predict(1, 1, 7000) < 1.3 * true(1, 1, 7000)


def test_a_machine_that_slows_down_is_followed(learned):
    for _ in range(40):
        learned.observe(1, 1, 7000, 1.4 * true(1, 1, 7000))
    assert learned.predict(1, 1, 7000) == pytest.approx(1.4 * true(1, 1, 7000), rel=0.05)


def test_age(learned):
    assert PassCosts().age(1, 1, 100) > 1e6
    assert learned.age(8, 5, 20000) == 0 and learned.age(1, 1, 7000) == 3
    assert learned.age(64, 1, 7000) > 1e6


def test_acceptance_by_position():
    kind, rng, rates = KindAcceptance(0.8, 4), np.random.default_rng(0), np.array([0.9, 0.7, 0.5, 0.3])
    for _ in range(3000):
        kept = int(np.cumprod(rng.random(4) < rates).sum())
        kind.observe(4, kept)
    assert kind.rates() == pytest.approx(rates, abs=0.08)


def test_a_request_departs_from_its_kind_and_comes_back():
    kind, request = KindAcceptance(0.8, 4), RequestAcceptance()
    assert request.rates(kind) == pytest.approx(kind.rates())
    for _ in range(20):
        request.observe(kind, 4, 0)
    assert request.rates(kind)[0] < 0.3
    for _ in range(60):
        request.observe(kind, 4, 4)
    assert request.rates(kind)[0] > 0.7


def test_copies_are_counted_by_match_length():
    acceptance = Acceptance(4)
    for sampled in (False, True):
        kinds = {match: acceptance.copies(match, sampled) for match in (2, 8, 11, 24, 32)}
        assert kinds[2] is not kinds[8]
        assert kinds[8] is kinds[11] and kinds[24] is kinds[32]
    assert acceptance.copies(8, True) is not acceptance.copies(8, False)


def test_calibration_learns_what_confidence_is_worth():
    calibration, rng = Calibration(), np.random.default_rng(0)
    for _ in range(3000):
        prob = rng.random()
        calibration.observe(np.array([prob]), int(rng.random() < prob**2))
    probs = np.array([0.15, 0.55, 0.85])
    assert calibration.rates(probs) == pytest.approx(probs**2, abs=0.1)
