"""Choose which chunks of a prompt a draft row attends to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Span = tuple[int, int]  # half-open token range of the prompt


# Shares and bounds of the retrieved length, as in the paper: max(4096, L/24). The cap keeps a
# draft row of a million-token prompt cheap; the paper has none, its prompts end at 128K tokens.
MIN_RETRIEVED = 4096
MAX_RETRIEVED = 16384
RETRIEVED_SHARE = 24


def retrieved_tokens(
    prompt_len: int, *, least: int = MIN_RETRIEVED, share: int = RETRIEVED_SHARE, most: int = MAX_RETRIEVED
) -> int:
    """Tokens to retrieve from a prompt: ``max(least, prompt_len / share)``, at most ``most``.

    Raises:
        ValueError: a bound is not positive or ``least`` exceeds ``most``.
    """
    if share < 1 or not 1 <= least <= most:
        raise ValueError(
            f"least={least}, most={most}, share={share} make no length; use 1 <= least <= most and share >= 1"
        )
    return min(max(least, prompt_len // share), most)


def select_spans(
    chunks: Sequence[Span],
    scores: Sequence[float],
    *,
    budget: int,
    prompt_len: int,
    head: int,
    recent: int,
    overlapping: bool = False,
) -> list[Span]:
    """The best chunks that fit beside the windows which a view keeps anyway.

    Chunks are taken by falling score (ties: the earlier one) and cut to what lies between the
    head window and the recent window; the last one taken is cut to the room that is left.
    Chunks that score 0 have nothing to say and are left out, however much room there is.

    Args:
        chunks: token ranges of the prompt, sorted and disjoint; with ``overlapping`` they may
            overlap, and a token counts once.
        scores: one per chunk.
        budget: tokens of the draft row: head + spans + recent.
        prompt_len: tokens of the prompt.
        head, recent: tokens of the two windows.

    Returns:
        Sorted, disjoint, non-adjacent spans inside [head, prompt_len - recent), at most
        ``budget - head - recent`` tokens in all. Empty when the prompt fits into the budget:
        a view could not be shorter than the prompt.
    """
    if len(chunks) != len(scores):
        raise ValueError(f"{len(chunks)} chunks but {len(scores)} scores; give one score per chunk")
    if not overlapping and any(start < end for (_, end), (start, _) in pairwise(chunks)):
        raise ValueError("chunks overlap or are not sorted; pass them in prompt order")
    if prompt_len <= budget:
        return []
    room = budget - head - recent
    taken: list[Span] = []
    for index in sorted(range(len(chunks)), key=lambda index: (-scores[index], index)):
        if room <= 0 or scores[index] <= 0:
            break
        start, end = max(chunks[index][0], head), min(chunks[index][1], prompt_len - recent)
        for left, right in _without(start, end, taken) if overlapping else [(start, end)]:
            right = min(right, left + room)
            if left < right:
                taken.append((left, right))
                room -= right - left
    return merge_adjacent(sorted(taken))


def _without(start: int, end: int, taken: Sequence[Span]) -> list[Span]:
    """What of [start, end) is in none of the disjoint spans ``taken``, in order."""
    parts = []
    for left, right in sorted(taken):
        if left >= end:
            break
        if right > start:
            parts.append((start, left))
            start = right
    return [part for part in [*parts, (start, end)] if part[0] < part[1]]


def merge_adjacent(spans: Sequence[Span]) -> list[Span]:
    """Sorted, disjoint spans with those that touch joined into one."""
    merged: list[Span] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
