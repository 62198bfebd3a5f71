"""Lanes of one draft loop: the rows of one kind, advanced together, one token per pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rapid_sgl.drafter.passes import DraftPasses
from rapid_sgl.drafter.reencoded import ReencodedRow, Reencoder
from rapid_sgl.drafter.rows import DraftRows, View


class ViewLane:
    """Views of the target's KV cache, in the target's positions.

    Drafts write their keys and values into the slots that the verify pass will fill with the target's own,
    so they need no memory and leave nothing behind.

    Args:
        batch: SGLang's ``ScheduleBatch`` in decode mode.
        views: by position in the batch.
        width: drafts of the longest chain.
    """

    def __init__(self, passes: DraftPasses, rows: DraftRows, batch: Any, views: dict[int, View], width: int):
        self.passes = passes
        self.members = list(views)
        self.key = ("view", next(iter(views.values())).weights)
        self.where = {b: i for i, b in enumerate(self.members)}
        self.device = batch.seq_lens.device
        index = torch.tensor(self.members, device=self.device)
        shift = torch.tensor([view.shift for view in views.values()], device=self.device)
        self.last = [batch.reqs[b].output_ids[-1] for b in self.members]
        self.pool_idx = batch.req_pool_indices[index]
        self.seq_lens = batch.seq_lens[index]
        self.row_lens = self.seq_lens - shift
        self.row_tokens = self.row_lens.tolist()
        self.slots = rows.extend(list(views.values()), self.seq_lens, width)

    def advance(self, rows: Sequence[int], chains: Sequence[list[int]], step: int) -> torch.Tensor:
        """Logits after the last draft (at step 0: the last committed token) of the given requests."""
        ids = torch.tensor(
            [chains[b][-1] if step else self.last[self.where[b]] for b in rows], device=self.device
        )
        pick: Any = slice(None)
        if len(rows) < len(self.members):
            pick = torch.tensor([self.where[b] for b in rows], device=self.device)
        return self.passes.decode(
            ids,
            self.seq_lens[pick] + step,
            self.pool_idx[pick],
            self.row_lens[pick] + step + 1,
            self.slots[pick, step],
        )

    def tokens(self, rows: Sequence[int], step: int) -> int:
        """Tokens that the pass of ``step`` reads, over all ``rows``."""
        return sum(self.row_tokens[self.where[b]] + step + 1 for b in rows)

    def close(self, chains: Sequence[list[int]]) -> None:
        """Nothing to keep."""


class ReencodedLane:
    """Re-encoded rows, all of the same weights. The first pass takes every committed token that a row lacks."""

    def __init__(self, reencoder: Reencoder, batch: Any, rows: dict[int, ReencodedRow]):
        self.reencoder, self.rows = reencoder, rows
        weights = next(iter(rows.values())).weights
        self.key = ("rag", weights)
        self.passes = reencoder.passes[weights]
        self.device = batch.seq_lens.device
        self.todo = {b: row.missing(batch.reqs[b].output_ids) for b, row in rows.items()}
        self.start = {b: len(row.tokens) for b, row in rows.items()}

    def advance(self, rows: Sequence[int], chains: Sequence[list[int]], step: int) -> torch.Tensor:
        """As for views."""
        pool_idx = torch.tensor([self.rows[b].pool_idx for b in rows], device=self.device)
        if step == 0 and any(len(self.todo[b]) > 1 for b in rows):
            counts = [len(self.todo[b]) for b in rows]
            slots = [self.reencoder.slots(self.rows[b], self.start[b], len(self.todo[b])) for b in rows]
            ids = torch.tensor([token for b in rows for token in self.todo[b]], device=self.device)
            prefixes = [self.start[b] for b in rows]
            return self.passes.extend(ids, pool_idx, prefixes, counts, torch.cat(slots))
        entry = torch.tensor([self.start[b] + len(self.todo[b]) - 1 + step for b in rows], device=self.device)
        ids = torch.tensor([chains[b][-1] if step else self.todo[b][-1] for b in rows], device=self.device)
        slots = self.reencoder.space.req_to_token[pool_idx, entry].to(torch.int64)
        return self.passes.decode(ids, entry, pool_idx, entry + 1, slots)

    def tokens(self, rows: Sequence[int], step: int) -> int:
        """As for views."""
        return sum(self.start[b] + len(self.todo[b]) + step for b in rows)

    def close(self, chains: Sequence[list[int]]) -> None:
        """Note what the rows hold now; the last draft of a chain was never fed."""
        for b, row in self.rows.items():
            row.tokens += [*self.todo[b], *chains[b][:-1]]
