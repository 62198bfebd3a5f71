"""Shared by the attention kernels and their callers: sizes, and the fields of argument block and parts."""

from __future__ import annotations

from rapid_sgl.platform.kernels_simd import WIDTH

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


def padded(dim: int) -> int:
    """`dim` rounded up to whole vectors."""
    return -(-dim // WIDTH) * WIDTH


def scratch_floats(qk_dim: int, v_dim: int) -> int:
    """float32 of scratch that one thread needs."""
    dk, dv = padded(qk_dim), padded(v_dim)
    return MAX_ROWS * (dk + dv + BLOCK + 2) + BLOCK * (dk + dv)
