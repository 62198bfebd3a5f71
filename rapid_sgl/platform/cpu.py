"""Portable CPU platform: serve on any x86-64 or arm64 CPU, without AMX kernels and without flags.

An SGLang out-of-tree platform (``SRTPlatform``). SGLang's in-tree CPU mode needs
kernels that the package index does not carry; this one needs torch and numba.
"""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

ATTENTION_BACKEND = "rapid_cpu"
# Weights and KV may take this share of the free memory; the rest of the machine is not ours.
MEM_FRACTION = 0.5
# A longer chunk would hold up every running request for seconds.
CHUNKED_PREFILL_SIZE = 1024
# By default a thread that waits for the others spins for milliseconds. With any other busy process on the
# machine the others are then not scheduled, and a step takes twenty times as long (docs/performance.md).
OPENMP_SPINS = "1000"


class PortableCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on torch's CPU device with a paged attention backend of our own."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def init_backend(self) -> None:
        """Register attention backend and fused ops; called once in every worker process."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from rapid_sgl.platform import ops
        from rapid_sgl.platform.attention import PortableCpuAttnBackend

        register_attention_backend(ATTENTION_BACKEND)(PortableCpuAttnBackend)
        ops.register()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open; an explicit choice that this platform can serve is kept."""
        if not server_args.attention_backend or server_args.attention_backend == "intel_amx":
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.dtype == "auto":
            # 16-bit matrix products are emulated, and slow, on most CPUs
            server_args.dtype = "float32"
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = MEM_FRACTION
        if server_args.chunked_prefill_size is None:
            server_args.chunked_prefill_size = CHUNKED_PREFILL_SIZE
        server_args.disable_overlap_schedule = True
        # sliding-window layers are masked; a pool that drops what lies outside their window is not supported
        server_args.disable_hybrid_swa_memory = True
        # an idle scheduler would spin on a core that other processes of the machine could use
        server_args.sleep_on_idle = True
        # read by the OpenMP runtime of the worker processes, which start after this
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from rapid_sgl.platform.kv_pool import HeadMajorKVPool

        return HeadMajorKVPool

    def get_device(self, device_id: int = 0) -> str:  # type: ignore[override]
        """The device string: ``ServerArgs.device`` is filled from here and is split as a string."""
        return "cpu"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def get_dispatch_key_name(self) -> str:
        return "rapid_cpu"
