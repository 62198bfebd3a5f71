"""``SchedulerInternalStateController._add_speculative``: RAPID's step statistics in ``/server_info``.

See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative"


def add_rapid(result: Any, controller: Any, state: dict[str, Any]) -> None:
    """AFTER hook: adds ``state["rapid"]`` where the scheduler's worker is RAPID's."""
    worker = controller.scheduler.draft_worker
    report = getattr(worker, "report", None)
    if report is not None:
        state["rapid"] = report()


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, add_rapid, HookType.AFTER)
