"""Draft rows: for each running request, the list of KV slots that the drafter attends to.

A *view* row holds slots of the target's own KV cache: head window, retrieved spans,
recent window, then everything generated so far. Rows live in a table with the layout
of SGLang's ``req_to_token`` and use the same row index as the request, so a row costs
table space but no KV slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rapid_sgl.config import RapidConfig
from rapid_sgl.request import Span, outside_windows


@dataclass
class View:
    """A request's draft row: ``length`` prompt tokens, each later token shifted down by ``shift``."""

    pool_idx: int  # row in SGLang's table and in ours
    length: int  # prompt tokens in the row
    shift: int  # prompt tokens left out, = prompt_len - length
    weights: str = "same"  # what drafts over it
    filled: int = 0  # target positions below this are in the row or left out of it on purpose


def view_ranges(prompt_len: int, spans: Sequence[Span], config: RapidConfig) -> list[Span]:
    """Token ranges of the prompt that a view keeps, sorted, disjoint and merged when adjacent.

    Head and recent windows are always kept; budget that the spans leave unused
    lengthens the recent window.

    Args:
        prompt_len: tokens of the prompt; must exceed ``config.budget``.
        spans: retrieved ranges, sorted and disjoint; parts inside the windows are free.
    """
    recent_start = prompt_len - config.recent
    kept = outside_windows(spans, config, prompt_len)
    spare = config.budget - config.head - config.recent - sum(end - start for start, end in kept)
    while spare > 0 and recent_start > config.head:
        # walk the recent window back over the nearest gap; retrieved tokens on the way cost nothing
        gap_start = kept[-1][1] if kept else config.head
        step = min(spare, recent_start - gap_start)
        recent_start, spare = recent_start - step, spare - step
        if spare > 0 and kept:
            recent_start = kept.pop()[0]
    ranges = [(0, config.head), *kept, (recent_start, prompt_len)]
    return _merge([span for span in ranges if span[0] < span[1]])


# Tail starts of re-encoded prompts lie on multiples of this many tokens.
TAIL_GRID = 64


def tail_variants(ranges: Sequence[Span], spans: Sequence[Span]) -> list[list[Span]]:
    """``ranges`` with a few starts of the last range, for a draft prompt that the radix tree may know.

    The recent window is counted from the prompt's end, so a question that is a word longer would move its
    start and nothing behind the spans could be found in the cache. On a grid, with three starts to choose
    from, questions that differ by up to ``TAIL_GRID`` tokens in length find a common one. Retrieved tokens are
    never cut, nor is a tail of fewer than four grid steps.

    Returns:
        Variants, the preferred one first; each keeps at most 3 grid steps fewer tokens than ``ranges``.
    """
    *before, (start, end) = ranges
    first = -(-start // TAIL_GRID) * TAIL_GRID
    starts = [first + TAIL_GRID, first, first + 2 * TAIL_GRID]
    if end - max(starts) < TAIL_GRID or any(a < max(starts) and start < b for a, b in spans):
        return [list(ranges)]
    return [[*before, (new, end)] for new in starts]


def _merge(ranges: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in ranges:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


class DraftRows:
    """The table of draft rows; row ``i`` belongs to the request that holds row ``i`` of the target's table.

    Args:
        req_to_token: the target's table [rows, max_len], int32, on the serving device.
    """

    def __init__(self, req_to_token: torch.Tensor):
        self.target = req_to_token
        self.req_to_token = torch.zeros_like(req_to_token)

    def build(self, pool_idx: int, prompt_len: int, ranges: Sequence[Span], weights: str = "same") -> View:
        """Write the view's slots into row ``pool_idx``; the prompt must be in the target's cache."""
        length = 0
        for start, end in ranges:
            size = end - start
            self.req_to_token[pool_idx, length : length + size] = self.target[pool_idx, start:end]
            length += size
        return View(pool_idx, length, prompt_len - length, weights, prompt_len)

    def rewrite(self, view: View, ranges: Sequence[Span]) -> None:
        """Give a view other ranges of its prompt; what was generated stays in the row.

        Args:
            ranges: as for ``build``; as many tokens as the view has of the prompt.

        Raises:
            ValueError: another number of tokens, for which the rest of the row would have to move.
        """
        size = sum(end - start for start, end in ranges)
        if size != view.length:
            raise ValueError(
                f"ranges of {size} tokens for a view of {view.length}; give it as many as it has"
            )
        slots = [self.target[view.pool_idx, start:end] for start, end in ranges]
        self.req_to_token[view.pool_idx, :size] = torch.cat(slots)

    def extend(self, views: Sequence[View], seq_lens: torch.Tensor, width: int) -> torch.Tensor:
        """Bring rows up to date with the target's table, slots for the next tokens included.

        Everything generated since a row was last extended is copied, whatever it was that committed it, and
        one slot more than the drafts need: when all of them are accepted, the last one's keys and values lie there.

        Args:
            seq_lens: int64 [n], tokens of each request that have KV in the target's cache.
            width: drafts per request.

        Returns:
            int64 [n, width], slots of target positions ``seq_lens … seq_lens + width - 1``.
        """
        device = seq_lens.device
        lens = seq_lens.tolist()
        back = max(seq_len - view.filled for view, seq_len in zip(views, lens, strict=True))
        pool_idx = torch.tensor([[view.pool_idx] for view in views], device=device)
        shift = torch.tensor([[view.shift] for view in views], device=device)
        prompt = torch.tensor([[view.length + view.shift] for view in views], device=device)
        positions = seq_lens[:, None] + torch.arange(-back, width + 1, device=device)
        positions = torch.maximum(positions, prompt)  # entries of the prompt stay as they are
        slots = self.target[pool_idx, positions]
        self.req_to_token[pool_idx, positions - shift] = slots
        for view, seq_len in zip(views, lens, strict=True):
            view.filled = seq_len
        return slots[:, back : back + width].to(torch.int64)
