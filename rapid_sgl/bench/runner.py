"""Run one batch of prompts on a server: all requests at once, every event timed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from rapid_sgl.bench import DRAFTING, RETRIEVING, BenchError
from rapid_sgl.bench.limits import Sizes
from rapid_sgl.bench.records import Run, StepMeans, Trace, make_run, step_means
from rapid_sgl.config import WIRE_PREFIX, RapidConfig
from rapid_sgl.http_client import Client, ServerInfo
from rapid_sgl.request import SPANS_KEY, spans_to_wire
from rapid_sgl.retrieval.spans import Span


@dataclass(frozen=True)
class Asked:
    """One request as it is sent: token ids, and spans where the method takes them."""

    ids: list[int]
    spans: list[Span] = field(default_factory=list)


class Side:
    """One method on one server.

    Args:
        method: one of ``rapid_sgl.bench.METHODS``.
        url: the server.
        info: what the server said of itself.
        weights: what drafts run on, ``rapid_drafter_weights``.
        draft_model: name of the server's separate draft model, which then is what drafts run on.
        retrieval: one of ``rapid_sgl.bench.RETRIEVALS``.
        varied: options that tell this side from others of the same method; already in ``sizes.config``.
    """

    def __init__(
        self,
        method: str,
        url: str,
        info: ServerInfo,
        sizes: Sizes,
        weights: str = "same",
        draft_model: str | None = None,
        retrieval: str = "bm25",
        varied: Mapping[str, Any] | None = None,
    ) -> None:
        self.method, self._weights = method, weights
        self.weights = draft_model or weights  # as the report names them
        self.retrieval = retrieval if method in RETRIEVING else None
        self.varied = dict(varied or {})
        self.info, self.url, self.sizes = info, url, sizes
        self._client = new_client(url)
        self._counts_steps = rapid_report(info) is not None

    @property
    def name(self) -> str:
        """The method, with what sets it apart from others of the same one."""
        weights = [] if self.weights == "same" else [self.weights]
        retrieval = [self.retrieval] if self.retrieval not in (None, "bm25") else []
        varied = [f"{name}={value}" for name, value in self.varied.items()]
        return " ".join([self.method, *weights, *retrieval, *varied])

    def run(self, asked: Sequence[Asked], temperature: float = 0.0) -> Run:
        """Send all requests at once, let every one finish, and measure.

        Raises:
            ServerError: a request was refused or the server is gone.
            BenchError: the run is too short to time.
        """
        sending = self._totals()
        progress = _Progress(len(asked), self.sizes.new_tokens)
        with ThreadPoolExecutor(len(asked)) as pool:
            pending = [pool.submit(self._stream, one, temperature, progress) for one in asked]
            opened = None
            if len(asked) > 1:
                progress.all_started.wait()
                opened = self._totals()
            progress.one_complete.wait()
            closed = self._totals()
            traces = [item.result() for item in pending]
        steps = _means_between(sending, closed)
        if steps and steps.batch < len(asked):
            # Somebody decoded before the others had arrived. Few steps may be over before the second reading.
            steps = _means_between(opened, closed) or steps
        return make_run(traces, self.sizes.new_tokens, steps)

    def prefill(self, asked: Sequence[Asked]) -> None:
        """Bring prompts into the prefix cache, with one token of an answer each."""
        for one in asked:
            self._client.generate(input_ids=one.ids, sampling_params={"temperature": 0, "max_new_tokens": 1})

    def forget_prompts(self) -> None:
        """Empty the server's prefix cache, which takes until the last request has let go of it."""
        from rapid_sgl.http_client import ServerError

        for attempt in range(20):
            try:
                self._client.flush_cache()
                return
            except ServerError:
                if attempt == 19:
                    raise
                time.sleep(0.5)

    def _stream(self, asked: Asked, temperature: float, progress: _Progress) -> Trace:
        client = new_client(self.url)  # a session of its own: they are not made for threads
        events: list[tuple[float, int]] = []
        meta: dict[str, Any] = {}
        body = self._body(asked, temperature)
        progress.send_together.wait()
        sent = time.perf_counter()
        try:
            for chunk in client.stream(incremental=self.info.incremental_stream, **body):
                events.append((chunk.arrived, chunk.completion_tokens))
                meta = chunk.meta_info
                progress.note(first=len(events) == 1, tokens=chunk.completion_tokens)
        finally:
            progress.ended()
        if not events:
            raise BenchError(f"{self.url} closed a stream without an answer; look at the server's log")
        return Trace(
            sent,
            events,
            int(meta.get("prompt_tokens", 0)),
            int(meta.get("cached_tokens", 0)),
            int(meta.get("spec_verify_ct") or 0),
            int(meta.get("spec_num_proposed_drafts") or 0),
            int(meta.get("spec_num_correct_drafts") or 0),
            tuple(meta.get("spec_correct_drafts_histogram") or ()),
        )

    def _body(self, asked: Asked, temperature: float) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "max_new_tokens": self.sizes.max_new_tokens(self.method),
            "ignore_eos": True,
        }
        if self._counts_steps:
            sampling["custom_params"] = custom_params(self.method, self.sizes.config, asked, self._weights)
        return {"input_ids": asked.ids, "sampling_params": sampling}

    def _totals(self) -> dict[str, Any] | None:
        return rapid_report(self._client.info()) if self._counts_steps else None


class _Progress:
    """How far the streams of one run are; shared by their threads.

    ``all_started`` is set when every request has its first token, ``one_complete`` when one has all
    its tokens; both also when a stream ends, so that nobody waits for one that failed.
    """

    def __init__(self, count: int, new_tokens: int) -> None:
        self.send_together = threading.Barrier(count)
        self.all_started, self.one_complete = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._waiting, self._new_tokens = count, new_tokens

    def note(self, *, first: bool, tokens: int) -> None:
        with self._lock:
            self._waiting -= first
            if self._waiting == 0:
                self.all_started.set()
        if tokens >= self._new_tokens:
            self.one_complete.set()

    def ended(self) -> None:
        self.all_started.set()
        self.one_complete.set()


def _means_between(before: dict[str, Any] | None, after: dict[str, Any] | None) -> StepMeans | None:
    return step_means(before, after) if before is not None and after is not None else None


def custom_params(method: str, config: RapidConfig, asked: Asked, weights: str = "same") -> dict[str, Any]:
    """The request options that make the difference between the methods."""
    if method not in DRAFTING:
        return {f"{WIRE_PREFIX}drafter": "off"}  # which stops copies too
    if method == "copy":
        # A prompt that fits the budget is not drafted by a model.
        config = replace(config, copy="on", budget=max(config.budget, len(asked.ids)))
    drafter = "rag" if method == "rag" else "view"
    wire = replace(config, drafter=drafter, drafter_weights=weights).to_wire()
    return {**wire, SPANS_KEY: spans_to_wire(asked.spans)} if asked.spans else wire


def rapid_report(info: ServerInfo) -> dict[str, Any] | None:
    """RAPID's part of ``/server_info``; None on a server without it."""
    states = info.raw.get("internal_states") or [{}]
    report: dict[str, Any] | None = states[0].get("rapid")
    return report


def new_client(url: str) -> Client:
    """A client with a session of its own; the key comes from OPENAI_API_KEY, as for ``rapid-sgl ask``."""
    return Client(url, os.environ.get("OPENAI_API_KEY"))
