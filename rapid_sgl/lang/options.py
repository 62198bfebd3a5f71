"""Options of a program's calls: checked where they are written, in force where the call is executed.

SGLang runs the expressions of a program in threads of its own, later than ``state += expr`` returns. So the
options in force at that line travel with the expression.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

from sglang.lang.ir import SglExpr, SglExprList

from rapid_sgl.config import PRESET_KEY, REQUEST_KEYS, RapidConfig, RapidOptionError
from rapid_sgl.request import (
    DRAFT_IDS_KEY,
    DRAFT_PROMPT_KEY,
    SPANS_KEY,
    Limits,
    parse_options,
    spans_to_wire,
)

# Resolved by the backend: spans of the prompt that answer this query. Never sent.
QUERY_KEY = "rapid_query"
SUBMIT_TARGET = "sglang.lang.interpreter.StreamExecutor.submit"

# Two ways to say one thing: the inner one of two scopes wins, whichever way it says it.
_ALTERNATIVES = ((SPANS_KEY, QUERY_KEY), (DRAFT_PROMPT_KEY, DRAFT_IDS_KEY))
_NO_LIMIT = 1 << 62
_WINDOWS = ("rapid_budget", "rapid_head", "rapid_recent")
# Windows that any single value goes together with; what a request leaves out is the server's to fill in.
_LENIENT = RapidConfig(drafter="auto", budget=_NO_LIMIT, head=0, recent=0)

_KEYS = {*_LENIENT.to_wire(), PRESET_KEY, *REQUEST_KEYS, QUERY_KEY}

_scope: ContextVar[Mapping[str, Any]] = ContextVar("rapid_options")


def rapid_options(**options: Any) -> contextlib.AbstractContextManager[None]:
    """Options of every call that is appended, every branch that is forked and every program that is run
    inside the ``with`` block. Blocks nest: the inner one adds to the outer one and wins where both speak.

        with rapid_options(rapid_query=question, rapid_draft_length=3):
            s += sgl.gen("answer", max_tokens=64)

    Args:
        options: the keys of ``docs/tuning.md``; None takes an outer block's value back. ``rapid_spans`` takes
            pairs as well as the flat list of the wire. ``rapid_query`` (text) stands for the spans of the
            prompt, as it is when the call is executed, that answer it.

    Raises:
        RapidOptionError: unknown key, wrong type or value. What depends on the prompt (spans beyond its end)
            or on the server (a draft length it reserves no slots for) is refused by the server.
    """
    return _entered(check_options(options))


def current_options() -> dict[str, Any]:
    """What the blocks around the running code ask for."""
    return dict(_scope.get({}))


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` in their wire form; values of None are kept.

    Raises:
        RapidOptionError: see ``rapid_options``.
    """
    checked = dict(options)
    for key, value in options.items():
        if key not in _KEYS:
            raise RapidOptionError(f"unknown option {key!r}; known: {', '.join(sorted(_KEYS))}")
        if value is None:
            continue
        if key in (QUERY_KEY, DRAFT_PROMPT_KEY):
            if not isinstance(value, str) or not value.strip():
                raise RapidOptionError(f"{key} must be a text that is not empty; got {value!r}")
        elif key in (SPANS_KEY, DRAFT_IDS_KEY):
            checked[key] = _flat(value) if key == SPANS_KEY else value
            parse_options({key: checked[key]}, _LENIENT, Limits(_NO_LIMIT, _NO_LIMIT))
        else:
            _LENIENT.with_wire({key: value})
    if all(checked.get(key) is not None for key in _WINDOWS):
        _LENIENT.with_wire({key: checked[key] for key in _WINDOWS})
    return checked


def merged(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """``outer`` with what ``inner`` says instead."""
    result = {**outer, **inner}
    for pair in _ALTERNATIVES:
        said = [key for key in pair if inner.get(key) is not None]
        if len(said) == 1:
            result = {key: value for key, value in result.items() if key not in pair or key in said}
    return result


@cache
def register_submit() -> None:
    """Hook ``StreamExecutor.submit``, once in a process.

    Why a hook: between ``state += expr`` and the queue of the executing thread SGLang calls nothing of the
    backend's, and the expression's own parameters are copied by a fixed list of names. Remove it when
    ``SglSamplingParams`` carries ``custom_params``.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SUBMIT_TARGET, submit, HookType.AROUND)
    HookRegistry.apply_hooks()


def submit(original: Any, executor: Any, expr: Any) -> None:
    """AROUND hook: what is submitted under options keeps them, and nothing is submitted behind a failed call.

    Its thread has ended: SGLang would queue the expression and wait for it forever at the next ``sync`` or ``fork``.

    Raises:
        Exception: the failed call's.
    """
    if executor.error_ is not None:
        raise executor.error_
    options = _scope.get({})
    # Without a thread the expression is executed right here, under the very options.
    original(executor, _Scoped(expr, options) if options and executor.use_thread else expr)


class _Scoped(SglExprList):
    """An expression and the options that are in force while the executing thread works on it."""

    def __init__(self, expr: SglExpr | str, options: Mapping[str, Any]) -> None:
        SglExpr.__init__(self)
        self._expr, self._options = expr, options

    @property
    def expr_list(self) -> Iterator[SglExpr | str]:  # type: ignore[override]
        # No finally: an expression that fails ends its thread, and the abandoned generator may be closed in
        # another one, whose options are none of its business.
        outer = _scope.get({})
        _scope.set(merged(outer, self._options))
        yield self._expr
        _scope.set(outer)


@contextlib.contextmanager
def _entered(options: Mapping[str, Any]) -> Iterator[None]:
    token = _scope.set(merged(_scope.get({}), options))
    try:
        yield
    finally:
        _scope.reset(token)


def _flat(spans: Any) -> Any:
    """The wire's flat list; anything that is not pairs is left to be judged as it is."""
    if isinstance(spans, Sequence) and not isinstance(spans, str):
        if all(isinstance(span, Sequence) and len(span) == 2 for span in spans):
            return spans_to_wire([tuple(span) for span in spans])
        return list(spans)
    return spans
