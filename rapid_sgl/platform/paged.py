"""Launch attention over paged keys and values: fills the kernels' argument block from tensors and a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rapid_sgl.platform import kernels, tape
from rapid_sgl.platform import kernels_layout as layout
from rapid_sgl.platform.kernels_launch import compiled, float_bits
from rapid_sgl.platform.kernels_plan import Plan

# What depends on the plan, on its mask and on where the scratch lies; the rest depends on the layer.
_PLAN_FIELDS = np.array(
    [layout.A_NCHUNKS, layout.A_CHUNKS, layout.A_PARTS, *range(layout.A_MASK, layout.A_NMERGES + 1)]
)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class PagedAttention:
    """Attention over paged keys and values; owns its scratch, so one instance serves one thread at a time."""

    def __init__(self) -> None:
        self._args = np.zeros(layout.ARG_FIELDS, np.int64)
        self._scratch = np.empty(0, np.float32)
        self._partial = np.empty(0, np.float32)
        self._pointed: tuple[Any, ...] = (None,)

    def _point(self, plan: Plan, group: int, qk_dim: int, v_dim: int) -> int:
        """Point the argument block at a plan and at enough scratch; returns the threads to use."""
        threads = max(1, min(torch.get_num_threads(), plan.n_chunks))
        # The plan itself is part of the key, and so kept: its arrays must outlive the addresses.
        key = (plan, group, qk_dim, v_dim, threads)
        if self._pointed[0] is not plan or self._pointed != key:
            self._fill(*key)
            self._pointed = key
        return threads

    def _fill(self, plan: Plan, group: int, qk_dim: int, v_dim: int, threads: int) -> None:
        per_thread = layout.scratch_floats(qk_dim, v_dim)
        if self._scratch.size < per_thread * threads:
            self._scratch = np.empty(per_thread * threads, np.float32)
        per_partial = layout.MAX_ROWS * (v_dim + 2)
        if self._partial.size < per_partial * plan.n_partials:
            self._partial = np.empty(per_partial * plan.n_partials, np.float32)
        args = self._args
        args[layout.A_NCHUNKS] = plan.n_chunks
        args[layout.A_CHUNKS] = _address(plan.chunks)
        args[layout.A_PARTS] = _address(plan.parts)
        args[layout.A_GROUP] = group
        args[layout.A_SCRATCH] = _address(self._scratch)
        args[layout.A_SCRATCH_STRIDE] = 4 * per_thread
        args[layout.A_PARTIAL] = _address(self._partial)
        args[layout.A_PARTIAL_STRIDE] = per_partial
        args[layout.A_MERGES] = _address(plan.merges)
        args[layout.A_NMERGES] = len(plan.merges)

    def retarget(
        self,
        recorded: tape.Tape,
        rows: np.ndarray,
        plan: Plan,
        group: int,
        qk_dim: int,
        v_dim: int,
        mask: np.ndarray | None,
    ) -> None:
        """Let recorded launches of ``run``, which come in pairs, follow another plan and mask."""
        threads = self._point(plan, group, qk_dim, v_dim)
        self._args[layout.A_MASK] = _address(mask) if mask is not None else 0
        recorded.blocks[rows[:, None], _PLAN_FIELDS] = self._args[_PLAN_FIELDS]
        recorded.threads[rows[0::2]] = threads
        recorded.threads[rows[1::2]] = int(len(plan.merges) > 0)

    def run(
        self,
        plan: Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        table: torch.Tensor,
        *,
        scale: float,
        cap: float = 0.0,
        window: int = -1,
        mask: np.ndarray | None = None,
    ) -> None:
        """Fill ``out`` with softmax(cap(q·k·scale))·v for the plan's queries.

        q float32 [tokens, q_heads, qk_dim] and out float32 [tokens, q_heads, v_dim], contiguous within a token; k and v
        float32 or bfloat16 [slots, kv_heads, dim] with a contiguous last axis, other strides free; table int32
        [rows, length] contiguous.
        """
        heads, qk_dim, v_dim = q.shape[1], q.shape[2], v.shape[2]
        bf16 = k.dtype == torch.bfloat16
        group = heads // k.shape[1]
        threads = self._point(plan, group, qk_dim, v_dim)
        args = self._args
        args[: layout.A_CHUNK + 1] = 0
        args[layout.A_Q : layout.A_TABLE + 1] = (
            q.data_ptr(),
            out.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.stride(0),
            out.stride(0),
            k.stride(1),
            k.stride(0),
            v.stride(1),
            v.stride(0),
            table.data_ptr(),
        )
        args[layout.A_SCALE : layout.A_MASK + 1] = (
            float_bits(scale * 1.4426950408889634),
            float_bits(cap),
            window,
            _address(mask) if mask is not None else 0,
        )
        tag = (k.shape[1], group, window, qk_dim, v_dim)
        tape.launch(compiled(kernels.build_attend, qk_dim, v_dim, bf16), args, threads, tag)
        tape.launch(compiled(kernels.build_merge, v_dim), args, int(len(plan.merges) > 0), tag)
