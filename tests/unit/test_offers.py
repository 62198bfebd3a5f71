"""Chains never outgrow the verify slots that the server reserves, whatever prescribes their length."""

from types import SimpleNamespace

import pytest
import torch

from rapid_sgl.config import RapidConfig
from rapid_sgl.control.step import RequestPace
from rapid_sgl.drafter.rows import View
from rapid_sgl.offers import PRESCRIBED, collect
from rapid_sgl.request import RequestOptions
from rapid_sgl.state import RequestState
from rapid_sgl.verify.law import LawRow
from rapid_sgl.verify.penalties import Penalties


def offered(length, *, seed=None, greedy=True, max_new_tokens=100):
    """Model drafts offered to a request in the middle of its answer, on a server that reserves ``length``."""
    params = SimpleNamespace(max_new_tokens=max_new_tokens, sampling_seed=seed)
    req = SimpleNamespace(output_ids=[1, 2, 3], sampling_params=params)
    state = RequestState(
        RequestOptions(RapidConfig()), LawRow(greedy=greedy), Penalties(0, 0, 1, 0, ()), 0,
        View(0, 50, 50), "view", "requested", RequestPace(), None, None,
    )  # fmt: skip
    batch = SimpleNamespace(reqs=[req], seq_lens_cpu=torch.tensor([102]))
    (candidate,) = collect(batch, [state], None, length, short_first_step=False, wait=False).candidates
    return candidate.model, candidate.fixed


@pytest.mark.parametrize("length", [2, 10])
def test_prescribed_chains_fit_the_reserved_slots(length):
    assert offered(length) == (length, False)
    assert offered(length, seed=5) == (length, False)  # greedy: nothing depends on the seed
    assert offered(length, seed=5, greedy=False) == (min(PRESCRIBED, length), True)


def test_no_drafts_past_the_answers_limit():
    assert offered(10, max_new_tokens=6)[0] == 2
    assert offered(10, max_new_tokens=4)[0] == 0
