"""Paged attention for a CPU: flash-decoding over row tables, compiled by numba, run on torch's own threads.

Scores and sums are float32. Every query sees its keys in blocks of ``BLOCK`` counted from the start of its row, so
a result hardly depends on how the work was cut. Keys and values are read where they lie, through the
row table; nothing is gathered first (bfloat16 blocks are widened into scratch that stays in the L1 cache).

The two entry points take one pointer to an int64 argument block; ``kernels_launch`` runs ``attend`` on all threads
at once. Work arrives as *parts*, grouped into chunks that threads claim one by one.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, types

from rapid_sgl.platform.kernels_block import fast, hide, scores, soft_cap, softmax_step, weigh, widen
from rapid_sgl.platform.kernels_layout import (
    A_BUILD,
    A_CAP,
    A_CHUNK,
    A_CHUNKS,
    A_GROUP,
    A_K,
    A_KHS,
    A_KSS,
    A_MERGES,
    A_NCHUNKS,
    A_NMERGES,
    A_OS,
    A_OUT,
    A_PARTIAL,
    A_PARTIAL_STRIDE,
    A_PARTS,
    A_Q,
    A_QS,
    A_SCALE,
    A_SCRATCH,
    A_SCRATCH_STRIDE,
    A_TABLE,
    A_THREAD,
    A_V,
    A_VHS,
    A_VSS,
    A_WINDOW,
    BLOCK,
    MAX_ROWS,
    MERGE_FIELDS,
    NEG,
    P_HEAD,
    P_HI,
    P_LO,
    P_MASK,
    P_MFROM,
    P_NQ,
    P_PARTIAL,
    P_POS,
    P_ROW,
    P_TOKEN,
    PART_FIELDS,
    padded,
)
from rapid_sgl.platform.kernels_simd import (
    WIDTH,
    bits_f32,
    exp2f,
    f32_ptr,
    fetch_add,
    i32_ptr,
    i64_ptr,
    vsplat,
    vstore,
)


@fast
def _load_queries(args, part, qs, dim, dim_pad):
    """Copy the part's query rows, scaled to base-2 logits and zero-padded, into qs [rows, dim_pad]."""
    q = f32_ptr(args[A_Q])
    group = args[A_GROUP]
    scale = bits_f32(args[A_SCALE])
    for i in range(part[P_NQ]):
        for g in range(group):
            src = (part[P_TOKEN] + i) * args[A_QS] + (part[P_HEAD] * group + g) * dim
            dst = (i * group + g) * dim_pad
            for d in range(dim):
                qs[dst + d] = q[src + d] * scale
            for d in range(dim, dim_pad):
                qs[dst + d] = types.float32(0.0)


