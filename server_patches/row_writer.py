"""``assign_req_to_token_pool_func``: SGLang's writer of KV rows, without Triton on a CPU.

See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

import torch

TARGET = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"


def write_rows(
    req_pool_indices: torch.Tensor,  # [bs], row of each request
    req_to_token: torch.Tensor,  # [rows, max_len], written in place
    start_offset: torch.Tensor,  # [bs]
    end_offset: torch.Tensor,  # [bs]
    out_cache_loc: torch.Tensor,  # [sum(end - start)], the slots in request order
    batch_size: int,
) -> None:
    """Write ``out_cache_loc`` into ``req_to_token[row, start:end]`` for every request of the batch."""
    lengths = (end_offset - start_offset)[:batch_size]
    taken = 0
    for row, start, length in zip(
        req_pool_indices[:batch_size].tolist(),
        start_offset[:batch_size].tolist(),
        lengths.tolist(),
        strict=True,
    ):
        slots = out_cache_loc[taken : taken + length]
        req_to_token[row, start : start + length] = slots.to(req_to_token.dtype)
        taken += length


def register() -> None:
    """Replace the Triton launcher where the portable CPU platform serves; leave it alone elsewhere."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rapid_sgl.platform.detect import portable_cpu_wanted

    if portable_cpu_wanted():
        HookRegistry.register(TARGET, write_rows, HookType.REPLACE)
