"""Prompts of a measurement: a task, an exact number of tokens, and the spans that retrieval finds for it."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.workloads import CHARS_PER_TOKEN, Task, make_task
from rapid_sgl.config import RapidConfig
from rapid_sgl.retrieval.embedding import Embedder
from rapid_sgl.retrieval.pipeline import SCORERS, RetrievalOptions, Retriever
from rapid_sgl.retrieval.prompt import Prompt, PromptBuilder
from rapid_sgl.retrieval.spans import Span, merge_adjacent, select_spans
from rapid_sgl.retrieval.vectors import ChunkVectors


@dataclass(frozen=True)
class BenchPrompt:
    """One request; two are equal only when they are the same one."""

    prompt: Prompt
    question: str
    prefix: list[int]  # token ids of the answer's beginning, the last ones of ``ids``
    source: Span | None  # tokens of the prompt that the answer repeats
    member: int

    @property
    def ids(self) -> list[int]:
        return [*self.prompt.ids, *self.prefix]


@dataclass(frozen=True)
class Found:
    """What retrieval chose for a prompt, and how long it took the first time (index included)."""

    spans: list[Span]
    ms: float


def bench_prompts(
    builder: PromptBuilder, context: int, count: int, workload: str = "answer"
) -> list[BenchPrompt]:
    """``count`` chat prompts of exactly ``context`` tokens about different parts of Python's reference.

    Args:
        builder: of the served model's tokenizer.
        context: tokens per prompt; chat template, question and the answer's beginning included.
        workload: one of ``rapid_sgl.bench.WORKLOADS``.

    Raises:
        BenchError: ``context`` is too short for the task or longer than the text.
    """
    return [exact_prompt(builder, context, member, workload) for member in range(count)]


def exact_prompt(
    builder: PromptBuilder, context: int, member: int = 0, workload: str = "answer"
) -> BenchPrompt:
    """A prompt of exactly ``context`` tokens; each ``member`` asks about another part of the text.

    Raises:
        BenchError: as for ``bench_prompts``.
    """
    task = make_task(workload, member, context)
    prefix = builder.tokenizer.encode(task.prefix, add_special_tokens=False) if task.prefix else []
    room, size = context - len(prefix), context * CHARS_PER_TOKEN
    prompt = builder.build(task.text[:size], task.question, None)
    while len(prompt) < room:
        if size > len(task.text):
            raise BenchError(
                f"context {context} is longer than the built-in text; use {len(prompt)} tokens or fewer"
            )
        size *= 2
        prompt = builder.build(task.text[:size], task.question, None)
    prompt = _cut_to(prompt, room, context)
    return BenchPrompt(prompt, task.question, prefix, _source(prompt, task, context), member)


def _cut_to(prompt: Prompt, tokens: int, context: int) -> Prompt:
    """``prompt`` without the end of its document, so that it has this many ``tokens``."""
    first, last = prompt.document
    end = last - (len(prompt) - tokens)
    if end <= first:
        around = len(prompt) - (last - first) + context - tokens
        raise BenchError(
            f"context {context} leaves no room for a text: template and question take {around} tokens; "
            f"use {around + 1} or more"
        )
    return replace(
        prompt,
        ids=[*prompt.ids[:end], *prompt.ids[last:]],
        document=(first, end),
        chunks=[chunk for chunk in prompt.chunks if chunk.end <= end],
    )


def _source(prompt: Prompt, task: Task, context: int) -> Span | None:
    """Tokens of the prompt that hold the task's source."""
    if task.source is None:
        return None
    starts, (first, last) = prompt.source.char_starts, prompt.document
    begin, end = (first + bisect_left(starts, place) for place in task.source)
    if end > last:
        raise BenchError(
            f"context {context} is too short for the passage that this workload repeats; use 2000 or more"
        )
    return begin, end


class SpanChooser:
    """Spans of prompts by kind of retrieval; each is chosen once and remembered."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, int, int, int], Found] = {}
        self._kept: list[BenchPrompt] = []  # so that no id is used twice

    def find(self, prompt: BenchPrompt, retrieval: str, config: RapidConfig) -> Found:
        """Spans within ``config.budget`` between its head and recent windows.

        Args:
            retrieval: a scorer; ``oracle``, the task's source; ``random``, any chunks.

        Raises:
            BenchError: the oracle of a workload that has no source.
        """
        return self._find(prompt, retrieval, config.budget, config.head, config.recent)

    def excerpt(self, builder: PromptBuilder, prompt: BenchPrompt, retrieval: str, budget: int) -> list[int]:
        """Token ids of plain RAG's short prompt: the same question about ``budget`` tokens of the document.

        Raises:
            BenchError: as for ``find``, and when the question alone fills the budget.
        """
        if len(prompt.ids) <= budget:
            return prompt.ids
        room = builder.excerpt_room(budget - len(prompt.prefix), prompt.question)
        if room <= 0:
            raise BenchError(f"budget {budget} leaves rag-only no room besides its question; raise it")
        spans = self._find(prompt, retrieval, room, 0, 0).spans
        return [*builder.build_excerpt(prompt.prompt, spans, prompt.question), *prompt.prefix]

    def _find(self, prompt: BenchPrompt, retrieval: str, budget: int, head: int, recent: int) -> Found:
        key = (id(prompt), retrieval, budget, head, recent)
        if key not in self._known:
            began = time.perf_counter()
            spans = _choose(prompt, retrieval, budget, head, recent)
            self._known[key] = Found(spans, 1e3 * (time.perf_counter() - began))
            self._kept.append(prompt)
        return self._known[key]


@cache
def _embedder() -> Embedder:
    return Embedder()


def _choose(prompt: BenchPrompt, retrieval: str, budget: int, head: int, recent: int) -> list[Span]:
    size = len(prompt.ids)
    if retrieval in SCORERS:
        # The model is loaded once, but every choice is timed as that of a document which nobody has seen.
        vectors = None if retrieval == "bm25" else ChunkVectors(_embedder())
        retriever = Retriever(RetrievalOptions(retrieval), vectors=vectors)
        return retriever.spans(prompt.prompt, prompt.question, budget=budget, head=head, recent=recent)
    if retrieval == "oracle":
        return _oracle(prompt, size, budget, head, recent)
    chunks = [(chunk.start, chunk.end) for chunk in prompt.prompt.chunks]
    middle = [(start, end) for start, end in chunks if start >= head and end <= size - recent]
    draw = random.Random(prompt.member)
    scores: Sequence[float] = [draw.random() + 1e-9 for _ in middle]
    return select_spans(middle, scores, budget=budget, prompt_len=size, head=head, recent=recent)


def _oracle(prompt: BenchPrompt, size: int, budget: int, head: int, recent: int) -> list[Span]:
    """The source as far as the budget goes; what is left of it after the source goes to the recent window."""
    if prompt.source is None:
        raise BenchError(
            "--retrieval oracle needs a workload whose source is known; use --workload quote, extract or rewrite"
        )
    start, end = max(prompt.source[0], head), min(prompt.source[1], size - recent)
    end = min(end, start + budget - head - recent)
    return merge_adjacent([(start, end)]) if size > budget and start < end else []
