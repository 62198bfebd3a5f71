"""From a sample to token ids: chat template, truncation in the middle, chunks to retrieve from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from rapid_sgl.eval import EvalError
from rapid_sgl.eval.samples import Sample
from rapid_sgl.retrieval.chunking import Chunk, TokenizedText, chunk, tokenize
from rapid_sgl.retrieval.spans import Span

_MESSAGE = "\ue000message\ue000"  # stands for the user's message while the template is rendered


@dataclass(frozen=True)
class EvalPrompt:
    """A tokenised prompt; ``context`` are the token positions in ``ids`` of what is left of the sample's context."""

    ids: list[int]
    message: TokenizedText  # the user's message; its token 0 is ids[offset]
    offset: int
    context: Span

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Chunks of the context, in prompt coordinates."""
        first, last = (bound - self.offset for bound in self.context)
        base = self.message.char_starts[first] if first < last else 0
        part = TokenizedText(
            self.message.slice(first, last),
            self.message.ids[first:last],
            [start - base for start in self.message.char_starts[first:last]],
            self.message.whole[first:last],
        )
        return chunk(part, offset=self.context[0])

    def text(self, span: Span) -> str:
        """The text of a token range of the message."""
        return self.message.slice(span[0] - self.offset, span[1] - self.offset)


class Prompts:
    """Builds prompts for one model.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        chat: wrap messages in the model's chat template; None: if it has one.

    Raises:
        EvalError: ``chat`` is asked for and the tokenizer has no template.
    """

    def __init__(self, tokenizer: Any, chat: bool | None = None) -> None:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_template:
            raise EvalError("the model's tokenizer has no chat template; use --template plain")
        self.tokenizer = tokenizer
        self.chat = has_template if chat is None else chat
        self._frame = lru_cache(maxsize=1024)(self._make_frame)
        self.tokens = lru_cache(maxsize=16)(self._count)

    def length(self, sample: Sample) -> int:
        """Tokens of prompt and longest answer."""
        before, after = self._frame(sample.system, sample.chat, sample.answer_prefix)
        message = sample.before + sample.context + sample.after
        encoded = self.tokenizer(message, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return len(before) + len(encoded["input_ids"]) + len(after) + sample.max_new_tokens

    def build(self, sample: Sample, limit: int | None = None) -> EvalPrompt:
        """The whole prompt; of more than ``limit`` tokens its middle is left out, as LongBench and InfiniteBench do.

        Raises:
            EvalError: no room for any of the message.
        """
        before, after = self._frame(sample.system, sample.chat, sample.answer_prefix)
        text = sample.before + sample.context + sample.after
        start, end = len(sample.before), len(sample.before) + len(sample.context)
        tokens = tokenize(text, self.tokenizer)
        room = len(tokens.ids) if limit is None else limit - len(before) - len(after)
        if room < 2:
            raise EvalError(f"{limit} tokens leave no room for the message of {sample.id}")
        whole, keep = tokens, room
        while len(tokens.ids) > room:
            left = whole.char_starts[keep // 2]
            right = whole.char_starts[len(whole.ids) - keep // 2]
            tokens = tokenize(text[:left] + text[right:], self.tokenizer)
            cut = (_after_cut(start, left, right), _after_cut(end, left, right))
            keep -= max(2, len(tokens.ids) - room)  # tokens may split differently at the joint
            if keep < 2:
                raise EvalError(f"{limit} tokens leave no room for the message of {sample.id}")
        if tokens is not whole:
            start, end = cut
        offset = len(before)
        # A first token that began in front of the context belongs to it: " word" is one token.
        first = _token_at(tokens, start + 1) - 1 if start < end else _token_at(tokens, end)
        context = (first + offset, _token_at(tokens, end) + offset)
        return EvalPrompt([*before, *tokens.ids, *after], tokens, offset, context)

    def build_excerpt(
        self, sample: Sample, prompt: EvalPrompt, spans: Sequence[Span], budget: int
    ) -> EvalPrompt:
        """RAG's short prompt: the same question with only ``spans`` of ``prompt`` for context.

        At most ``budget`` tokens; without spans the context is cut in the middle, and so is a message that
        is too long even without context.
        """
        if not spans:
            return self.build(sample, budget)
        texts = [prompt.text(span).strip() for span in spans]
        if sample.numbered_excerpts:
            texts = [f"Retrieved chunk {number}: {text}" for number, text in enumerate(texts, 1)]
        before = sample.extra.get("excerpt_before", sample.before)
        return self.build(replace(sample, before=before, context="\n\n".join(texts)), budget)

    def excerpt_room(self, sample: Sample, budget: int) -> int:
        """Context tokens that an excerpt of ``budget`` prompt tokens can carry, marks between chunks paid for."""
        bare = self.length(replace(sample, context="")) - sample.max_new_tokens
        return max(0, int(0.95 * (budget - bare)))

    def _make_frame(self, system: str | None, chat: bool, prefix: str) -> tuple[list[int], list[int]]:
        """Token ids before and behind the message."""
        if not (self.chat and chat):
            before: list[int] = self.tokenizer.encode("", add_special_tokens=True)  # a BOS where it has one
            return before, self._encode(prefix)
        messages = [{"role": "user", "content": _MESSAGE}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates refuse in whatever way their author chose
            if system is None:
                raise EvalError(f"the model's chat template refuses a user message: {error}") from error
            return self._make_frame(None, chat, prefix)  # without system messages it has to do without
        head, tail = text.split(_MESSAGE)
        return self._encode(head), self._encode(tail + prefix)

    def _count(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def _after_cut(char: int, left: int, right: int) -> int:
    """Where a character stands once the text [left, right) is gone."""
    return min(char, left) if char < right else char - (right - left)


def _token_at(tokens: TokenizedText, char: int) -> int:
    """The first token that starts at or behind a character."""
    low, high = 0, len(tokens.ids)
    while low < high:
        middle = (low + high) // 2
        if tokens.char_starts[middle] < char:
            low = middle + 1
        else:
            high = middle
    return low
