"""Forward passes of few tokens on the portable CPU platform: replayed from tape.

See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

from typing import Any

LOAD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def register() -> None:
    """AFTER hook where the portable CPU platform serves; elsewhere SGLang's own graph runners run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rapid_sgl.platform.detect import portable_cpu_wanted

    if portable_cpu_wanted():
        HookRegistry.register(LOAD_TARGET, _attach, HookType.AFTER)


def _attach(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    from rapid_sgl.platform import replay

    replay.attach(runner.model)
    return result
