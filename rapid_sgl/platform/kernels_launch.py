"""Run the compiled kernels on the threads that torch already has.

A second thread pool beside torch's costs milliseconds per layer: idle OpenMP workers spin and keep the core
that the other pool needs. So the kernels are started with ``GOMP_parallel`` of the very OpenMP library that
torch has loaded. Where there is none (macOS), a Python thread pool does it; ctypes calls release the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rapid_sgl.platform import kernels
from rapid_sgl.platform import kernels_layout as layout
from rapid_sgl.platform.kernels_plan import Plan

logger = logging.getLogger(__name__)


class Kernel:
    """A compiled function of one argument-block address; calling it runs it on this thread alone."""

    def __init__(self, compiled: Any) -> None:
        self._keep = compiled  # owns the machine code
        self.address: int = compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, block: int) -> None:
        self._call(block)


Launcher = Callable[[Kernel, int, int], None]


def _torch_openmp() -> Any | None:
    """``GOMP_parallel`` of the OpenMP library that torch uses, or None."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        # Symbols are looked up through the library's own dependencies: this finds torch's OpenMP, not the system's.
        function = getattr(ctypes.CDLL(str(library)), "GOMP_parallel", None)
        if function is not None:
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            function.restype = None
            return function
    return None


@functools.cache
def parallel_launcher() -> Launcher:
    """``launch(kernel, address of the argument block, threads)``: run the kernel once on each thread."""
    parallel = _torch_openmp()
    if parallel is None:
        logger.info("torch has no GNU OpenMP here; attention runs on threads of its own")
        return thread_pool_launcher()

    def launch(kernel: Kernel, block: int, threads: int) -> None:
        if threads == 1:
            kernel(block)
        else:
            parallel(kernel.address, block, threads, 0)

    return launch


def thread_pool_launcher() -> Launcher:
    """The fallback of ``parallel_launcher``: a lazily grown pool of Python threads."""
    pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="rapid-attention")

    def launch(kernel: Kernel, block: int, threads: int) -> None:
        others = [pool.submit(kernel, block) for _ in range(threads - 1)]
        kernel(block)
        for other in others:
            other.result()

    return launch


@functools.cache
def source_stamp() -> int:
    """Checksum of the kernels' sources: numba's disk cache looks only at the file of the compiled function itself."""
    files = sorted(Path(kernels.__file__).parent.glob("kernels*.py"))
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


@functools.cache
def disk_cache() -> bool:
    """Whether numba finds a folder that it can write compiled code to (else every process compiles for seconds)."""
    try:
        kernels.build_merge(1, cache=True, stamp=source_stamp())
    except RuntimeError as error:
        logger.warning("compiled attention kernels are not cached: %s (set NUMBA_CACHE_DIR)", error)
        return False
    return True


@functools.cache
def compiled(build: Callable[..., Any], *shape: Any) -> Kernel:
    """The kernel of ``build(*shape, cache, stamp)``, compiled or loaded from disk once per process."""
    return Kernel(build(*shape, cache=disk_cache(), stamp=source_stamp()))


def float_bits(value: float) -> int:
    """The bits of a float32, as argument blocks carry them."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class PagedAttention:
    """Attention over paged keys and values; owns its scratch, so one instance serves one thread at a time."""

    def __init__(self) -> None:
        self._args = np.zeros(layout.ARG_FIELDS, np.int64)
        self._where = _address(self._args)
        self._scratch = np.empty(0, np.float32)
        self._partial = np.empty(0, np.float32)
        self._launch = parallel_launcher()
        self._prepared: tuple[Any, ...] = (None,)

    def _prepare(self, plan: Plan, group: int, qk_dim: int, v_dim: int, threads: int) -> None:
        """Point the argument block at a plan and at enough scratch."""
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
        threads = max(1, min(torch.get_num_threads(), plan.n_chunks))
        # The plan itself is part of the key, and so kept: its arrays must outlive the addresses.
        key = (plan, heads, qk_dim, v_dim, bf16, threads)
        if self._prepared[0] is not plan or self._prepared != key:
            self._prepare(plan, heads // k.shape[1], qk_dim, v_dim, threads)
            self._prepared = key
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
        self._launch(compiled(kernels.build_attend, qk_dim, v_dim, bf16), self._where, threads)
        if len(plan.merges):
            compiled(kernels.build_merge, v_dim)(self._where)
