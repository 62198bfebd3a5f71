"""Choose which chunks of a prompt a draft row attends to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Span = tuple[int, int]  # half-open token range of the prompt


def select_spans(
    chunks: Sequence[Span], scores: Sequence[float], *, budget: int, prompt_len: int, head: int, recent: int
) -> list[Span]:
    """The best chunks that fit beside the windows which a view keeps anyway.

    Chunks are taken by falling score (ties: the earlier one) and cut to what lies between the
    head window and the recent window; the last one taken is cut to the room that is left.
    Chunks that score 0 have nothing to say and are left out, however much room there is.

    Args:
        chunks: token ranges of the prompt, sorted and disjoint.
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
    if any(start < end for (_, end), (start, _) in pairwise(chunks)):
        raise ValueError("chunks overlap or are not sorted; pass them in prompt order")
    if prompt_len <= budget:
        return []
    room = budget - head - recent
    taken: list[Span] = []
    for index in sorted(range(len(chunks)), key=lambda index: (-scores[index], index)):
        if room <= 0 or scores[index] <= 0:
            break
        start = max(chunks[index][0], head)
        end = min(chunks[index][1], prompt_len - recent, start + room)
        if start < end:
            taken.append((start, end))
            room -= end - start
    return merge_adjacent(sorted(taken))


def merge_adjacent(spans: Sequence[Span]) -> list[Span]:
    """Sorted, disjoint spans with those that touch joined into one."""
    merged: list[Span] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
