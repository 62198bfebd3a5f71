"""``TokenizerManager._send_one_request`` and ``_send_batch_request``: long prompts without spans get some.

See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from rapid_sgl.retrieval.lru import Lru

MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
ONE_TARGET = f"{MANAGER}._send_one_request"
BATCH_TARGET = f"{MANAGER}._send_batch_request"
RESPONSE_TARGET = f"{MANAGER}.update_request_meta_info"

# The recall guard's verdicts, which say why a drafter looks at no retrieved spans.
_TOLD_AS_REASON = ("low_recall", "unmeasured")

logger = logging.getLogger(__name__)

# per tokenizer manager; None where it has no use for spans
_choosers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# What ``meta_info`` will say, by request id. A request that ends without an answer leaves its entry
# behind, so they are bounded by number.
_records: Lru[str, dict[str, Any]] = Lru(4096)


async def send_one(original: Any, manager: Any, request: Any) -> Any:
    """AROUND hook: the request goes to the scheduler when its spans are chosen, or at the deadline."""
    await add_spans(manager, [request])
    sent = await original(manager, request)
    _abort_again(manager, [request])
    return sent


async def send_batch(original: Any, manager: Any, requests: Sequence[Any]) -> Any:
    """AROUND hook: as ``send_one``, with one deadline for all."""
    await add_spans(manager, requests)
    sent = await original(manager, requests)
    _abort_again(manager, requests)
    return sent


def report(result: Any, manager: Any, meta_info: dict[str, Any], *args: Any) -> None:
    """AFTER hook: where a request's spans come from, in its ``meta_info``."""
    record = _records.get(meta_info["id"]) or {}
    meta_info.update(record)
    if record.get("rapid_auto_missed") in _TOLD_AS_REASON and "rapid_reason" in meta_info:
        meta_info["rapid_reason"] += f", {record['rapid_auto_missed']}"


async def add_spans(manager: Any, requests: Sequence[Any]) -> None:
    """Write ``rapid_spans`` into the sampling parameters of the requests that it concerns."""
    if manager not in _choosers:
        _choosers[manager] = _make_chooser(manager)
    chooser = _choosers[manager]
    if chooser is not None:
        await asyncio.gather(*(_add_to(chooser, manager, request) for request in requests))


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ONE_TARGET, send_one, HookType.AROUND)
    HookRegistry.register(BATCH_TARGET, send_batch, HookType.AROUND)
    HookRegistry.register(RESPONSE_TARGET, report, HookType.AFTER)


def _make_chooser(manager: Any) -> Any:
    from sglang.srt.runtime_context import get_spec

    from rapid_sgl.algorithm import NAME, server_defaults
    from rapid_sgl.auto import AutoSpans
    from rapid_sgl.config import RapidOptionError

    if get_spec().speculative_algorithm != NAME or manager.tokenizer is None or not manager.is_generation:
        return None
    config = server_defaults()
    if config.auto_spans == "off":
        return None
    try:
        chooser = AutoSpans(manager.tokenizer, config)
    except RapidOptionError as error:
        logger.warning("RAPID auto spans are off: %s", error)
        return None
    chooser.warm_up()
    return chooser


async def _add_to(chooser: Any, manager: Any, request: Any) -> None:
    from rapid_sgl.request import SPANS_KEY, spans_to_wire

    params = request.sampling_params
    config = chooser.config_for(params.custom_params, _limits(request)) if _fits(manager, request) else None
    if config is None:
        _records.put(request.rid, _brought(manager, request))
        return
    outcome = await chooser.choose(request.input_ids, config, (request.extra_key, request.cache_salt))
    # An empty list too: samples of one prompt share their parameters, and the next one finds it settled.
    params.custom_params = {**(params.custom_params or {}), SPANS_KEY: spans_to_wire(outcome.spans)}
    record: dict[str, Any] = {"rapid_spans_source": "none" if outcome.missed else "auto"}
    if outcome.missed:
        record["rapid_auto_missed"] = outcome.missed
    else:
        record["rapid_auto_spans"] = spans_to_wire(outcome.spans)
    _records.put(request.rid, {**record, "rapid_auto_ms": round(1000 * outcome.seconds, 1)})


def _fits(manager: Any, request: Any) -> bool:
    """Whether the ids are the prompt as the scheduler will see it, and a decode step follows."""
    ids, longest = request.input_ids, manager.max_req_input_len
    return (
        ids is not None
        and request.input_embeds is None
        and request.mm_inputs is None
        and request.session_params is None  # the prompt gets what the session holds in front
        and request.lora_id is None  # not drafted
        and request.sampling_params.max_new_tokens != 0  # SGLang's own prefill ahead of n samples
        and (longest is None or len(ids) < longest)  # else refused, or cut short
    )


def _limits(request: Any) -> Any:
    from sglang.srt.runtime_context import get_spec

    from rapid_sgl.request import Limits

    return Limits(len(request.input_ids), get_spec().speculative_num_draft_tokens - 1)


def _brought(manager: Any, request: Any) -> dict[str, Any]:
    """The record of a request that nothing was chosen for just now."""
    from rapid_sgl.request import SPANS_KEY

    flat = (request.sampling_params.custom_params or {}).get(SPANS_KEY)
    if not flat:
        return {"rapid_spans_source": "none"}
    state = manager.rid_to_state.get(request.rid)
    sent = (state.obj.sampling_params or {}).get("custom_params") or {} if state is not None else {}
    # else a sample of a prompt that has got its spans already
    return {"rapid_spans_source": "request" if SPANS_KEY in sent else "auto"}


def _abort_again(manager: Any, requests: Sequence[Any]) -> None:
    """The scheduler knew nothing of a request that was aborted while it waited for its spans."""
    for request in requests:
        state = manager.rid_to_state.get(request.rid)
        if state is not None and state.abort_sent:
            state.abort_sent = False
            manager.abort_request(request.rid)
