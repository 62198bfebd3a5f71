"""Portable CPU platform: serve on any x86-64 or arm64 CPU, without AMX kernels and without flags.

An SGLang out-of-tree platform (``SRTPlatform``). SGLang's in-tree CPU mode needs
kernels that the package index does not carry; this one needs torch and numba.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import psutil
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "rapid_cpu"
# Large enough for a long document and a few answers, small enough for a laptop;
# --max-total-tokens and --mem-fraction-static override it.
KV_BYTES_SHARE = 0.25


class PortableCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on torch's CPU device with a paged attention backend of our own."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def init_backend(self) -> None:
        """Register attention backend and fused ops; called once in every worker process."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from rapid_sgl.platform.attention import PortableCpuAttnBackend

        register_attention_backend(ATTENTION_BACKEND)(PortableCpuAttnBackend)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose what the device can serve; fields the user set to something servable are kept."""
        server_args.attention_backend = ATTENTION_BACKEND
        # an idle scheduler would spin on a core that other processes of the machine could use
        server_args.sleep_on_idle = True
        server_args.disable_overlap_schedule = True
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = 65536

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from rapid_sgl.platform.kv_pool_tmp import Pool

        return Pool

    def get_device(self, device_id: int = 0) -> str:  # type: ignore[override]
        """The device string: ``ServerArgs.device`` is filled from here and is split as a string."""
        return "cpu"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def get_dispatch_key_name(self) -> str:
        return "rapid_cpu"
