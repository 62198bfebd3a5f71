"""x @ weight.T for a few rows of x: what decoding and verification spend most of their time on.

General matrix libraries repack their operands and keep to one thread for a single row. For a few rows
the product is one pass over the weights, so this kernel streams them in order, fetching ahead, and keeps all rows
of x in cache.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, types

from rapid_sgl.platform.kernels_block import fast
from rapid_sgl.platform.kernels_layout import LINE
from rapid_sgl.platform.kernels_simd import (
    WIDTH,
    f32_ptr,
    fetch_add,
    prefetch,
    vfma,
    vload,
    vsplat,
    vstore_sums4,
)

OUTPUTS = 16  # outputs (rows of the weight) that a thread claims at a time
L_COUNTER, L_OUTPUTS, L_STAMP, L_ROWS, L_X, L_WEIGHT, L_OUT, L_DIM = range(8)


@fast
def _four_outputs(x, rows, weight, ahead, out, n_outputs, dim):
    """out[r, 0:4] = x[r] . weight[0:4] for all rows, two at a time; asks for the next four rows of the weight."""
    step = LINE // 4
    for r in range(0, rows, 2):
        r1 = min(r + 1, rows - 1)
        zero = vsplat(types.float32(0.0))
        a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
        for start in range(0, dim, step):
            if r == 0:
                prefetch(ahead + 4 * start)
                prefetch(ahead + 4 * (dim + start))
                prefetch(ahead + 4 * (2 * dim + start))
                prefetch(ahead + 4 * (3 * dim + start))
            for d in range(start, start + step, WIDTH):
                p, q = vload(x, r * dim + d), vload(x, r1 * dim + d)
                w = vload(weight, d)
                a0, b0 = vfma(p, w, a0), vfma(q, w, b0)
                w = vload(weight, dim + d)
                a1, b1 = vfma(p, w, a1), vfma(q, w, b1)
                w = vload(weight, 2 * dim + d)
                a2, b2 = vfma(p, w, a2), vfma(q, w, b2)
                w = vload(weight, 3 * dim + d)
                a3, b3 = vfma(p, w, a3), vfma(q, w, b3)
        vstore_sums4(out, r * n_outputs, a0, a1, a2, a3)
        vstore_sums4(out, r1 * n_outputs, b0, b1, b2, b3)


def build_linear(cache: bool, stamp: int) -> Any:
    """Fields after the common three: rows; x [rows, dim], weight [outputs, dim], out [rows, outputs], contiguous
    float32; dim. ``outputs`` is a multiple of 4 and ``dim`` one of a cache line (16 floats)."""

    def linear(args):
        outputs, dim = args[L_OUTPUTS], args[L_DIM]
        first = fetch_add(args, L_COUNTER) * OUTPUTS
        while first < outputs:
            for n in range(first, min(first + OUTPUTS, outputs), 4):
                weight = args[L_WEIGHT] + 4 * n * dim
                out = f32_ptr(args[L_OUT] + 4 * n)
                _four_outputs(
                    f32_ptr(args[L_X]), args[L_ROWS], f32_ptr(weight), weight + 16 * dim, out, outputs, dim
                )
            first = fetch_add(args, L_COUNTER) * OUTPUTS
        args[L_STAMP] = stamp

    return cfunc(types.void(types.CPointer(types.int64)), cache=cache, nopython=True)(linear)
