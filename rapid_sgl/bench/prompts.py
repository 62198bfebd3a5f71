"""Prompts of a measurement: a real text, a question about it, and an exact number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from rapid_sgl.bench import BenchError
from rapid_sgl.config import RapidConfig
from rapid_sgl.retrieval.pipeline import RetrievalOptions, Retriever
from rapid_sgl.retrieval.prompt import Prompt, PromptBuilder
from rapid_sgl.retrieval.spans import Span

QUESTION = "What are the rules that this text describes? List them one by one, in its own words."
# English prose and Python code have about four characters to a token.
CHARS_PER_TOKEN = 4
# Multiples of the golden ratio spread any number of starting points evenly over the text.
SPREAD = 0.6180339887


@dataclass(frozen=True)
class BenchPrompt:
    """Token ids of one request and the spans that its view is made of."""

    ids: list[int]
    spans: list[Span]


def bench_prompts(builder: PromptBuilder, context: int, count: int, config: RapidConfig) -> list[BenchPrompt]:
    """``count`` chat prompts of exactly ``context`` tokens about different parts of Python's reference.

    Args:
        builder: of the served model's tokenizer.
        context: tokens per prompt, the chat template and the question included.
        config: budget and windows that the spans are chosen for.

    Raises:
        BenchError: ``context`` is too short for the question or longer than the text.
    """
    prompts = [exact_prompt(builder, context, member) for member in range(count)]
    windows = {"budget": config.budget, "head": config.head, "recent": config.recent}
    retriever = Retriever(RetrievalOptions("bm25"))
    return [BenchPrompt(prompt.ids, retriever.spans(prompt, QUESTION, **windows)) for prompt in prompts]


def exact_prompt(builder: PromptBuilder, context: int, member: int = 0) -> Prompt:
    """A prompt of exactly ``context`` tokens; each ``member`` asks about another part of the text.

    Raises:
        BenchError: as for ``bench_prompts``.
    """
    text = _text_from(member)
    size = context * CHARS_PER_TOKEN
    prompt = builder.build(text[:size], QUESTION, None)
    while len(prompt) < context:
        if size > len(text):
            raise BenchError(
                f"context {context} is longer than the built-in text; use {len(prompt)} tokens or fewer"
            )
        size *= 2
        prompt = builder.build(text[:size], QUESTION, None)
    return _cut_to(prompt, context)


def _cut_to(prompt: Prompt, context: int) -> Prompt:
    """``prompt`` without the end of its document, so that it has ``context`` tokens."""
    first, last = prompt.document
    end = last - (len(prompt) - context)
    if end <= first:
        around = len(prompt) - (last - first)
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


def _text_from(member: int) -> str:
    """The whole reference, rotated to begin at the paragraph that is ``member``'s."""
    text = _reference()
    first = text.find("\n\n", int(member * SPREAD % 1 * len(text)))
    return text[first:].lstrip("\n") + text[:first]


@cache
def _reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n\n"
