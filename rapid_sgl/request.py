"""Per-request options as they travel in SGLang's ``sampling_params.custom_params``.

The only owner of the wire keys: everything else sees ``RequestOptions``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rapid_sgl.config import AUTO, PRESET_KEY, REQUEST_KEYS, WIRE_PREFIX, RapidConfig, RapidOptionError

SPANS_KEY, DRAFT_PROMPT_KEY, DRAFT_IDS_KEY = REQUEST_KEYS

Span = tuple[int, int]  # half-open token range of the prompt


@dataclass(frozen=True)
class RequestOptions:
    """One request's validated options."""

    config: RapidConfig
    spans: tuple[Span, ...] = ()  # retrieved ranges of the prompt, in prompt order
    draft_ids: tuple[int, ...] = ()  # the draft prompt where the client wrote it itself


@dataclass(frozen=True)
class Limits:
    """What a request is checked against."""

    prompt_len: int
    max_draft_length: int  # drafts per step that the server reserves verify slots for
    context_len: int = 1 << 62  # tokens that the drafter takes
    vocab_size: int = 1 << 62


def parse_options(
    custom_params: Mapping[str, Any] | None, defaults: RapidConfig, limits: Limits
) -> RequestOptions:
    """Read a request's ``rapid_*`` keys; keys of others in ``custom_params`` are left alone.

    Args:
        custom_params: the request's ``sampling_params.custom_params``.
        defaults: the server's config.

    Raises:
        RapidOptionError: unknown key, wrong type, value or span out of range.
    """
    given = {}
    for key, value in (custom_params or {}).items():
        if isinstance(key, str) and key.startswith(WIRE_PREFIX):
            given[key] = value
    if not given:
        return RequestOptions(defaults)
    spans = _parse_spans(given.pop(SPANS_KEY, []), limits.prompt_len)
    draft_ids = _parse_draft_ids(given.pop(DRAFT_IDS_KEY, ()), limits)
    if DRAFT_PROMPT_KEY in given:
        raise RapidOptionError(f"{DRAFT_PROMPT_KEY} needs a server with a tokenizer; send {DRAFT_IDS_KEY}")
    config = defaults.with_wire(given)
    if PRESET_KEY in given and "rapid_draft_length" not in given:
        # the preset's length is a wish; what the server reserves slots for is a fact
        length = config.draft_length
        config = replace(
            config, draft_length=length if length == AUTO else min(int(length), limits.max_draft_length)
        )
    if config.draft_length != AUTO and int(config.draft_length) > limits.max_draft_length:
        raise RapidOptionError(
            f"rapid_draft_length={config.draft_length} exceeds the server's {limits.max_draft_length}; "
            "lower it or start the server with a larger --rapid-max-draft-length"
        )
    if given.get("rapid_schedule") == "retrieval" and "rapid_score" not in given:
        raise RapidOptionError(
            "rapid_schedule='retrieval' transfers nothing without rapid_score; send the score of the spans, 0 to 1"
        )
    if config.drafter_weights not in ("same", defaults.drafter_weights):
        raise RapidOptionError(
            f"rapid_drafter_weights={config.drafter_weights!r} is not loaded on this server; use 'same' or start "
            f"the server with --rapid-drafter-weights {config.drafter_weights}"
        )
    _check_budget(spans, config, limits.prompt_len)
    _check_draft_memory(config, draft_ids)
    return RequestOptions(config, spans, draft_ids)


def tokenize_draft_prompt(
    custom_params: Mapping[str, Any], encode: Callable[[str], list[int]]
) -> dict[str, Any]:
    """``custom_params`` with ``rapid_draft_prompt`` replaced by ``rapid_draft_ids``.

    Args:
        encode: text to token ids, special tokens as in a plain ``/generate`` prompt.

    Raises:
        RapidOptionError: the draft prompt is not text, is empty, or was given twice.
    """
    params = dict(custom_params)
    text = params.pop(DRAFT_PROMPT_KEY)
    if not isinstance(text, str) or not text:
        raise RapidOptionError(f"{DRAFT_PROMPT_KEY} must be a text that is not empty; got {_short(text)}")
    if DRAFT_IDS_KEY in params:
        raise RapidOptionError(f"{DRAFT_PROMPT_KEY} and {DRAFT_IDS_KEY} say the same thing; send one of them")
    params[DRAFT_IDS_KEY] = encode(text)
    return params


