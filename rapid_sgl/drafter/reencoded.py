"""Re-encoded draft rows: a short prompt of its own, prefilled beside the target's steps (the paper's drafter)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from rapid_sgl.drafter.passes import DraftPasses
from rapid_sgl.drafter.space import DraftSpace, radix_key


class ReencodedRow:
    """One request's row: its draft prompt, then every generated token, at positions of its own.

    ``tokens`` are those whose keys and values are in entries 0 to ``len(tokens) - 1``. Slots of entries
    below ``held`` belong to the tree, those from ``held`` to ``allocated`` to this row.
    """

    def __init__(self, pool_idx: int, key: RadixKey, weights: str):
        self.pool_idx = pool_idx
        self.weights = weights
        self.key = key
        self.prompt = key.token_ids
        self.tokens: list[int] = []
        self.held = self.allocated = 0
        self.agreed = 0  # generated tokens that are known to be committed ones; these never change
        self.lock: Any = None
        self.opened = self.stored = False
        self.cached = 0  # prompt tokens that the tree had

    def sync(self, output_ids: Sequence[int]) -> None:
        """Drop rejected drafts; what stays is a prefix of prompt + ``output_ids``, its last token excluded."""
        first = len(self.prompt)
        fed, committed = self.tokens[first + self.agreed :], output_ids[self.agreed : -1]
        self.agreed += next(
            (i for i, (a, b) in enumerate(zip(fed, committed, strict=False)) if a != b),
            min(len(fed), len(committed)),
        )
        del self.tokens[first + self.agreed :]

    def missing(self, output_ids: Sequence[int]) -> list[int]:
        """Committed tokens without keys and values, the last one included; ``sync`` comes first."""
        done = len(self.tokens)
        first = len(self.prompt)
        if done < first:
            return [*self.prompt[done:], *output_ids]
        return list(output_ids[done - first :])


class Reencoder:
    """Opens, prefills and releases re-encoded rows.

    Args:
        passes: by weights, "same" or the quantised twin's.
        chunk: prompt tokens that one step may prefill, over all rows.
        context_len: tokens that the draft model takes.
    """

    def __init__(self, space: DraftSpace, passes: dict[str, DraftPasses], chunk: int, context_len: int):
        self.space, self.passes, self.chunk, self.context_len = space, passes, chunk, context_len
        self.prefilled = 0  # tokens, since start
        self.refused = 0  # steps of a request for which there was no room

    def row(self, req: Any, weights: str, *prompts: Sequence[int]) -> ReencodedRow:
        """A row for a decoding request (SGLang's ``Req``) over the one of ``prompts`` that is best known
        to the tree; nothing is computed yet."""
        keys = [radix_key(array("q", prompt), req, weights) for prompt in prompts]
        key = max(keys, key=self.space.known) if len(keys) > 1 else keys[0]
        return ReencodedRow(req.kv.req_pool_idx, key, weights)

    def advance(self, rows: Sequence[tuple[ReencodedRow, Sequence[int]]]) -> None:
        """Bring rows up to date, oldest first, by at most ``chunk`` tokens in one pass.

        Args:
            rows: each with the output tokens of its request.
        """
        room, work = self.chunk, []
        for row, output_ids in rows:
            row.sync(output_ids)
            self._open(row)
            todo = row.missing(output_ids)[:-1]
            if len(row.tokens) >= len(row.prompt) and len(todo) <= self.chunk:
                continue  # the next draft pass takes these along
            todo = todo[:room]
            if todo and self._reserve(row, len(todo)):
                work.append((row, todo))
                room -= len(todo)
        for weights in sorted({row.weights for row, _ in work}):
            self._prefill(weights, [(row, todo) for row, todo in work if row.weights == weights])

    def ready(self, row: ReencodedRow, output_ids: Sequence[int], drafts: int) -> int:
        """Drafts that the row can carry now: ``drafts``, or 0 while it is prefilled or has no room.

        The last draft's own keys and values are not needed.
        """
        if len(row.tokens) < len(row.prompt):
            return 0
        more = len(row.missing(output_ids)) + drafts - 1
        if more > self.chunk + drafts or len(row.tokens) + more >= self.context_len:
            return 0
        return drafts if self._reserve(row, more) else 0

    def slots(self, row: ReencodedRow, start: int, count: int) -> torch.Tensor:
        """Slots of entries ``start`` to ``start + count - 1``, int64."""
        return self.space.req_to_token[row.pool_idx, start : start + count].to(torch.int64)

    def snapshot(self) -> dict[str, int]:
        """For ``/server_info``: slots, tokens prefilled since start, request steps without room."""
        return {**self.space.snapshot(), "prefilled": self.prefilled, "refused": self.refused}

    def release(self, row: ReencodedRow) -> None:
        """Free the row's own slots; its prompt stays in the tree until it is evicted."""
        if row.allocated > row.held:
            self.space.allocator.free(self.slots(row, row.held, row.allocated - row.held))
        self.space.unlock(row.lock)
        row.held, row.allocated, row.lock, row.tokens, row.opened, row.agreed = 0, 0, None, [], False, 0

    def _open(self, row: ReencodedRow) -> None:
        if row.opened:
            return
        row.opened = True
        slots, row.lock = self.space.match(row.key)
        row.held = row.allocated = row.cached = len(slots)
        self.space.req_to_token[row.pool_idx, : len(slots)] = slots.to(torch.int32)
        row.tokens = list(row.prompt[: len(slots)])
        row.stored = len(slots) == len(row.prompt)

    def _reserve(self, row: ReencodedRow, count: int) -> bool:
        """Make sure that ``count`` more tokens have slots."""
        need = len(row.tokens) + count - row.allocated
        if need <= 0:
            return True
        slots = self.space.alloc(need)
        if slots is None:
            self.refused += 1
            return False
        end = row.allocated + need
        self.space.req_to_token[row.pool_idx, row.allocated : end] = slots.to(torch.int32)
        row.allocated = end
        return True

    def _prefill(self, weights: str, work: Sequence[tuple[ReencodedRow, list[int]]]) -> None:
        device = self.space.req_to_token.device
        slots = [self.slots(row, len(row.tokens), len(todo)) for row, todo in work]
        self.passes[weights].extend(
            torch.tensor([token for _, todo in work for token in todo], device=device),
            torch.tensor([row.pool_idx for row, _ in work], device=device),
            [len(row.tokens) for row, _ in work],
            [len(todo) for _, todo in work],
            torch.cat(slots),
        )
        for row, todo in work:
            row.tokens += todo
            self.prefilled += len(todo)
            if not row.stored and len(row.tokens) >= len(row.prompt):
                self._store(row)

    def _store(self, row: ReencodedRow) -> None:
        count = len(row.prompt)
        slots, row.lock, row.held = self.space.insert(row.key, self.slots(row, 0, count), row.lock, row.held)
        self.space.req_to_token[row.pool_idx, :count] = slots.to(torch.int32)
        row.stored = True
