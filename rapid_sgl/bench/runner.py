"""Run one batch of prompts on a server: all requests at once, every event timed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from rapid_sgl.bench import DRAFTING, BenchError
from rapid_sgl.bench.prompts import BenchPrompt
from rapid_sgl.bench.records import Run, StepMeans, Trace, make_run, step_means
from rapid_sgl.config import WIRE_PREFIX, RapidConfig
from rapid_sgl.http_client import Client, ServerInfo
from rapid_sgl.request import SPANS_KEY, spans_to_wire

# The server's totals are read while the batch is still decoding; this many more steps cover the reading.
SNAPSHOT_STEPS = 3


@dataclass(frozen=True)
class Sizes:
    """How one run is sampled."""

    new_tokens: int  # tokens per request inside the window
    temperature: float
    config: RapidConfig  # draft length, budget and windows of the drafting methods

    def max_new_tokens(self, method: str) -> int:
        """Tokens to ask for, so that nobody finishes while the server's totals are being read."""
        per_step = self.config.draft_length + 1 if method in DRAFTING else 1
        return self.new_tokens + SNAPSHOT_STEPS * per_step


class Side:
    """One method on one server.

    Args:
        method: one of ``rapid_sgl.bench.METHODS``.
        url: the server.
        info: what the server said of itself.
        weights: what drafts run on, ``rapid_drafter_weights``.
        draft_model: name of the server's separate draft model, which then is what drafts run on.
    """

    def __init__(
        self,
        method: str,
        url: str,
        info: ServerInfo,
        sizes: Sizes,
        weights: str = "same",
        draft_model: str | None = None,
    ) -> None:
        self.method, self._weights = method, weights
        self.weights = draft_model or weights  # as the report names them
        self.info, self._url, self._sizes = info, url, sizes
        self._client = new_client(url)
        self._counts_steps = rapid_report(info) is not None

    @property
    def name(self) -> str:
        """The method, with the drafter's weights where they are not the target's."""
        return self.method if self.weights == "same" else f"{self.method} {self.weights}"

    def run(self, prompts: Sequence[BenchPrompt]) -> Run:
        """Send all prompts at once, let every request finish, and measure.

        Raises:
            ServerError: a request was refused or the server is gone.
            BenchError: the run is too short to time.
        """
        sending = self._totals()
        progress = _Progress(len(prompts), self._sizes.new_tokens)
        with ThreadPoolExecutor(len(prompts)) as pool:
            pending = [pool.submit(self._stream, prompt, progress) for prompt in prompts]
            opened = None
            if len(prompts) > 1:
                progress.all_started.wait()
                opened = self._totals()
            progress.one_complete.wait()
            closed = self._totals()
            traces = [item.result() for item in pending]
        steps = _means_between(sending, closed)
        if steps and steps.batch < len(prompts):
            # Somebody decoded before the others had arrived. Few steps may be over before the second reading.
            steps = _means_between(opened, closed) or steps
        return make_run(traces, self._sizes.new_tokens, steps)

    def _stream(self, prompt: BenchPrompt, progress: _Progress) -> Trace:
        client = new_client(self._url)  # a session of its own: they are not made for threads
        events: list[tuple[float, int]] = []
        meta: dict[str, Any] = {}
        progress.send_together.wait()
        sent = time.perf_counter()
        try:
            for chunk in client.stream(incremental=self.info.incremental_stream, **self._body(prompt)):
                events.append((chunk.arrived, chunk.completion_tokens))
                meta = chunk.meta_info
                progress.note(first=len(events) == 1, tokens=chunk.completion_tokens)
        finally:
            progress.ended()
        if not events:
            raise BenchError(f"{self._url} closed a stream without an answer; look at the server's log")
        return Trace(sent, events, int(meta.get("prompt_tokens", 0)), int(meta.get("cached_tokens", 0)))

    def _body(self, prompt: BenchPrompt) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": self._sizes.temperature,
            "max_new_tokens": self._sizes.max_new_tokens(self.method),
            "ignore_eos": True,
        }
        if self._counts_steps:
            sampling["custom_params"] = custom_params(self.method, self._sizes.config, prompt, self._weights)
        return {"input_ids": prompt.ids, "sampling_params": sampling}

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


def custom_params(
    method: str, config: RapidConfig, prompt: BenchPrompt, weights: str = "same"
) -> dict[str, Any]:
    """The request options that make the difference between the methods."""
    if method not in DRAFTING:
        return {f"{WIRE_PREFIX}drafter": "off"}
    wire = replace(config, drafter=method, drafter_weights=weights).to_wire()
    return {**wire, SPANS_KEY: spans_to_wire(prompt.spans)}


def rapid_report(info: ServerInfo) -> dict[str, Any] | None:
    """RAPID's part of ``/server_info``; None on a server without it."""
    states = info.raw.get("internal_states") or [{}]
    report: dict[str, Any] | None = states[0].get("rapid")
    return report


def new_client(url: str) -> Client:
    """A client with a session of its own; the key comes from OPENAI_API_KEY, as for ``rapid-sgl ask``."""
    return Client(url, os.environ.get("OPENAI_API_KEY"))


def kv_slots(method: str, context: int, batch: int, sizes: Sizes) -> int:
    """KV slots that a cell needs at its fullest."""
    verifying = 2 * (sizes.config.draft_length + 1)  # reserved by SGLang for two steps ahead
    return batch * (context + sizes.max_new_tokens(method) + verifying)


def check_fits(side: Side, context: int, batch: int, sizes: Sizes) -> None:
    """Refuse a cell that the server would reject or queue.

    Raises:
        BenchError: naming the limit and the flag that changes it.
    """
    raw, answer = side.info.raw, sizes.max_new_tokens(side.method)
    room = side.info.max_prompt_tokens(answer)
    if context > room:
        raise BenchError(
            f"context {context} with {answer} new tokens is more than the server takes: "
            f"prompts may have {room} tokens; use shorter contexts or a model with a longer one"
        )
    running = raw.get("max_running_requests")
    if running and batch > running:
        raise BenchError(
            f"batch {batch} exceeds the server's {running} running requests; "
            "use a smaller --batch or start the server with a larger --max-running-requests"
        )
    slots = kv_slots(side.method, context, batch, sizes)
    pool = raw.get("max_total_num_tokens")
    if pool and slots > pool:
        raise BenchError(
            f"{batch} requests of {context} tokens need {slots} KV slots, the server has {pool}; "
            f"start it with --max-total-tokens {slots} or more"
        )
