"""Ranks with clocks of their own that come to the same decisions: two processes in one of SGLang's groups."""

import multiprocessing

import numpy as np
import pytest
from pace_world import LENGTH, Machine, Request, run

STEPS = 150


class Agreed:
    """A pace that learns from the first rank's clock."""

    def __init__(self, ranks):
        from rapid_sgl.control.pace import Pace

        self.pace, self.ranks = Pace(LENGTH), ranks
        self.plan, self.stop = self.pace.plan, self.pace.stop

    def observe(self, candidates, plan, drafts, accepted, *, draft_s, other_s):
        from rapid_sgl.stats import Step

        step = Step(gap_s=0.001)
        step.seconds = {"draft": draft_s, "encode": 0.0, "step": draft_s + other_s}
        drafts.passes, draft_s, other_s, gap_s = self.ranks.agreed(drafts.passes, step)
        self.pace.observe(candidates, plan, drafts, accepted, draft_s=draft_s, other_s=other_s, gap_s=gap_s)


def decode(rank, meeting, results):
    """One rank: its clock runs differently, its drafts and what is accepted of them are everybody's."""
    from sglang.srt.distributed.parallel_state import get_world_group, init_distributed_environment

    from rapid_sgl.control.pace import Pace
    from rapid_sgl.control.ranks import Ranks

    init_distributed_environment(2, rank, f"file://{meeting}", rank, backend="gloo")
    lengths = []
    for pace in (Agreed(Ranks(get_world_group())), Pace(LENGTH)):
        luck = np.random.default_rng(0)
        requests = [Request(7000, mean, luck, copies=0.1) for mean in (0.95, 0.8, 0.6)]
        lengths.append(run(pace, Machine(seed=rank), requests, STEPS)[2].tolist())
    results.put(lengths)


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    """Of chains, int [steps, requests], per rank: agreed, and with each rank's own clock."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    ranks = [spawn.Process(target=decode, args=(rank, meeting, results)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=300) for _ in ranks]
    for rank in ranks:
        rank.join()
    return found


def test_ranks_that_learn_from_one_clock_draft_alike(lengths):
    (first, _), (second, _) = lengths
    assert first == second
    assert len({length for step in first for length in step}) > 3  # there was something to decide


def test_left_to_their_own_clocks_they_would_not(lengths):
    (_, first), (_, second) = lengths
    assert first != second
