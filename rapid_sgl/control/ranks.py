"""What tensor-parallel ranks must agree on before each decides alone: time.

Ranks that decode a batch together run the same passes, so they must choose the same lengths. Tokens, logits and
acceptance are the same on all of them; only their clocks differ. Every rank learns from the first one's, so that all
come to the same plans and end chains at the same drafts, and nothing else has to be sent.
"""

from __future__ import annotations

from typing import Any

import torch

from rapid_sgl.control.step import DraftPass
from rapid_sgl.stats import Step


class Ranks:
    """The ranks of one tensor-parallel group.

    Args:
        group: SGLang's ``GroupCoordinator``.
    """

    def __init__(self, group: Any):
        self.group = group
        self.several: bool = group.world_size > 1

    def agreed(self, passes: list[DraftPass], step: Step) -> tuple[list[DraftPass], float, float, float]:
        """The first rank's times of a finished step: its draft passes, seconds of all of them, seconds of the rest,
        and seconds since the step before."""
        own = [step.seconds["draft"], step.other_s, step.gap_s, *(one.turn_s for one in passes)]
        if not self.several:
            return passes, own[0], own[1], own[2]
        times = torch.tensor(own, dtype=torch.float64)
        torch.distributed.broadcast(times, src=self.group.ranks[0], group=self.group.cpu_group)
        draft_s, other_s, gap_s, *turns = times.tolist()
        agreed = [one._replace(turn_s=turn_s) for one, turn_s in zip(passes, turns, strict=True)]
        return agreed, draft_s, other_s, gap_s
