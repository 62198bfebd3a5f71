"""Uniform random numbers that depend on a request's seed and position, never on the batch around it.

A generator with state would hand out other numbers as soon as requests join, leave or are reordered. Here
each number is a hash of (seed, position, stream), so a request replays alone exactly as it ran in a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as an unsigned constant (torch has no uint64 arithmetic)."""
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the odd Weyl increment and the two finaliser multipliers.
_INCREMENT = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def uniforms(seeds: Tensor, positions: Tensor, width: int, streams: int) -> Tensor:
    """Uniforms for ``width`` consecutive positions of each request.

    Args:
        seeds: int64 [bs], any values.
        positions: int64 [bs], the first position of each row (a token index within the request).
        width: positions per row, >= 0.
        streams: independent numbers per position, >= 0 (accept, resample, draft, ...).

    Returns:
        float64 [bs, width, streams] in [0, 1), multiples of 2^-53, on the device of ``seeds``. Element
        (b, i, s) is a function of (seeds[b], positions[b] + i, s) alone.

    Raises:
        TypeError: seeds or positions are not int64; narrower integers would not wrap modulo 2^64.
    """
    for name, tensor in (("seeds", seeds), ("positions", positions)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} has dtype {tensor.dtype}, the hash needs int64: pass {name}.long()")
    device = seeds.device
    steps = positions.unsqueeze(-1) + torch.arange(width, device=device)
    # One full mix per coordinate: a plain sum of the three would make (seed, position + 1) collide with
    # (seed + 1, position).
    state = _mix(seeds).unsqueeze(-1)
    state = _mix(state + steps * _INCREMENT).unsqueeze(-1)
    state = _mix(state + torch.arange(1, streams + 1, device=device) * _INCREMENT)
    return _shift(state, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit affects every output bit."""
    x = x + _INCREMENT
    x = (x ^ _shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's ``>>`` on int64 copies the sign bit in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
