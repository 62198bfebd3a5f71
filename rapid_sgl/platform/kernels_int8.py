"""x @ (weight * scale).T for a few rows of x, with an int8 weight and one float32 scale per output.

Like ``kernels_linear`` one pass over the weight, which is a quarter as large. Weights are widened in registers and x stays
float32, so nothing but the weight is rounded. Every output sums its products in one order, whichever of the
three tiles computes it: a row's result does not depend, to the last bit, on how many others are computed with it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from rapid_sgl.platform import tape
from rapid_sgl.platform.kernels_block import fast
from rapid_sgl.platform.kernels_launch import compiled
from rapid_sgl.platform.kernels_layout import LINE
from rapid_sgl.platform.kernels_simd import (
    WIDTH,
    f32_ptr,
    fetch_add,
    prefetch,
    u8_ptr,
    vec_t,
    vfma,
    vload,
    vreduce_add,
    vsplat,
    vstore_sums4,
)

TILE = 8  # outputs that stay in the L1 cache while all rows of x pass over them
OUTPUTS = 32  # outputs that a thread claims at a time
DIM_STEP = 16  # `dim` is a multiple of it: whole vectors of either width
I_COUNTER, I_OUTPUTS, I_STAMP, I_ROWS, I_X, I_WEIGHT, I_SCALE, I_OUT, I_DIM = range(9)


@intrinsic
def vload_i8(typingctx, pointer, index):
    """WIDTH signed bytes from ``pointer[index:]``, widened to float32."""

    def codegen(context, builder, signature, args):
        where = builder.gep(args[0], [args[1]])
        raw = builder.load(builder.bitcast(where, ir.VectorType(ir.IntType(8), WIDTH).as_pointer()), align=1)
        wide = builder.sext(raw, ir.VectorType(ir.IntType(32), WIDTH))
        return builder.sitofp(wide, ir.VectorType(ir.FloatType(), WIDTH))

    return vec_t(types.CPointer(types.uint8), types.int64), codegen


# A tile is (weight pointer, byte address of the weights to fetch ahead or 0, scales, dim); `out` points at its first output.


@fast
def _fetch(tile, first, end):
    """Ask for the cache lines of bytes [first, end) of the next tile."""
    if tile[1] != 0:
        for at in range(first, end, LINE):
            prefetch(tile[1] + at)


@fast
def _one_row(x, tile, out):
    weight, scale, dim = tile[0], tile[2], tile[3]
    zero = vsplat(types.float32(0.0))
    a0, a1, a2, a3, a4, a5, a6, a7 = zero, zero, zero, zero, zero, zero, zero, zero
    for d in range(0, dim, WIDTH):
        _fetch(tile, 8 * d, 8 * (d + WIDTH))
        p = vload(x, d)
        a0 = vfma(p, vload_i8(weight, d), a0)
        a1 = vfma(p, vload_i8(weight, dim + d), a1)
        a2 = vfma(p, vload_i8(weight, 2 * dim + d), a2)
        a3 = vfma(p, vload_i8(weight, 3 * dim + d), a3)
        a4 = vfma(p, vload_i8(weight, 4 * dim + d), a4)
        a5 = vfma(p, vload_i8(weight, 5 * dim + d), a5)
        a6 = vfma(p, vload_i8(weight, 6 * dim + d), a6)
        a7 = vfma(p, vload_i8(weight, 7 * dim + d), a7)
    vstore_sums4(out, 0, a0, a1, a2, a3)
    vstore_sums4(out, 4, a4, a5, a6, a7)
    for i in range(TILE):
        out[i] *= scale[i]


@fast
def _two_rows(x, tile, out, stride):
    weight, scale, dim = tile[0], tile[2], tile[3]
    for n in range(0, TILE, 4):
        zero = vsplat(types.float32(0.0))
        a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
        for d in range(0, dim, WIDTH):
            _fetch(tile, n * dim + 4 * d, n * dim + 4 * (d + WIDTH))
            p, q = vload(x, d), vload(x, dim + d)
            at = n * dim + d
            w = vload_i8(weight, at)
            a0, b0 = vfma(p, w, a0), vfma(q, w, b0)
            w = vload_i8(weight, at + dim)
            a1, b1 = vfma(p, w, a1), vfma(q, w, b1)
            w = vload_i8(weight, at + 2 * dim)
            a2, b2 = vfma(p, w, a2), vfma(q, w, b2)
            w = vload_i8(weight, at + 3 * dim)
            a3, b3 = vfma(p, w, a3), vfma(q, w, b3)
        vstore_sums4(out, n, a0, a1, a2, a3)
        vstore_sums4(out, stride + n, b0, b1, b2, b3)
        for i in range(n, n + 4):
            out[i] *= scale[i]
            out[stride + i] *= scale[i]


@fast
def _four_rows(x, tile, out, stride):
    """Widening costs as much as multiplying, so four rows share each widened vector."""
    weight, scale, dim = tile[0], tile[2], tile[3]
    for n in range(0, TILE, 2):
        zero = vsplat(types.float32(0.0))
        a0, a1, b0, b1, c0, c1, e0, e1 = zero, zero, zero, zero, zero, zero, zero, zero
        for d in range(0, dim, WIDTH):
            _fetch(tile, n * dim + 2 * d, n * dim + 2 * (d + WIDTH))
            v, w = vload_i8(weight, n * dim + d), vload_i8(weight, (n + 1) * dim + d)
            p = vload(x, d)
            a0, a1 = vfma(p, v, a0), vfma(p, w, a1)
            p = vload(x, dim + d)
            b0, b1 = vfma(p, v, b0), vfma(p, w, b1)
            p = vload(x, 2 * dim + d)
            c0, c1 = vfma(p, v, c0), vfma(p, w, c1)
            p = vload(x, 3 * dim + d)
            e0, e1 = vfma(p, v, e0), vfma(p, w, e1)
        s, t = scale[n], scale[n + 1]
        out[n], out[n + 1] = vreduce_add(a0) * s, vreduce_add(a1) * t
        out[stride + n], out[stride + n + 1] = vreduce_add(b0) * s, vreduce_add(b1) * t
        out[2 * stride + n], out[2 * stride + n + 1] = vreduce_add(c0) * s, vreduce_add(c1) * t
        out[3 * stride + n], out[3 * stride + n + 1] = vreduce_add(e0) * s, vreduce_add(e1) * t


@fast
def _tile(args, n):
    """Outputs [n, n + TILE) of all rows; the first rows fetch the next tile."""
    outputs, dim, rows = args[I_OUTPUTS], args[I_DIM], args[I_ROWS]
    at = args[I_WEIGHT] + n * dim
    weight, scale, ahead = u8_ptr(at), f32_ptr(args[I_SCALE] + 4 * n), at + TILE * dim
    r = 0
    while r < rows:
        x, out = f32_ptr(args[I_X] + 4 * r * dim), f32_ptr(args[I_OUT] + 4 * (r * outputs + n))
        tile = (weight, ahead if r == 0 else 0, scale, dim)
        if rows - r >= 4:
            _four_rows(x, tile, out, outputs)
            r += 4
        elif rows - r >= 2:
            _two_rows(x, tile, out, outputs)
            r += 2
        else:
            _one_row(x, tile, out)
            r += 1


def build_int8_linear(cache: bool, stamp: int) -> Any:
    """Fields after the common three: rows; float32 x [rows, dim], int8 weight [outputs, dim], float32 scale [outputs] and
    out [rows, outputs], contiguous; dim. ``outputs`` is a multiple of TILE and ``dim`` one of DIM_STEP."""

    def int8_linear(args):
        outputs = args[I_OUTPUTS]
        first = fetch_add(args, I_COUNTER) * OUTPUTS
        while first < outputs:
            for n in range(first, min(first + OUTPUTS, outputs), TILE):
                _tile(args, n)
            first = fetch_add(args, I_COUNTER) * OUTPUTS
        args[I_STAMP] = stamp

    return cfunc(types.void(types.CPointer(types.int64)), cache=cache, nopython=True)(int8_linear)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 weight [outputs, dim] and float32 scale [outputs] of a floating-point weight."""
    weight = weight.float()
    scale = weight.abs().amax(1).div_(127)
    # an output whose weights are all zero stays zero with any scale
    scale.masked_fill_(scale == 0, 1.0)
    return (weight / scale[:, None]).round_().to(torch.int8), scale


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x @ (weight * scale).T in float32; x [..., dim] of any float dtype, weight and scale as ``quantize`` returns them."""
    outputs, dim = weight.shape
    x = x.float().contiguous()
    if outputs % TILE or dim % DIM_STEP:
        return F.linear(x, weight.float()).mul_(scale)
    out = tape.empty(*x.shape[:-1], outputs)
    block = (ctypes.c_int64 * 9)(
        *(0, outputs, 0, x.numel() // dim),
        *(x.data_ptr(), weight.data_ptr(), scale.data_ptr(), out.data_ptr(), dim),
    )
    tape.launch(compiled(build_int8_linear), block, torch.get_num_threads())
    return out
