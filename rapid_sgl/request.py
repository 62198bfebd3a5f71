"""Per-request options as they travel in SGLang's ``sampling_params.custom_params``.

The only owner of the wire keys: everything else sees ``RequestOptions``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rapid_sgl.config import WIRE_PREFIX, RapidConfig, RapidOptionError

SPANS_KEY = WIRE_PREFIX + "spans"

Span = tuple[int, int]  # half-open token range of the prompt


@dataclass(frozen=True)
class RequestOptions:
    """One request's validated options: its config and the spans retrieved for it (in prompt order)."""

    config: RapidConfig
    spans: tuple[Span, ...] = ()


def parse_options(
    custom_params: Mapping[str, Any] | None,
    defaults: RapidConfig,
    *,
    prompt_len: int,
    max_draft_length: int,
) -> RequestOptions:
    """Read a request's ``rapid_*`` keys; keys of others in ``custom_params`` are left alone.

    Args:
        custom_params: the request's ``sampling_params.custom_params``.
        defaults: the server's config.
        prompt_len: tokens of the prompt, the bound of spans.
        max_draft_length: what the server reserves verify slots for.

    Raises:
        RapidOptionError: unknown key, wrong type, value or span out of range.
    """
    given = {}
    for key, value in (custom_params or {}).items():
        if isinstance(key, str) and key.startswith(WIRE_PREFIX):
            given[key] = value
    if not given:
        return RequestOptions(defaults)
    spans = _parse_spans(given.pop(SPANS_KEY, []), prompt_len)
    config = defaults.with_wire(given)
    if config.draft_length > max_draft_length:
        raise RapidOptionError(
            f"rapid_draft_length={config.draft_length} exceeds the server's {max_draft_length}; "
            "lower it or start the server with a larger --rapid-draft-length"
        )
    _check_budget(spans, config, prompt_len)
    return RequestOptions(config, spans)


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
