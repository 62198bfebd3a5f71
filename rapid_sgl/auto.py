"""Spans for requests that bring none: whom it concerns, worker threads, deadline, statistics.

Runs in the tokenizer's process, beside its event loop; knows nothing of SGLang.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapid_sgl.config import REQUEST_KEYS, RapidConfig, RapidOptionError, flag_name
from rapid_sgl.request import SPANS_KEY, Limits, Span, parse_options
from rapid_sgl.retrieval.auto import PromptSelector
from rapid_sgl.retrieval.chroma import StoreError, connect
from rapid_sgl.retrieval.embedding import Embedder, EmbeddingError
from rapid_sgl.retrieval.lru import Lru
from rapid_sgl.retrieval.pipeline import RetrievalOptions
from rapid_sgl.retrieval.recall_guard import (
    FILE_NAME,
    LOW_RECALL,
    UNMEASURED,
    RecallGuard,
    RecallReportError,
)

logger = logging.getLogger(__name__)

# BM25 runs in Python, so that more threads only take turns. Embedding a new document takes seconds
# and lets go of the interpreter: others get through beside it.
THREADS = {"bm25": 2, "dense": 4, "hybrid": 4}
REPORT_EVERY_S = 60.0
# A document that took longer than the deadline is recognised by this many of its first tokens.
FINGERPRINT_TOKENS = 2048
LATE_DOCUMENTS = 64

NO_MATCH, DEADLINE, STORE, ERROR = "no_match", "deadline", "store", "error"
MISSED = (NO_MATCH, DEADLINE, STORE, ERROR, LOW_RECALL, UNMEASURED)


@dataclass(frozen=True)
class Outcome:
    """What came of choosing spans for one request."""

    spans: list[Span]
    missed: str  # why there are none: one of MISSED; "" when there are some
    seconds: float  # that the request waited


@dataclass
class AutoStats:
    """Totals since start."""

    requests: int = 0
    seconds: float = 0.0
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISSED, 0))

    def add(self, outcome: Outcome) -> None:
        self.requests += 1
        self.seconds += outcome.seconds
        if outcome.missed:
            self.missed[outcome.missed] += 1

    def __str__(self) -> str:
        missed = ", ".join(f"{name} {count}" for name, count in self.missed.items() if count) or "none"
        mean = 1000 * self.seconds / max(1, self.requests)
        return f"{self.requests} requests, {mean:.1f} ms each; without spans: {missed}"


class AutoSpans:
    """Chooses spans from a request's own prompt; one per tokenizer process.

    Args:
        tokenizer: the served model's.
        config: the server's; ``auto_spans`` names the scorer and must not be "off".

    Raises:
        RapidOptionError: embedder, store or recall report cannot be used (``check_auto``).
    """

    def __init__(self, tokenizer: Any, config: RapidConfig) -> None:
        self.config = config
        self.stats = AutoStats()
        self._guard = check_auto(config)
        if self._guard is not None:
            logger.info("RAPID auto spans: %s: %s", config.auto_spans, self._guard)
        self._selector = PromptSelector(tokenizer, _retrieval(config))
        self._pool = ThreadPoolExecutor(
            THREADS[config.auto_spans],
            "rapid-auto",
            None if config.auto_spans == "bm25" else _one_torch_thread,
        )
        self._late: Lru[Hashable, Future[Any]] = Lru(LATE_DOCUMENTS)
        self._told: set[str] = set()  # kinds of failures that are in the log
        self._reported = time.monotonic()

    def warm_up(self) -> None:
        """Load what selecting needs, in a worker thread: the first long prompt should not wait for it."""
        self._pool.submit(self._safely, self._warmed_up)

    def config_for(self, custom_params: Mapping[str, Any] | None, limits: Limits) -> RapidConfig | None:
        """The effective options of a request that spans are to be chosen for, None for every other one.

        It brings no spans and no draft prompt of its own (``rapid_spans=[]`` is a way to say no), will be
        drafted, and is longer than ``auto_threshold`` and its budget.
        """
        params = custom_params or {}
        if any(key in params for key in REQUEST_KEYS) or limits.prompt_len <= self.config.auto_threshold:
            return None
        try:
            config = parse_options({**params, SPANS_KEY: []}, self.config, limits).config
        except RapidOptionError:  # server defaults under which spans are of no use
            return None
        room = config.budget - config.head - config.recent
        wanted = config.drafter != "off" and limits.prompt_len > config.budget and room > 0
        return config if wanted else None

    async def choose(self, ids: array[int], config: RapidConfig, tenant: Hashable) -> Outcome:
        """Spans of a prompt, or none after ``auto_deadline`` seconds, a failure or without a match.

        The deadline counts from this call, waiting for a thread included. Work under way is finished all
        the same, so that the next question about the document finds it; work not yet begun is dropped.

        Args:
            ids: int64 [prompt_len].
            config: from ``config_for``.
            tenant: requests of different tenants share nothing.
        """
        started = time.monotonic()
        missed = "" if self._guard is None else self._guard.refusal(len(ids), _room(config))
        spans: list[Span] = []
        if not missed:
            try:
                spans, missed = await self._selected(ids, config, tenant)
            except asyncio.TimeoutError:
                missed = DEADLINE
        outcome = Outcome(spans, missed, time.monotonic() - started)
        self.stats.add(outcome)
        self._report(started)
        return outcome

    async def _selected(
        self, ids: array[int], config: RapidConfig, tenant: Hashable
    ) -> tuple[list[Span], str]:
        """Spans, and why there are none.

        Raises:
            asyncio.TimeoutError: not within the deadline.
        """
        document = (tenant, hash(ids[:FINGERPRINT_TOKENS].tobytes()))
        late = self._late.get(document)
        if config.auto_deadline <= 0 or (late is not None and late.running()):
            raise asyncio.TimeoutError
        windows = {"budget": config.budget, "head": config.head, "recent": config.recent}
        work = self._pool.submit(self._safely, self._selector.select, ids, **windows, tenant=tenant)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), config.auto_deadline)
        except asyncio.TimeoutError:
            if work.running():
                self._late.put(document, work)
            raise

    def _safely(self, select: Callable[..., list[Span]], *args: Any, **kwargs: Any) -> tuple[list[Span], str]:
        """Spans, and why there are none; each kind of failure is logged once."""
        try:
            spans = select(*args, **kwargs)
            return spans, "" if spans else NO_MATCH
        except StoreError:  # logged where it was noticed first, in the store's circuit breaker
            return [], STORE
        # Retrieval only ever adds spans, so no fault of it may cost a request its answer.
        except Exception as error:
            kind = type(error).__name__
            if kind not in self._told:
                self._told.add(kind)
                reason = " ".join(str(error).split())[:200]
                logger.warning("RAPID auto spans: %s: %s; such requests go on without spans", kind, reason)
            return [], ERROR

    def _warmed_up(self) -> list[Span]:
        self._selector.warm_up()
        return []

    def _report(self, now: float) -> None:
        if now - self._reported > REPORT_EVERY_S:
            self._reported = now
            logger.info("RAPID auto spans: %s", self.stats)


def check_auto(config: RapidConfig) -> RecallGuard | None:
    """Check the options of ``auto_spans``, without loading or opening anything large.

    Returns:
        What ``min_recall`` is enforced with; None when it is 0 or ``auto_spans`` is off.

    Raises:
        RapidOptionError: embedder, store or recall report cannot be used, or has no effect.
    """
    given = {name: getattr(config, name) for name in ("store", "embedder", "min_recall", "recall_report")}
    unused = [name for name, value in given.items() if value]
    if config.auto_spans == "off" and unused:
        raise RapidOptionError(
            f"{flag_name(unused[0])} has no effect without {flag_name('auto_spans')}; name a scorer with it"
        )
    if config.auto_spans == "bm25" and (config.store or config.embedder):
        name = "store" if config.store else "embedder"
        raise RapidOptionError(
            f"{flag_name(name)} is for vectors, which {flag_name('auto_spans')} bm25 has none of; use dense or hybrid"
        )
    if config.recall_report and not config.min_recall:
        raise RapidOptionError(
            f"{flag_name('recall_report')} has no effect without {flag_name('min_recall')}; add a bound, like 0.7"
        )
    if config.auto_spans == "off":
        return None
    options = _retrieval(config)
    try:
        embedder = None if config.auto_spans == "bm25" else Embedder(options.embedder).id
        if config.store:
            connect(config.store)
        if not config.min_recall:
            return None
        return RecallGuard(_report_path(config), options, embedder, _room(config), config.min_recall)
    except (EmbeddingError, RecallReportError, StoreError) as error:
        raise RapidOptionError(str(error)) from error


def _retrieval(config: RapidConfig) -> RetrievalOptions:
    return RetrievalOptions(config.auto_spans, embedder=config.embedder or None, store=config.store or None)


def _room(config: RapidConfig) -> int:
    """Tokens that are retrieved for a request."""
    return config.budget - config.head - config.recent


def _report_path(config: RapidConfig) -> Path:
    if config.recall_report:
        return Path(config.recall_report).expanduser()
    if not config.store or "://" in config.store:
        raise RapidOptionError(
            f"{flag_name('min_recall')} needs a recall report; make one with `rapid-sgl recall --save FILE` and name "
            f"it with {flag_name('recall_report')}"
        )
    return Path(config.store).expanduser() / FILE_NAME


def _one_torch_thread() -> None:
    """For a worker thread's start: embedding on all cores would take them from the scheduler."""
    import torch

    torch.set_num_threads(1)