def outside_windows(spans: Sequence[Span], config: RapidConfig, prompt_len: int) -> list[Span]:
    """The parts of ``spans`` that the head and recent windows do not keep anyway, sorted and disjoint."""
    recent_start = prompt_len - config.recent
    clipped = [(max(start, config.head), min(end, recent_start)) for start, end in spans]
    return [(start, end) for start, end in clipped if start < end]


def spans_to_wire(spans: Sequence[Span]) -> list[int]:
    """Spans as the flat list that ``custom_params`` can carry: start, end, start, end, …"""
    return [bound for span in spans for bound in span]


def _check_budget(spans: Sequence[Span], config: RapidConfig, prompt_len: int) -> None:
    taken = sum(end - start for start, end in outside_windows(spans, config, prompt_len))
    room = config.budget - config.head - config.recent
    if prompt_len > config.budget and taken > room:
        raise RapidOptionError(
            f"{SPANS_KEY} hold {taken} tokens outside the windows, but rapid_budget={config.budget} leaves {room} "
            f"beside rapid_head={config.head} and rapid_recent={config.recent}; send fewer spans or raise the budget"
        )


def _check_draft_memory(config: RapidConfig, draft_ids: Sequence[int]) -> None:
    if draft_ids and config.drafter not in ("rag", "auto"):
        raise RapidOptionError(
            f"a draft prompt was sent with rapid_drafter={config.drafter!r}, which has no use for it; "
            "add rapid_drafter='rag'"
        )
    if config.drafter == "rag" and config.draft_tokens == 0:
        raise RapidOptionError(
            "rapid_drafter='rag' needs KV memory that this server has not set apart; "
            "start it with --rapid-draft-tokens 16384"
        )
    size = len(draft_ids) if draft_ids else min(config.budget, config.draft_tokens)
    if size > config.draft_tokens:
        raise RapidOptionError(
            f"the draft prompt has {size} tokens, but --rapid-draft-tokens is {config.draft_tokens}; "
            "shorten it or raise the flag"
        )


def _parse_draft_ids(ids: Any, limits: Limits) -> tuple[int, ...]:
    if (
        not isinstance(ids, Sequence)
        or isinstance(ids, (str, bytes))
        or any(type(token) is not int for token in ids)
    ):
        raise RapidOptionError(f"{DRAFT_IDS_KEY} must be a list of token ids; got {_short(ids)}")
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise RapidOptionError(
                f"{DRAFT_IDS_KEY} has {token}, outside the vocabulary of {limits.vocab_size} tokens"
            )
    if len(ids) >= limits.context_len:
        raise RapidOptionError(
            f"the draft prompt has {len(ids)} tokens, but the drafter takes {limits.context_len} with the answer; "
            "shorten it"
        )
    return tuple(ids)


def _parse_spans(flat: Any, prompt_len: int) -> tuple[Span, ...]:
    if (
        not isinstance(flat, Sequence)
        or isinstance(flat, str)
        or any(type(bound) is not int for bound in flat)
    ):
        raise RapidOptionError(
            f"{SPANS_KEY} must be a flat list of integers start, end, start, end, …; got {_short(flat)}"
        )
    if len(flat) % 2:
        raise RapidOptionError(f"{SPANS_KEY} has {len(flat)} numbers; starts and ends come in pairs")
    spans = tuple(zip(flat[::2], flat[1::2], strict=True))
    for start, end in spans:
        if not 0 <= start < end <= prompt_len:
            raise RapidOptionError(
                f"span [{start}, {end}) of {SPANS_KEY} is empty or outside the prompt of {prompt_len} tokens"
            )
    for (_, end), (start, _) in pairwise(spans):
        if start < end:
            raise RapidOptionError(
                f"{SPANS_KEY} must be sorted and disjoint; a span ends at {end}, the next starts at {start}"
            )
    return spans


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
