"""Row-wise float32 kernels: RMS norm, SiLU-and-multiply, rotary embedding. One pass over memory each.

Every kernel takes the address of an int64 argument block that starts with a counter, the number of rows and a
field where it writes its ``stamp`` (see ``kernels.build_attend``); threads claim ``ROWS`` rows at a time.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, types

from rapid_sgl.platform.kernels_block import fast
from rapid_sgl.platform.kernels_simd import (
    WIDTH,
    bits_f32,
    exp2f,
    f32_ptr,
    fetch_add,
    i64_ptr,
    sqrtf,
    vadd,
    vdiv,
    vexp2,
    vfma,
    vload,
    vmul,
    vreduce_add,
    vsplat,
    vstore,
    vsub,
)

ROWS = 8
_SIGNATURE = types.void(types.CPointer(types.int64))

R_COUNTER, R_ROWS, R_STAMP = range(3)
N_X, N_RESIDUAL, N_WEIGHT, N_OUT, N_DIM, N_EPS = range(3, 9)
S_X, S_OUT, S_DIM = range(3, 6)
B_X, B_BIAS, B_DIM = range(3, 6)
K_SLOTS, K_SOURCE, K_TARGET, K_SOURCE_STRIDE, K_HEAD_STRIDE, K_SLOT_STRIDE, K_HEADS, K_DIM = range(3, 11)
E_Q, E_K, E_QS, E_KS, E_QHEADS, E_KHEADS, E_HEAD, E_HALF, E_POSITIONS, E_CACHE, E_LENGTH, E_BAD = range(3, 15)


@fast
def _norm_row(x, residual, weight, out, dim, eps):
    """out = x / rms(x) * weight, after x += residual (kept in residual) where there is one."""
    whole = dim // WIDTH * WIDTH
    squares = vsplat(types.float32(0.0))
    for d in range(0, whole, WIDTH):
        value = vload(x, d)
        if residual != 0:
            value = vadd(value, vload(f32_ptr(residual), d))
            vstore(f32_ptr(residual), d, value)
        squares = vfma(value, value, squares)
    total = vreduce_add(squares)
    for d in range(whole, dim):
        single = x[d]
        if residual != 0:
            single += f32_ptr(residual)[d]
            f32_ptr(residual)[d] = single
        total += single * single
    scale = types.float32(1.0) / sqrtf(total / types.float32(dim) + eps)
    source = f32_ptr(residual) if residual != 0 else x
    by = vsplat(scale)
    for d in range(0, whole, WIDTH):
        vstore(out, d, vmul(vmul(vload(source, d), by), vload(weight, d)))
    for d in range(whole, dim):
        out[d] = source[d] * scale * weight[d]


def build_rms_norm(cache: bool, stamp: int) -> Any:
    """Fields: x, residual (0 for none), weight, out [rows, dim] contiguous float32; dim; eps as float32 bits."""

    def rms_norm(args):
        step = 4 * args[N_DIM]
        first = fetch_add(args, R_COUNTER) * ROWS
        while first < args[R_ROWS]:
            for row in range(first, min(first + ROWS, args[R_ROWS])):
                residual = args[N_RESIDUAL] + row * step if args[N_RESIDUAL] != 0 else 0
                x, out = f32_ptr(args[N_X] + row * step), f32_ptr(args[N_OUT] + row * step)
                _norm_row(x, residual, f32_ptr(args[N_WEIGHT]), out, args[N_DIM], bits_f32(args[N_EPS]))
            first = fetch_add(args, R_COUNTER) * ROWS
        args[R_STAMP] = stamp

    return cfunc(_SIGNATURE, cache=cache, nopython=True)(rms_norm)


@fast
def _silu_row(x, out, dim):
    """out[i] = silu(x[i]) * x[dim + i]; silu(x) = x / (1 + exp(-x))."""
    one, rate = vsplat(types.float32(1.0)), vsplat(types.float32(-1.4426950408889634))
    whole = dim // WIDTH * WIDTH
    for d in range(0, whole, WIDTH):
        gate = vload(x, d)
        vstore(out, d, vmul(vdiv(gate, vadd(one, vexp2(vmul(gate, rate)))), vload(x, dim + d)))
    for d in range(whole, dim):
        shrink = types.float32(1.0) + exp2f(x[d] * types.float32(-1.4426950408889634))
        out[d] = x[d] / shrink * x[dim + d]


def build_silu_and_mul(cache: bool, stamp: int) -> Any:
    """Fields: x [rows, 2 dim], out [rows, dim], contiguous float32; dim."""

    def silu_and_mul(args):
        dim = args[S_DIM]
        first = fetch_add(args, R_COUNTER) * ROWS
        while first < args[R_ROWS]:
            for row in range(first, min(first + ROWS, args[R_ROWS])):
                _silu_row(f32_ptr(args[S_X] + 8 * row * dim), f32_ptr(args[S_OUT] + 4 * row * dim), dim)
            first = fetch_add(args, R_COUNTER) * ROWS
        args[R_STAMP] = stamp

    return cfunc(_SIGNATURE, cache=cache, nopython=True)(silu_and_mul)


def build_add_bias(cache: bool, stamp: int) -> Any:
    """Fields: x [rows, dim], changed in place, and bias [dim], contiguous float32; dim."""

    def add_bias(args):
        dim = args[B_DIM]
        bias = f32_ptr(args[B_BIAS])
        first = fetch_add(args, R_COUNTER) * ROWS
        while first < args[R_ROWS]:
            for row in range(first, min(first + ROWS, args[R_ROWS])):
                x = f32_ptr(args[B_X] + 4 * row * dim)
                for d in range(dim):
                    x[d] += bias[d]
            first = fetch_add(args, R_COUNTER) * ROWS
        args[R_STAMP] = stamp

    return cfunc(_SIGNATURE, cache=cache, nopython=True)(add_bias)


def build_store(cache: bool, stamp: int) -> Any:
    """Copy keys or values into a pool. Fields: int64 slots [rows]; source [rows, heads, dim] with a stride per row;
    target with strides per head and slot; float32, strides in floats; heads; dim."""

    def store(args):
        dim = args[K_DIM]
        slots = i64_ptr(args[K_SLOTS])
        first = fetch_add(args, R_COUNTER) * ROWS
        while first < args[R_ROWS]:
            for row in range(first, min(first + ROWS, args[R_ROWS])):
                for head in range(args[K_HEADS]):
                    source = f32_ptr(args[K_SOURCE] + 4 * (row * args[K_SOURCE_STRIDE] + head * dim))
                    at = slots[row] * args[K_SLOT_STRIDE] + head * args[K_HEAD_STRIDE]
                    target = f32_ptr(args[K_TARGET] + 4 * at)
                    for d in range(dim):
                        target[d] = source[d]
            first = fetch_add(args, R_COUNTER) * ROWS
        args[R_STAMP] = stamp

    return cfunc(_SIGNATURE, cache=cache, nopython=True)(store)


@fast
def _rotate(heads, n_heads, head_dim, half, angles):
    """Rotate the pairs (i, i + half) of each head by the angles whose cosines and sines lie in `angles`."""
    whole = half // WIDTH * WIDTH
    for h in range(n_heads):
        at = h * head_dim
        for d in range(0, whole, WIDTH):
            cos, sin = vload(angles, d), vload(angles, half + d)
            x, y = vload(heads, at + d), vload(heads, at + half + d)
            vstore(heads, at + d, vsub(vmul(x, cos), vmul(y, sin)))
            vstore(heads, at + half + d, vadd(vmul(y, cos), vmul(x, sin)))
        for d in range(whole, half):
            left, right = heads[at + d], heads[at + half + d]
            heads[at + d] = left * angles[d] - right * angles[half + d]
            heads[at + half + d] = right * angles[d] + left * angles[half + d]


def build_rotary(cache: bool, stamp: int) -> Any:
    """Fields: q and k (rotated in place; token strides in floats), heads of each, head size, half of the rotated
    size, int64 positions, cos|sin table [length, 2 half], its length, and a count of positions outside it."""

    def rotary(args):
        positions = i64_ptr(args[E_POSITIONS])
        half = args[E_HALF]
        first = fetch_add(args, R_COUNTER) * ROWS
        while first < args[R_ROWS]:
            for row in range(first, min(first + ROWS, args[R_ROWS])):
                position = positions[row]
                if position < 0 or position >= args[E_LENGTH]:
                    fetch_add(args, E_BAD)
                    continue
                angles = f32_ptr(args[E_CACHE] + 8 * half * position)
                _rotate(f32_ptr(args[E_Q] + 4 * row * args[E_QS]), args[E_QHEADS], args[E_HEAD], half, angles)
                _rotate(f32_ptr(args[E_K] + 4 * row * args[E_KS]), args[E_KHEADS], args[E_HEAD], half, angles)
            first = fetch_add(args, R_COUNTER) * ROWS
        args[R_STAMP] = stamp

    return cfunc(_SIGNATURE, cache=cache, nopython=True)(rotary)
