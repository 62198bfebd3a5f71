"""RapidConfig: the one validated record of RAPID's options.

Server defaults (``--rapid-*`` flags, ``RAPID_SGL_*`` environment variables) and
per-request keys (``rapid_*`` in ``custom_params``) are derived from its fields, so a
new option is declared once, here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

ENV_PREFIX = "RAPID_SGL_"
WIRE_PREFIX = "rapid_"
# Keys that only a request has; rapid_sgl.request reads them.
REQUEST_KEYS = ("rapid_spans", "rapid_draft_prompt", "rapid_draft_ids")
PRESET_KEY = WIRE_PREFIX + "preset"

DRAFTERS = ("view", "rag", "auto", "off")
DRAFTER_WEIGHTS = ("same", "int8", "fp8", "int4")
TRANSFERS = ("none", "mixture", "logits", "distill")
RESIDUALS = ("exact", "paper")
AUTO_SPANS = ("off", "bm25", "dense", "hybrid")
SCHEDULES = ("constant", "linear", "confidence", "retrieval")
SWITCH = ("on", "off")
AUTO = "auto"
# Drafts per pass that `auto` may go up to: RAPID's own gamma. Every running request holds twice as many KV slots.
AUTO_MAX_DRAFT_LENGTH = 10
# A preset fills in what was not set beside it.
PRESETS: dict[str, dict[str, Any]] = {
    "lossless": {"transfer": "none"},
    "paper": {"transfer": "distill", "eta": 10.0, "alpha": 0.1, "draft_length": 10},
    "mixture": {"transfer": "mixture", "lam": 0.1},
}


class RapidOptionError(ValueError):
    """An option has a wrong name, type or value; the text names the value and the fix."""


def _option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    low: float = -math.inf,
    high: float = math.inf,
    per_request: bool = True,
    kind: type | None = None,
    word: str = "",
) -> Any:
    """``kind``: type of the value, the default's unless given; ``word``: a text that stands for no value of it."""
    metadata = {
        "help": text,
        "choices": choices,
        "low": low,
        "high": high,
        "per_request": per_request,
        "kind": kind or type(default),
        "word": word,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RapidConfig:
    """Options of RAPID decoding; see DESIGN sections 3 and 4 for what they do.

    Raises:
        RapidOptionError: from ``__post_init__`` when a value is out of range, of
            the wrong type, or when ``head + recent`` leaves no room in ``budget``.
    """

    drafter: str = _option(
        "view",
        "draft from a view of the target's own KV cache, from a re-encoded short prompt, whichever fits the "
        "request, or not at all",
        choices=DRAFTERS,
    )
    drafter_weights: str = _option(
        "same", "draft with the served weights, or with a quantised twin of them", choices=DRAFTER_WEIGHTS
    )
    draft_length: int | str = _option(
        AUTO,
        "draft tokens per target pass (gamma), or auto: as many as the measured costs and acceptance say, none "
        "where drafting would not pay",
        low=1,
        high=32,
        kind=int,
        word=AUTO,
    )
    max_draft_length: int = _option(
        0,
        "drafts per target pass that KV slots are kept for; 0: the server's draft length, "
        f"{AUTO_MAX_DRAFT_LENGTH} with auto",
        low=0,
        high=32,
        per_request=False,
    )
    copy: str = _option(
        "on",
        "draft by copying what followed the same words in the prompt or the answer; costs no draft pass",
        choices=SWITCH,
    )
    stop_below: float = _option(
        0.0,
        "end a chain at a draft that the drafter itself gives less than this probability; 0: never. With draft "
        "length auto the server stops by what it has measured as well",
        low=0.0,
        high=1.0,
    )
    budget: int = _option(1024, "prompt tokens in a draft row: head + spans + recent", low=1)
    head: int = _option(64, "first prompt tokens that a view always keeps", low=0)
    recent: int = _option(512, "last prompt tokens that a view always keeps", low=0)
    reselect: int = _option(
        0,
        "choose a view's spans again after every so many tokens of the answer, by what it is about then; 0: never",
        low=0,
    )
    transfer: str = _option("none", "how the drafter's law changes the target's law", choices=TRANSFERS)
    lam: float = _option(
        0.1, "lambda: the drafter's share under transfer mixture or logits", low=0.0, high=1.0
    )
    eta: float = _option(10.0, "eta: transfer strength under transfer distill", low=0.0)
    alpha: float = _option(0.1, "distill moves only tokens with q >= alpha * max q", low=0.0, high=1.0)
    residual: str = _option("exact", "law of the token that replaces a rejected draft", choices=RESIDUALS)
    schedule: str = _option(
        "constant",
        "how lambda or eta changes: not at all, falling to 0 over the answer, only where the drafter is "
        "confident, or with the retrieval score",
        choices=SCHEDULES,
    )
    gate: float = _option(
        0.5, "schedule confidence: least max q; schedule retrieval: least score", low=0.0, high=1.0
    )
    score: float = _option(
        0.0, "schedule retrieval: how well the request's spans fit its question", low=0.0, high=1.0
    )
    trace: str = _option(
        "off",
        "report of every token where it came from and its p, q and p-hat, in meta_info",
        choices=SWITCH,
    )
    draft_tokens: int = _option(
        16384, "KV tokens set apart for re-encoded draft rows; 0 for none", low=0, per_request=False
    )
    draft_prefill: int = _option(
        128, "tokens of draft prompts that one scheduler step may prefill", low=1, per_request=False
    )
    auto_spans: str = _option(
        "off",
        "choose spans for long prompts that bring none, by words, by meaning or both; off: draft them from head "
        "and recent window",
        choices=AUTO_SPANS,
        per_request=False,
    )
    auto_threshold: int = _option(
        2048, "prompts of up to this many tokens get no spans chosen for them", low=0, per_request=False
    )
    auto_deadline: float = _option(
        0.5,
        "seconds that a request waits for its spans before it goes on without; 0: not at all",
        low=0.0,
        per_request=False,
    )
    store: str = _option(
        "",
        "where auto_spans keeps chunk vectors: a folder, or http://HOST:PORT of a Chroma server; empty: in memory",
        per_request=False,
    )
    embedder: str = _option(
        "",
        "embedding model of auto_spans, a folder or hub id of sentence-transformers; empty: the embedded one",
        per_request=False,
    )
    min_recall: float = _option(
        0.0,
        "auto_spans chooses none for prompt lengths at which its measured recall is lower; 0: never mind",
        low=0.0,
        high=1.0,
        per_request=False,
    )
    recall_report: str = _option(
        "",
        "what `rapid-sgl recall --save` has written, for min_recall; empty: recall.json in the store's folder",
        per_request=False,
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = _check(spec, getattr(self, spec.name), WIRE_PREFIX + public_name(spec.name))
            object.__setattr__(self, spec.name, value)
        if self.head + self.recent > self.budget:
            raise RapidOptionError(
                f"rapid_head={self.head} plus rapid_recent={self.recent} exceeds rapid_budget={self.budget}; "
                "raise the budget or lower one of the windows"
            )

    @property
    def reserved_length(self) -> int:
        """Drafts per target pass that a server with this config keeps KV slots for."""
        fixed = AUTO_MAX_DRAFT_LENGTH if self.draft_length == AUTO else int(self.draft_length)
        return (
            max(self.max_draft_length, fixed) if self.draft_length != AUTO else self.max_draft_length or fixed
        )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RapidConfig:
        """Server defaults from ``RAPID_SGL_<NAME>`` variables.

        Raises:
            RapidOptionError: for an unknown ``RAPID_SGL_*`` name or a bad value.
        """
        env = os.environ if env is None else env
        known = {env_name(spec.name): spec for spec in fields(cls)}
        given = {name: text for name, text in env.items() if name.startswith(ENV_PREFIX)}
        preset = preset_values(given.pop(env_name("preset"), None), env_name("preset"))
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise RapidOptionError(
                f"unknown environment variable {unknown[0]}; known: {', '.join(sorted(known))}"
            )
        values = {known[name].name: parse_text(known[name].name, text) for name, text in given.items()}
        return cls(**{**preset, **values})

    def to_env(self) -> dict[str, str]:
        """Environment variables that reproduce this record in a server process."""
        return {env_name(spec.name): str(getattr(self, spec.name)) for spec in fields(self)}

    def to_wire(self) -> dict[str, Any]:
        """This record as the ``rapid_*`` keys of a request."""
        return {
            WIRE_PREFIX + public_name(spec.name): getattr(self, spec.name)
            for spec in fields(self)
            if spec.metadata["per_request"]
        }

    def with_wire(self, options: Mapping[str, Any]) -> RapidConfig:
        """This record with the ``rapid_*`` keys of one request applied.

        Raises:
            RapidOptionError: for an unknown key, a wrong type or a value out of range.
        """
        known = {
            WIRE_PREFIX + public_name(spec.name): spec
            for spec in fields(self)
            if spec.metadata["per_request"]
        }
        options = dict(options)
        preset = preset_values(options.pop(PRESET_KEY, None), PRESET_KEY)
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise RapidOptionError(
                f"unknown option {unknown[0]!r}; known: {', '.join(sorted([*known, PRESET_KEY, *REQUEST_KEYS]))}"
            )
        return replace(self, **{**preset, **{known[key].name: value for key, value in options.items()}})


def preset_values(name: Any, label: str) -> dict[str, Any]:
    """Fields that a preset sets; none for None.

    Raises:
        RapidOptionError: there is no such preset; ``label`` says where it was asked for.
    """
    if name is None:
        return {}
    if name not in tuple(PRESETS):
        raise RapidOptionError(f"{label}={name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]


def public_name(field_name: str) -> str:
    """Name of a field on the wire and in flags (``lambda`` is a Python keyword, hence ``lam``)."""
    return "lambda" if field_name == "lam" else field_name


def env_name(field_name: str) -> str:
    return ENV_PREFIX + public_name(field_name).upper()


def flag_name(field_name: str) -> str:
    return "--rapid-" + public_name(field_name).replace("_", "-")


def parse_text(field_name: str, text: str) -> Any:
    """A flag's or variable's text as the field's type; the range is checked by ``RapidConfig`` itself."""
    spec = next(spec for spec in fields(RapidConfig) if spec.name == field_name)
    kind, word = spec.metadata["kind"], spec.metadata["word"]
    if word and text == word:
        return word
    try:
        return kind(text)
    except ValueError as error:
        raise RapidOptionError(f"{env_name(field_name)}={text!r} is not {_described(kind, word)}") from error


def _check(spec: Any, value: Any, name: str) -> Any:
    kind, word = spec.metadata["kind"], spec.metadata["word"]
    if word and value == word:
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise RapidOptionError(f"{name}={value!r} is {_article(type(value))}, not {_described(kind, word)}")
    choices, low, high = (spec.metadata[key] for key in ("choices", "low", "high"))
    if choices and value not in choices:
        raise RapidOptionError(f"{name}={value!r} is not one of {', '.join(choices)}")
    if kind is not str and not (low <= value <= high and math.isfinite(value)):
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise RapidOptionError(f"{name}={value!r} is out of range; use {_article(kind)} {bounds}")
    return value


def _described(kind: type, word: str) -> str:
    return f"{_article(kind)} or {word!r}" if word else _article(kind)


def _article(kind: type) -> str:
    return {int: "an integer", float: "a number", str: "a string", bool: "a boolean"}.get(
        kind, f"a {kind.__name__}"
    )
