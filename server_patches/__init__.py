"""Patched SGLang symbols: one file each; ``LEDGER.md`` says why and when each can go."""

from __future__ import annotations

from importlib import import_module

PATCHES = (
    "auto_spans",
    "fused_linear",
    "kv_release",
    "meta_info",
    "replay",
    "request_check",
    "row_writer",
    "seeded_hash",
    "server_info",
    "spec_baselines",
)


def register() -> None:
    """Register every hook with SGLang's ``HookRegistry``."""
    for name in PATCHES:
        import_module(f"{__name__}.{name}").register()
