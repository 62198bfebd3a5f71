"""Paged attention for a CPU: flash-decoding over row tables, compiled by numba, run on torch's own threads.

Scores and sums are float32. Every query sees its keys in blocks of ``BLOCK`` counted from the start of its row, so
a result hardly depends on how the work was cut. Keys and values are read where they lie, through the
row table; nothing is gathered first (bfloat16 blocks are widened into scratch that stays in the L1 cache).

The two entry points take one pointer to an int64 argument block; ``kernels_launch`` runs ``attend`` on all threads
at once. Work arrives as *parts*, grouped into chunks that threads claim one by one.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit, types

from rapid_sgl.platform.kernels_simd import (
    WIDTH,
    bits_f32,
    exp2f,
    f32_ptr,
    fetch_add,
    i32_ptr,
    i64_ptr,
    prefetch,
    u8_ptr,
    u16_ptr,
    vadd,
    vdiv,
    vexp2,
    vfma,
    vload,
    vload_bf16,
    vmax,
    vmul,
    vreduce_add,
    vreduce_max,
    vsplat,
    vstore,
    vstore_sums4,
    vsub,
)

BLOCK = 64  # keys per step: K and V of a step fit the L1 cache at head size 64
MAX_ROWS = 64  # query rows (queries x heads of a group) of one part; more rows are cut into several parts
LINE = 64  # bytes of a cache line
NEG = -3.0e38  # a score that is masked out; finite, so that differences never are NaN

# The int64 argument block. Strides are in elements; addresses in bytes.
(
    A_THREAD,  # counter: threads that have started
    A_CHUNK,  # counter: chunks that are claimed
    A_NCHUNKS,
    A_CHUNKS,  # address: int64 [n_chunks + 1], bounds into the parts
    A_PARTS,  # address: int64 [n_parts, PART_FIELDS]
    A_Q,  # addresses: float32 queries and output, [token, head, dim]
    A_OUT,
    A_K,  # addresses: pool buffers
    A_V,
    A_QS,  # stride of a token in q and out
    A_OS,
    A_KHS,  # strides of a head and a slot in k and v
    A_KSS,
    A_VHS,
    A_VSS,
    A_TABLE,  # address: int32 row table
    A_GROUP,  # query heads per KV head
    A_SCALE,  # float32 bits: logit scale * log2(e)
    A_CAP,  # float32 bits: soft cap of the logits, 0 for none
    A_WINDOW,  # keys before a query that it sees, -1 for all
    A_MASK,  # address: uint8 tree masks
    A_SCRATCH,  # address and bytes per thread
    A_SCRATCH_STRIDE,
    A_PARTIAL,  # address and floats per partial result
    A_PARTIAL_STRIDE,
    A_MERGES,  # address: int64 [n_merges, MERGE_FIELDS]
    A_NMERGES,
    A_BUILD,  # written by the kernel: the `stamp` that it was compiled with
) = range(28)
ARG_FIELDS = A_BUILD + 1

# Fields of one part. Positions and keys count from the start of the row.
(
    P_ROW,  # offset of the row in the table
    P_TOKEN,  # first query among all tokens
    P_NQ,
    P_HEAD,  # KV head
    P_LO,  # keys [P_LO, P_HI)
    P_HI,
    P_POS,  # position of the first query
    P_MASK,  # offset of its first query's tree mask, -1 where queries form a chain
    P_MSTRIDE,
    P_MFROM,  # first key that the mask covers
    P_PARTIAL,  # index among the partial results, -1 where the part is all there is
) = range(11)
PART_FIELDS = P_PARTIAL + 1
MERGE_FIELDS = 2  # index of the first part, number of parts; their rows lie next to each other in `partial`

fast = njit(forceinline=True, nogil=True, error_model="numpy")


def padded(dim: int) -> int:
    """`dim` rounded up to whole vectors."""
    return -(-dim // WIDTH) * WIDTH


def scratch_floats(qk_dim: int, v_dim: int) -> int:
    """float32 of scratch that one thread needs."""
    dk, dv = padded(qk_dim), padded(v_dim)
    return MAX_ROWS * (dk + dv + BLOCK + 2) + BLOCK * (dk + dv)


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


# A side of the cache (K or V) is a tuple (address, pointer, base, stride, direct, dim, dim_pad, itemsize): `address` of the
# pool buffer; `base` of the head and `stride` of a slot in it, in elements; `pointer` to float32 rows, which is the pool
# itself where `direct` holds and else scratch of dim_pad floats a row.


@fast
def _row(side, slots, t):
    """Where row t of the block starts behind the side's pointer."""
    if side[4]:
        return side[2] + types.int64(slots[t]) * side[3]
    return t * side[6]


