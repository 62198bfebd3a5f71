"""What each request of a batch could draft in the next step: model drafts that its row carries, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rapid_sgl.config import AUTO
from rapid_sgl.control.step import Candidate
from rapid_sgl.drafter.reencoded import ReencodedRow, Reencoder
from rapid_sgl.drafter.rows import View
from rapid_sgl.state import RequestState
from rapid_sgl.verify.law import Transfer

# Chains have a prescribed length where they must not depend on how fast the machine was: those of a seeded sampled
# answer, and those under a transfer, of which more is under the transfer the more is drafted.
PRESCRIBED = 4


@dataclass(frozen=True)
class Offers:
    """Of one step, by position in the batch."""

    candidates: list[Candidate]
    copies: list[list[int]]  # copied tokens


def collect(
    batch: Any,
    states: Sequence[RequestState],
    reencoder: Reencoder | None,
    length: int,
    *,
    short_first_step: bool,
    wait: bool,
) -> Offers:
    """Offers of the batch's requests.

    Args:
        batch: SGLang's ``ScheduleBatch`` in decode mode.
        reencoder: where re-encoded rows are.
        length: drafts per chain that verify slots are reserved for.
        short_first_step: the step behind a request's first token goes without drafts.
        wait: for what is prepared in the background; where several ranks decode the batch together, all must see it
            in the same step.
    """
    candidates, copies = [], []
    for req, state, context in zip(batch.reqs, states, batch.seq_lens_cpu.tolist(), strict=True):
        fixed = fixed_length(req, state)
        # no drafts past the answer's token limit: the step commits one token of its own
        room = min(fixed or length, length, req.sampling_params.max_new_tokens - len(req.output_ids) - 1)
        if short_first_step and state.is_first(req):
            room = 0
        copy: list[int] = []
        match = 0
        if state.source is not None and room > 0:
            copy, match = state.source.propose(req.output_ids, room, wait=wait or fixed is not None)
        model = _model_drafts(req, state, reencoder, room)
        copies.append(copy)
        candidates.append(
            Candidate(
                memory=state.pace,
                context=context,
                fixed=fixed is not None,
                sampled=not state.law.greedy,
                stop_below=state.options.config.stop_below,
                lane=_lane(state) if model else None,
                model=model,
                row=_row_tokens(state, context),
                copied=len(copy),
                match=match,
            )
        )
    return Offers(candidates, copies)


def fixed_length(req: Any, state: RequestState) -> int | None:
    """Drafts per chain that a request prescribes; None where the server chooses."""
    wanted = state.options.config.draft_length
    if wanted != AUTO:
        return int(wanted)
    seeded = req.sampling_params.sampling_seed is not None and not state.law.greedy
    return PRESCRIBED if seeded or state.law.transfer is not Transfer.NONE else None


def _model_drafts(req: Any, state: RequestState, reencoder: Reencoder | None, room: int) -> int:
    """Model drafts that the request's row can carry now, at most ``room``."""
    if state.row is None or room <= 0:
        return 0
    if isinstance(state.row, ReencodedRow):
        assert reencoder is not None
        return reencoder.ready(state.row, req.output_ids, room)
    return room


def _lane(state: RequestState) -> tuple[str, str]:
    assert state.row is not None
    return state.drafter, state.row.weights


def _row_tokens(state: RequestState, context: int) -> int:
    if isinstance(state.row, View):
        return context - state.row.shift
    return len(state.row.tokens) if state.row is not None else 0
