"""Patched SGLang symbols: one file each; ``LEDGER.md`` says why and when each can go."""

from __future__ import annotations


def register() -> None:
    """Register every hook with SGLang's ``HookRegistry``."""
    from rapid_sgl.server_patches import (
        auto_spans,
        fused_linear,
        kv_release,
        meta_info,
        request_check,
        row_writer,
        seeded_hash,
        server_info,
    )

    for patch in (
        auto_spans,
        fused_linear,
        kv_release,
        meta_info,
        request_check,
        row_writer,
        seeded_hash,
        server_info,
    ):
        patch.register()