@fast
def _fetch_rows(side, slots, first, end):
    """Ask for the cache lines of rows [first, end), which a later phase reads.

    Rows lie in any order, which the CPU's own prefetcher cannot guess; even in order this was 1.5 times faster.
    """
    for t in range(first, end):
        at = side[0] + (side[2] + types.int64(slots[t]) * side[3]) * side[7]
        for line in range(0, side[5] * side[7], LINE):
            prefetch(at + line)


@fast
def _widen(side, slots, n, bf16):
    """Copy n rows to the side's scratch as float32, padded with zeros to whole vectors."""
    dst, dim, dim_pad = side[1], side[5], side[6]
    if bf16:
        raw = u16_ptr(side[0])
    else:
        full = f32_ptr(side[0])
    whole = dim // WIDTH * WIDTH
    for t in range(n):
        at = side[2] + types.int64(slots[t]) * side[3]
        to = t * dim_pad
        for d in range(0, whole, WIDTH):
            if bf16:
                vstore(dst, to + d, vload_bf16(raw, at + d))
            else:
                vstore(dst, to + d, vload(full, at + d))
        for d in range(whole, dim):
            if bf16:
                dst[to + d] = bits_f32(types.int64(raw[at + d]) << 16)
            else:
                dst[to + d] = full[at + d]
        for d in range(dim, dim_pad):
            dst[to + d] = types.float32(0.0)


@fast
def _scores(qs, rows, keys, values, slots, n, following, s):
    """s[r, t] = qs[r] . k[t] for four keys and two rows at a time; the odd row and keys are computed twice.

    Meanwhile fetches the values of this block and the `following` keys of the next one.
    """
    k, dim_pad = keys[1], keys[6]
    for t in range(0, n, 4):
        _fetch_rows(values, slots, t, min(t + 4, n))
        _fetch_rows(keys, slots, n + t, n + min(t + 4, following))
        k0 = _row(keys, slots, t)
        k1 = _row(keys, slots, min(t + 1, n - 1))
        k2 = _row(keys, slots, min(t + 2, n - 1))
        k3 = _row(keys, slots, min(t + 3, n - 1))
        for r in range(0, rows, 2):
            r1 = min(r + 1, rows - 1)
            zero = vsplat(types.float32(0.0))
            a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
            for d in range(0, dim_pad, WIDTH):
                x, y = vload(qs, r * dim_pad + d), vload(qs, r1 * dim_pad + d)
                key = vload(k, k0 + d)
                a0, b0 = vfma(x, key, a0), vfma(y, key, b0)
                key = vload(k, k1 + d)
                a1, b1 = vfma(x, key, a1), vfma(y, key, b1)
                key = vload(k, k2 + d)
                a2, b2 = vfma(x, key, a2), vfma(y, key, b2)
                key = vload(k, k3 + d)
                a3, b3 = vfma(x, key, a3), vfma(y, key, b3)
            vstore_sums4(s, r * BLOCK + t, a0, a1, a2, a3)
            vstore_sums4(s, r1 * BLOCK + t, b0, b1, b2, b3)


@fast
def _soft_cap(s, rows, n, cap):
    """s = cap * tanh(s / cap) in base-2 logits: tanh(x) = 1 - 2 / (exp(2x) + 1)."""
    log2e = types.float32(1.4426950408889634)
    one, two = vsplat(types.float32(1.0)), vsplat(types.float32(2.0))
    full = vsplat(cap * log2e)
    # exp(2x / cap) as a power of two, for x = s / log2e
    rate = vsplat(types.float32(2.0) / cap)
    for r in range(rows):
        for t in range(0, n, WIDTH):
            at = r * BLOCK + t
            grown = vexp2(vmul(vload(s, at), rate))
            vstore(s, at, vmul(full, vsub(one, vdiv(two, vadd(grown, one)))))


@fast
def _hide(args, part, s, t0, n):
    """Overwrite with NEG the scores that a query must not see: after it, outside its window, off its tree."""
    group = args[A_GROUP]
    window = args[A_WINDOW]
    mask = u8_ptr(args[A_MASK])
    for i in range(part[P_NQ]):
        position = part[P_POS] + i
        low = position - window if window >= 0 else 0
        for t in range(n):
            key = t0 + t
            if part[P_MASK] >= 0 and key >= part[P_MFROM]:
                seen = mask[part[P_MASK] + i * part[P_MSTRIDE] + key - part[P_MFROM]] != 0
            else:
                seen = key <= position
            if not seen or key < low:
                for g in range(group):
                    s[(i * group + g) * BLOCK + t] = types.float32(NEG)


