"""What RAPID did for a request travels from the scheduler into the response's ``meta_info``.

See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

from typing import Any

OUTPUT_TARGET = (
    "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.to_payload"
)
RESPONSE_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info"
KEY = "rapid"


def collect(original: Any, accumulator: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook in the scheduler: one record per request that goes out, None for those without drafts' state."""
    records = [_record(req) for req in accumulator.output_reqs]
    if any(records):
        accumulator.customized_info[KEY] = records
    return original(accumulator, *args, **kwargs)


def report(
    original: Any, manager: Any, meta_info: dict, state: Any, customized_info: dict, index: int, *args: Any
) -> None:
    """AROUND hook in the tokenizer manager: the record's entries become plain ``meta_info`` keys."""
    if KEY in customized_info:
        meta_info.update(customized_info[KEY][index] or {})
        customized_info = {key: values for key, values in customized_info.items() if key != KEY}
    original(manager, meta_info, state, customized_info, index, *args)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(OUTPUT_TARGET, collect, HookType.AROUND)
    HookRegistry.register(RESPONSE_TARGET, report, HookType.AROUND)


def _record(req: Any) -> dict[str, Any] | None:
    make = getattr(req, "rapid_meta_info", None)
    return make(finished=req.finished()) if make is not None else None
