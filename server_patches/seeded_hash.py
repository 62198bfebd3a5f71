"""``murmur_hash32``: the hash behind SGLang's seeded sampling, in numpy for the portable CPU platform.

See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

import numpy as np
import torch

TARGET = "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32"

Words = np.ndarray  # uint32; arithmetic wraps modulo 2^32, as the hash wants it


def hash_columns(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of the 16 bytes seed (8), position (4), column (4), little endian.

    Args:
        seed: uint64 [n].
        positions: integer [n].
        col_indices: integer [m].

    Returns:
        uint32 [n, m].
    """
    seeds = seed.to(torch.int64).numpy().astype(np.uint64)
    state = np.zeros(len(seeds), dtype=np.uint32)
    for word in (seeds, seeds >> np.uint64(32), positions.numpy()):
        state = _absorb(state, word.astype(np.uint32))
    table = _absorb(state[:, None], col_indices.numpy().astype(np.uint32)[None])
    return torch.from_numpy(_finish(table ^ np.uint32(16)))


def _absorb(state: Words, word: Words) -> Words:
    word = _rotate(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _finish(state: Words) -> Words:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
    return state ^ (state >> np.uint32(16))


def _rotate(word: Words, left: int) -> Words:
    return (word << np.uint32(left)) | (word >> np.uint32(32 - left))


def register() -> None:
    """REPLACE hook where the portable CPU platform serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rapid_sgl.platform.detect import portable_cpu_wanted

    if portable_cpu_wanted():
        HookRegistry.register(TARGET, hash_columns, HookType.REPLACE)
