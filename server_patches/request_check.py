"""``TokenizerManager._create_tokenized_object``: wrong ``rapid_*`` options become HTTP 400 before scheduling.

See ``LEDGER.md`` for why, how and when this can go.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"


def check(tokenized: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook; a ``ValueError`` raised here reaches the client as 400 with its text.

    A draft prompt that came as text is tokenised here, so that the scheduler need not.

    Raises:
        RapidOptionError: what is wrong with the request's ``rapid_*`` keys.
    """
    from sglang.srt.runtime_context import get_spec

    from rapid_sgl.algorithm import NAME, server_defaults
    from rapid_sgl.request import DRAFT_PROMPT_KEY, Limits, parse_options, tokenize_draft_prompt

    params = getattr(tokenized, "sampling_params", None)
    spec = get_spec()
    if params is None or not params.custom_params or spec.speculative_algorithm != NAME:
        return
    if DRAFT_PROMPT_KEY in params.custom_params and manager.tokenizer is not None:
        params.custom_params = tokenize_draft_prompt(params.custom_params, manager.tokenizer.encode)
    limits = Limits(
        prompt_len=len(tokenized.input_ids or ()),
        max_draft_length=spec.speculative_num_draft_tokens - 1,
        context_len=manager.model_config.context_len,
        vocab_size=manager.model_config.vocab_size,
    )
    parse_options(params.custom_params, server_defaults(), limits)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, check, HookType.AFTER)
