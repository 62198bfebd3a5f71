"""Memory of re-encoded rows: KV pool, allocator, radix tree and row table, apart from the target's.

Draft rows that own their keys and values must never take room from a request of the target. So they live
in a pool of their own, of a size that is set at start-up, under a second instance of SGLang's radix tree: a
draft prompt seen before is found there, and what drafts evict are other drafts.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory


class DraftSpace:
    """Slots for re-encoded rows and the tree that remembers draft prompts.

    Args:
        req_to_token_pool: its table holds the rows, int32 [rows, max_len]; row ``i`` is of the request that
            has row ``i`` of the target's table.
        token_to_kv_pool_allocator: of the pool that the rows' slots lie in.
    """

    def __init__(self, req_to_token_pool: Any, token_to_kv_pool: Any, token_to_kv_pool_allocator: Any):
        self.req_to_token: torch.Tensor = req_to_token_pool.req_to_token
        self.token_to_kv_pool = token_to_kv_pool
        self.allocator = token_to_kv_pool_allocator
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=get_memory().disable_radix_cache,
                req_to_token_pool=req_to_token_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
                page_size=1,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.size = self.allocator.available_size()

    def alloc(self, count: int) -> torch.Tensor | None:
        """``count`` slots, int64, for which unused draft prompts are evicted; None when there is no room."""
        short = count - self.allocator.available_size()
        if short > self.tree.evictable_size():
            return None
        if short > 0:
            self.tree.evict(EvictParams(num_tokens=short))
        return self.allocator.alloc(count)

    def known(self, key: RadixKey) -> float:
        """Share of ``key`` that the tree holds."""
        if self.tree.disable:
            return 0.0
        return self.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len / len(key)

    def match(self, key: RadixKey) -> tuple[torch.Tensor, Any]:
        """Slots (int64) of the longest known prefix of ``key`` and the lock that holds them."""
        if self.tree.disable:
            return torch.empty(0, dtype=torch.int64, device=self.req_to_token.device), None
        result = self.tree.match_prefix(MatchPrefixParams(key=key))
        node = result.last_device_node
        return self.tree.path_device_indices(node), self.tree.lock(node)

    def insert(
        self, key: RadixKey, slots: torch.Tensor, lock: Any, held: int
    ) -> tuple[torch.Tensor, Any, int]:
        """Give the slots of a whole draft prompt to the tree.

        Args:
            slots: int64 [len(key)]; the first ``held`` are the tree's already, under ``lock``.

        Returns:
            The prompt's slots from now on (where another request was faster, its slots, and the duplicates are
            free), the lock that holds them, and how many of them the tree holds.
        """
        if self.tree.disable:
            return slots, lock, held
        result = self.tree.insert(InsertParams(key=key, value=slots.clone(), prev_prefix_len=held))
        node = result.last_device_node
        new_lock = self.tree.lock(node)
        self.unlock(lock)
        return self.tree.path_device_indices(node), new_lock, len(key)

    def unlock(self, lock: Any) -> None:
        if lock is not None:
            self.tree.unlock(lock)

    def clear(self) -> None:
        """Forget everything; no row may be in use."""
        self.tree.reset()
        self.allocator.clear()

    def snapshot(self) -> dict[str, int]:
        """Slots: in all, free, and held by draft prompts that no request uses."""
        return {
            "size": self.size,
            "free": self.allocator.available_size(),
            "evictable": 0 if self.tree.disable else self.tree.evictable_size(),
        }


def same_weights_space(runner: Any, tokens: int) -> DraftSpace:
    """Room for ``tokens`` more tokens of the served model, by the configurator that built the target's pools."""
    configurator = runner.kv_cache_configurator
    config = replace(runner.memory_pool_config, max_total_num_tokens=tokens)
    pools = configurator._init_pools(
        sizes=configurator._derive_pool_sizes(config=config),
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
    )
    return DraftSpace(pools.req_to_token_pool, pools.token_to_kv_pool, pools.token_to_kv_pool_allocator)


def radix_key(ids: array[int], req: Any, weights: str) -> RadixKey:
    """The key of a draft prompt; requests that SGLang keeps apart (LoRA, salt) stay apart here, and so do
    keys and values of different weights."""
    extra = req.extra_key if weights == "same" else f"{req.extra_key or ''}\n{weights}"
    return RadixKey(token_ids=ids, extra_key=extra, cache_salt=req.cache_salt)
