"""Cut one forward's attention into parts of equal cost. Pure numpy; computed once per forward, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rapid_sgl.platform.kernels_layout import BLOCK, MAX_ROWS, PART_FIELDS

# Cost of a key in units of one query row: reading it costs about as much as four rows of arithmetic.
KEY_COST = 4
# Claimed one by one, so a core that is busy elsewhere takes fewer.
CHUNKS_PER_THREAD = 4
# Below this (about 20 microseconds) cutting costs more than it saves.
MIN_CHUNK_COST = 4 * BLOCK * (KEY_COST + 4)


@dataclass(frozen=True)
class Queries:
    """Who asks what in one forward. Host integers, one entry per request.

    ``row``: offset of the request's row in the row table, in elements. ``first_token``: its first query's index among
    all tokens. ``count``: its queries. ``prefix``: keys before its first query, so query i sees keys
    [0, prefix + i] unless a tree mask says otherwise. ``mask``: uint8 array of all tree masks, or None;
    request b's mask is a [count, count] matrix at ``mask_offset[b]`` with row stride ``mask_stride[b]`` over the keys
    from ``prefix`` on; an offset of -1 means causal.
    """

    row: list[int]
    first_token: list[int]
    count: list[int]
    prefix: list[int]
    mask: np.ndarray | None = None
    mask_offset: list[int] = field(default_factory=list)
    mask_stride: list[int] = field(default_factory=list)

    def causal(self, b: int) -> bool:
        """Whether request b's queries form a chain."""
        return self.mask is None or self.mask_offset[b] < 0


@dataclass(frozen=True, eq=False)
class Plan:
    """``parts`` int64 [n, PART_FIELDS], ``chunks`` int64 [n_chunks + 1] (bounds into parts), ``merges`` int64
    [n_merges, 2] (first part, number of parts), ``n_partials`` rows blocks that the merge reads."""

    parts: np.ndarray
    chunks: np.ndarray
    merges: np.ndarray
    n_partials: int

    @property
    def n_chunks(self) -> int:
        return len(self.chunks) - 1


def _segments(queries: Queries, group: int, window: int) -> list[tuple[int, int, int, int, int]]:
    """(request, first query, queries, first key, end key) of every tile of at most MAX_ROWS rows."""
    tile = max(1, MAX_ROWS // group)
    found = []
    for b, (count, prefix) in enumerate(zip(queries.count, queries.prefix, strict=True)):
        for start in range(0, count, tile):
            n = min(tile, count - start)
            end = prefix + (start + n if queries.causal(b) else count)
            low = max(0, prefix + start - window) if window >= 0 else 0
            found.append((b, start, n, low // BLOCK * BLOCK, end))
    return found


def make_plan(queries: Queries, kv_heads: int, group: int, window: int, threads: int) -> Plan:
    """Cut the work of ``kv_heads`` heads with ``group`` query heads each into chunks of equal cost.

    ``window``: keys before a query that it still sees, -1 for all. Raises ValueError where a group alone
    exceeds what one part holds.
    """
    if group > MAX_ROWS:
        raise ValueError(f"{group} query heads share one KV head; the CPU kernels take at most {MAX_ROWS}")
    segments = _segments(queries, group, window)
    costs = [(KEY_COST + n * group) * (end - low) for _, _, n, low, end in segments]
    total = sum(costs) * kv_heads
    n_chunks = max(1, min(threads * CHUNKS_PER_THREAD, total // MIN_CHUNK_COST)) if threads > 1 else 1
    budget = -(-total // n_chunks)
    parts: list[tuple[int, ...]] = []
    chunks, merges = [0], []
    n_partials, room = 0, budget
    for b, start, n, low, end in segments:
        key_cost = KEY_COST + n * group
        masked = not queries.causal(b)
        at = queries.mask_offset[b] + start * queries.mask_stride[b] if masked else -1
        stride = queries.mask_stride[b] if masked else 0
        for head in range(kv_heads):
            pieces: list[tuple[int, int]] = []
            key = low
            while key < end:
                if room < key_cost * BLOCK and len(parts) + len(pieces) > chunks[-1]:
                    chunks.append(len(parts) + len(pieces))
                    room = budget
                fits = max(1, room // (key_cost * BLOCK)) * BLOCK
                stop = min(end, key + fits)
                pieces.append((key, stop))
                room -= key_cost * (stop - key)
                key = stop
            first = len(parts)
            cut = len(pieces) > 1
            for lo, hi in pieces:
                fields = (queries.row[b], queries.first_token[b] + start, n, head, lo, hi)
                tail = (queries.prefix[b] + start, at, stride, queries.prefix[b], n_partials if cut else -1)
                parts.append(fields + tail)
                n_partials += cut
            if cut:
                merges.append((first, len(pieces)))
    if chunks[-1] < len(parts):
        chunks.append(len(parts))
    return Plan(
        parts=np.array(parts, np.int64).reshape(-1, PART_FIELDS),
        chunks=np.array(chunks, np.int64),
        merges=np.array(merges, np.int64).reshape(-1, 2),
        n_partials=n_partials,
    )
