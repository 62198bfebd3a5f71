"""``TokenizerManager._create_tokenized_object``: wrong ``rapid_*`` options become HTTP 400 before scheduling.

See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"


def check(tokenized: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook; a ``ValueError`` raised here reaches the client as 400 with its text.

    Raises:
        RapidOptionError: what is wrong with the request's ``rapid_*`` keys.
    """
    from sglang.srt.runtime_context import get_spec

    from rapid_sgl.algorithm import NAME
    from rapid_sgl.config import RapidConfig
    from rapid_sgl.request import parse_options

    params = getattr(tokenized, "sampling_params", None)
    spec = get_spec()
    if params is None or not params.custom_params or spec.speculative_algorithm != NAME:
        return
    parse_options(
        params.custom_params,
        RapidConfig.from_env(),
        prompt_len=len(tokenized.input_ids or ()),
        max_draft_length=spec.speculative_num_draft_tokens - 1,
    )


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, check, HookType.AFTER)
