"""``release_kv_cache``: the one place where SGLang gives up a request's KV row; RAPID forgets the request there.

See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.mem_cache.common.release_kv_cache"

# called with the request's id; the worker of this process adds itself
listeners: list[Callable[[str], None]] = []


def notify(result: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook: finish, abort and retraction all pass here."""
    for listener in listeners:
        listener(req.rid)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, notify, HookType.AFTER)
