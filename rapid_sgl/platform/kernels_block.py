"""What attention does with one block of keys: scores, hiding, softmax, weighted sum. Inlined into ``kernels``."""

from __future__ import annotations

from numba import njit, types

from rapid_sgl.platform.kernels_layout import (
    A_GROUP,
    A_MASK,
    A_WINDOW,
    BLOCK,
    LINE,
    NEG,
    P_MASK,
    P_MFROM,
    P_MSTRIDE,
    P_NQ,
    P_POS,
)
from rapid_sgl.platform.kernels_simd import (
    WIDTH,
    bits_f32,
    exp2f,
    f32_ptr,
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

fast = njit(forceinline=True, nogil=True, error_model="numpy")

# A side of the cache (K or V) is a tuple (address, pointer, base, stride, direct, dim, dim_pad, itemsize): `address` of the
# pool buffer; `base` of the head and `stride` of a slot in it, in elements; `pointer` to float32 rows, which is the pool
# itself where `direct` holds and else scratch of dim_pad floats a row.


@fast
def row(side, slots, t):
    """Where row t of the block starts behind the side's pointer."""
    if side[4]:
        return side[2] + types.int64(slots[t]) * side[3]
    return t * side[6]


@fast
def fetch_rows(side, slots, first, end):
    """Ask for the cache lines of rows [first, end), which a later phase reads.

    Rows lie in any order, which the CPU's own prefetcher cannot guess; even in order this was 1.5 times faster.
    """
    for t in range(first, end):
        at = side[0] + (side[2] + types.int64(slots[t]) * side[3]) * side[7]
        for line in range(0, side[5] * side[7], LINE):
            prefetch(at + line)


@fast
def widen(side, slots, n, bf16):
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
def scores(qs, rows, keys, values, slots, n, following, s):
    """s[r, t] = qs[r] . k[t] for four keys and two rows at a time; the odd row and keys are computed twice.

    Meanwhile fetches the values of this block and the `following` keys of the next one.
    """
    k, dim_pad = keys[1], keys[6]
    for t in range(0, n, 4):
        fetch_rows(values, slots, t, min(t + 4, n))
        fetch_rows(keys, slots, n + t, n + min(t + 4, following))
        k0 = row(keys, slots, t)
        k1 = row(keys, slots, min(t + 1, n - 1))
        k2 = row(keys, slots, min(t + 2, n - 1))
        k3 = row(keys, slots, min(t + 3, n - 1))
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
def soft_cap(s, rows, n, cap):
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
def hide(args, part, s, t0, n):
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
def softmax_step(s, rows, n, m, total, acc, v_pad):
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
def weigh(s, rows, values, slots, n, acc):
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
                at = row(values, slots, t) + d
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
                value = vload(v, row(values, slots, t) + d)
                a0 = vfma(vsplat(s[r * BLOCK + t]), value, a0)
                b0 = vfma(vsplat(s[r1 * BLOCK + t]), value, b0)
            vstore(acc, r * v_pad + d, a0)
            vstore(acc, r1 * v_pad + d, b0)