@fast
def _softmax_step(s, rows, n, m, total, acc, v_pad):
    """Turn scores into weights relative to the running maximum m, rescaling what was summed so far."""
    neg = types.float32(NEG)
    top = -(-n // WIDTH) * WIDTH
    for r in range(rows):
        at = r * BLOCK
        for t in range(n, top):
            s[at + t] = neg
        best = vload(s, at)
        for t in range(WIDTH, top, WIDTH):
            best = vmax(best, vload(s, at + t))
        new = max(m[r], vreduce_max(best))
        # All keys so far hidden: weights must be 0, not exp(NEG - NEG) = 1.
        shift = vsplat(new if new > neg else types.float32(0.0))
        summed = vsplat(types.float32(0.0))
        for t in range(0, top, WIDTH):
            weight = vexp2(vsub(vload(s, at + t), shift))
            vstore(s, at + t, weight)
            summed = vadd(summed, weight)
        if new > m[r]:
            shrink = exp2f(m[r] - new)
            total[r] *= shrink
            by = vsplat(shrink)
            for d in range(0, v_pad, WIDTH):
                vstore(acc, r * v_pad + d, vmul(vload(acc, r * v_pad + d), by))
            m[r] = new
        total[r] += vreduce_add(summed)


@fast
def _weigh(s, rows, values, slots, n, acc):
    """acc[r] += sum_t s[r, t] v[t]; two rows and up to four vectors stay in registers over the whole block."""
    v, v_pad = values[1], values[6]
    for r in range(0, rows, 2):
        r1 = min(r + 1, rows - 1)
        for d in range(0, v_pad - 3 * WIDTH, 4 * WIDTH):
            x, y = r * v_pad + d, r1 * v_pad + d
            a0, a1 = vload(acc, x), vload(acc, x + WIDTH)
            a2, a3 = vload(acc, x + 2 * WIDTH), vload(acc, x + 3 * WIDTH)
            b0, b1 = vload(acc, y), vload(acc, y + WIDTH)
            b2, b3 = vload(acc, y + 2 * WIDTH), vload(acc, y + 3 * WIDTH)
            for t in range(n):
                at = _row(values, slots, t) + d
                p, w = vsplat(s[r * BLOCK + t]), vsplat(s[r1 * BLOCK + t])
                value = vload(v, at)
                a0, b0 = vfma(p, value, a0), vfma(w, value, b0)
                value = vload(v, at + WIDTH)
                a1, b1 = vfma(p, value, a1), vfma(w, value, b1)
                value = vload(v, at + 2 * WIDTH)
                a2, b2 = vfma(p, value, a2), vfma(w, value, b2)
                value = vload(v, at + 3 * WIDTH)
                a3, b3 = vfma(p, value, a3), vfma(w, value, b3)
            vstore(acc, x, a0)
            vstore(acc, x + WIDTH, a1)
            vstore(acc, x + 2 * WIDTH, a2)
            vstore(acc, x + 3 * WIDTH, a3)
            vstore(acc, y, b0)
            vstore(acc, y + WIDTH, b1)
            vstore(acc, y + 2 * WIDTH, b2)
            vstore(acc, y + 3 * WIDTH, b3)
        for d in range(v_pad // (4 * WIDTH) * 4 * WIDTH, v_pad, WIDTH):
            a0, b0 = vload(acc, r * v_pad + d), vload(acc, r1 * v_pad + d)
            for t in range(n):
                value = vload(v, _row(values, slots, t) + d)
                a0 = vfma(vsplat(s[r * BLOCK + t]), value, a0)
                b0 = vfma(vsplat(s[r1 * BLOCK + t]), value, b0)
            vstore(acc, r * v_pad + d, a0)
            vstore(acc, r1 * v_pad + d, b0)


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
            _widen(keys, slots, n, bf16)
        end = t0 + n
        _scores(qs, rows, keys, values, slots, n, min(BLOCK, part[P_HI] - end), s)
        if cap > 0:
            _soft_cap(s, rows, n, cap)
        below = end - 1 <= part[P_POS] and (part[P_MASK] < 0 or end <= part[P_MFROM])
        if not below or (window >= 0 and t0 < last_pos - window):
            _hide(args, part, s, t0, n)
        _softmax_step(s, rows, n, m, total, acc, dv_pad)
        if not v_direct:
            _widen(values, slots, n, bf16)
        _weigh(s, rows, values, slots, n, acc)
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
