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

import torch

from rapid_sgl.platform import kernels

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
def parallel_address() -> int:
    """Where ``GOMP_parallel`` lies in memory; 0 where there is none."""
    parallel = _torch_openmp()
    return 0 if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value or 0


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