@fast
def _finish(args, part, m, total, acc, rows, v_dim, v_pad):
    """Write the part's rows: normalised to the output, or with their sums to the partial results."""
    group = args[A_GROUP]
    if part[P_PARTIAL] < 0:
        out = f32_ptr(args[A_OUT])
        for r in range(rows):
            to = (part[P_TOKEN] + r // group) * args[A_OS] + (part[P_HEAD] * group + r % group) * v_dim
            inv = types.float32(1.0) / total[r] if total[r] > 0 else types.float32(0.0)
            for d in range(v_dim):
                out[to + d] = acc[r * v_pad + d] * inv
        return
    partial = f32_ptr(args[A_PARTIAL])
    for r in range(rows):
        to = part[P_PARTIAL] * args[A_PARTIAL_STRIDE] + r * (v_dim + 2)
        partial[to] = m[r]
        partial[to + 1] = total[r]
        for d in range(v_dim):
            partial[to + 2 + d] = acc[r * v_pad + d]


@fast
def _run_part(args, part, scratch, dk, dv, dk_pad, dv_pad, bf16):
    """Attention of one part: n_queries x group rows of one KV head over keys [key_lo, key_hi)."""
    rows = part[P_NQ] * args[A_GROUP]
    qs = f32_ptr(scratch)
    acc = f32_ptr(scratch + 4 * MAX_ROWS * dk_pad)
    s = f32_ptr(scratch + 4 * MAX_ROWS * (dk_pad + dv_pad))
    m = f32_ptr(scratch + 4 * MAX_ROWS * (dk_pad + dv_pad + BLOCK))
    total = f32_ptr(scratch + 4 * MAX_ROWS * (dk_pad + dv_pad + BLOCK + 1))
    wide_k = f32_ptr(scratch + 4 * MAX_ROWS * (dk_pad + dv_pad + BLOCK + 2))
    wide_v = f32_ptr(scratch + 4 * (MAX_ROWS * (dk_pad + dv_pad + BLOCK + 2) + BLOCK * dk_pad))
    k_direct, v_direct = not bf16 and dk == dk_pad, not bf16 and dv == dv_pad
    k = f32_ptr(args[A_K]) if k_direct else wide_k
    v = f32_ptr(args[A_V]) if v_direct else wide_v
    itemsize = 2 if bf16 else 4
    keys = (args[A_K], k, part[P_HEAD] * args[A_KHS], args[A_KSS], k_direct, dk, dk_pad, itemsize)
    values = (args[A_V], v, part[P_HEAD] * args[A_VHS], args[A_VSS], v_direct, dv, dv_pad, itemsize)
    cap = bits_f32(args[A_CAP])
    window = args[A_WINDOW]

    _load_queries(args, part, qs, dk, dk_pad)
    for r in range(rows):
        m[r] = types.float32(NEG)
        total[r] = types.float32(0.0)
    for i in range(0, rows * dv_pad, WIDTH):
        vstore(acc, i, vsplat(types.float32(0.0)))
    last_pos = part[P_POS] + part[P_NQ] - 1
    for t0 in range(part[P_LO], part[P_HI], BLOCK):
        n = min(BLOCK, part[P_HI] - t0)
        slots = i32_ptr(args[A_TABLE] + 4 * (part[P_ROW] + t0))
        if not k_direct:
            widen(keys, slots, n, bf16)
        end = t0 + n
        scores(qs, rows, keys, values, slots, n, min(BLOCK, part[P_HI] - end), s)
        if cap > 0:
            soft_cap(s, rows, n, cap)
        below = end - 1 <= part[P_POS] and (part[P_MASK] < 0 or end <= part[P_MFROM])
        if not below or (window >= 0 and t0 < last_pos - window):
            hide(args, part, s, t0, n)
        softmax_step(s, rows, n, m, total, acc, dv_pad)
        if not v_direct:
            widen(values, slots, n, bf16)
        weigh(s, rows, values, slots, n, acc)
    _finish(args, part, m, total, acc, rows, dv, dv_pad)


def build_attend(qk_dim: int, v_dim: int, bf16: bool, cache: bool, stamp: int) -> Any:
    """Compile ``attend(args*)`` for one head shape.

    Sizes become constants of the machine code. The closure holds integers only: numba's disk cache keys on
    the pickled closure, and a compiled function inside it would never match again. ``stamp`` identifies the source of
    what this module imports, of which numba's cache takes no notice.
    """
    dk, dv, dk_pad, dv_pad = qk_dim, v_dim, padded(qk_dim), padded(v_dim)

    def attend(args):
        thread = fetch_add(args, A_THREAD)
        scratch = args[A_SCRATCH] + thread * args[A_SCRATCH_STRIDE]
        chunks = i64_ptr(args[A_CHUNKS])
        chunk = fetch_add(args, A_CHUNK)
        while chunk < args[A_NCHUNKS]:
            for index in range(chunks[chunk], chunks[chunk + 1]):
                part = i64_ptr(args[A_PARTS] + 8 * index * PART_FIELDS)
                _run_part(args, part, scratch, dk, dv, dk_pad, dv_pad, bf16)
            chunk = fetch_add(args, A_CHUNK)
        args[A_BUILD] = stamp

    return cfunc(types.void(types.CPointer(types.int64)), cache=cache, nopython=True)(attend)


def build_merge(v_dim: int, cache: bool, stamp: int) -> Any:
    """Compile ``merge(args*)``: combine the partial results of every (request, head) that was cut in several."""
    dv = v_dim

    def merge(args):
        partial = f32_ptr(args[A_PARTIAL])
        out = f32_ptr(args[A_OUT])
        merges = i64_ptr(args[A_MERGES])
        group = args[A_GROUP]
        for j in range(args[A_NMERGES]):
            first, count = merges[j * MERGE_FIELDS], merges[j * MERGE_FIELDS + 1]
            part = i64_ptr(args[A_PARTS] + 8 * first * PART_FIELDS)
            for r in range(part[P_NQ] * group):
                step = args[A_PARTIAL_STRIDE]
                start = part[P_PARTIAL] * step + r * (dv + 2)
                best = types.float32(NEG)
                for c in range(count):
                    best = max(best, partial[start + c * step])
                total = types.float32(0.0)
                to = (part[P_TOKEN] + r // group) * args[A_OS] + (part[P_HEAD] * group + r % group) * dv
                for d in range(dv):
                    out[to + d] = types.float32(0.0)
                for c in range(count):
                    at = start + c * step
                    weight = exp2f(partial[at] - best)
                    total += weight * partial[at + 1]
                    for d in range(dv):
                        out[to + d] += weight * partial[at + 2 + d]
                inv = types.float32(1.0) / total if total > 0 else types.float32(0.0)
                for d in range(dv):
                    out[to + d] *= inv
        args[A_BUILD] = stamp

    return cfunc(types.void(types.CPointer(types.int64)), cache=cache, nopython=True)(merge)
