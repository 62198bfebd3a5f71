"""One prompt: the model's chat template around a document and a question, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rapid_sgl.retrieval.chunking import CHUNK_TOKENS, Chunk, TokenizedText, chunk, tokenize
from rapid_sgl.retrieval.spans import Span

# Stand-ins for document and question while the chat template is rendered: a template may trim
# or wrap its message, so the two are put in as tokens afterwards. Private-use characters do
# not occur in templates.
_DOCUMENT, _QUESTION = "\ue000document\ue000", "\ue000question\ue000"
_MESSAGE = f"{_DOCUMENT}\n\nAnswer from the text above. Question: {_QUESTION}"
_PLAIN = f"{_MESSAGE}\nAnswer:"  # for models without a chat template
_GAP = "\n\n[...]\n\n"  # marks text left out


class PromptTooLong(ValueError):
    """The prompt exceeds what the model takes; the text has both numbers and the fix."""


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt; document tokens are ids[document[0]:document[1]].

    ``chunks`` tile the document in prompt coordinates. Documents come first, the question
    last: prompts about the same document share a prefix, which the server caches.
    """

    ids: list[int]
    document: Span
    chunks: list[Chunk]
    source: TokenizedText  # the document; its token 0 is ids[document[0]]
    truncated_tokens: int = 0  # document tokens left out of the middle

    def __len__(self) -> int:
        return len(self.ids)

    def document_text(self, span: Span) -> str:
        """The document's text within a token range of the prompt; empty outside the document."""
        first, last = self.document
        return self.source.slice(max(span[0] - first, 0), min(span[1], last) - first)


class PromptBuilder:
    """Builds prompts for one tokenizer.

    Args:
        tokenizer: a fast Hugging Face tokenizer, with or without a chat template.
        chunk_tokens: target size of the document's chunks.
    """

    def __init__(self, tokenizer: Any, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens
        before, rest = _rendered(tokenizer).split(_DOCUMENT)
        between, after = rest.split(_QUESTION)
        # Templates spell out the special tokens they want; a plain prompt gets the tokenizer's own.
        plain = tokenizer.chat_template is None
        self._before: list[int] = tokenizer.encode(before, add_special_tokens=plain)
        self._between: list[int] = tokenizer.encode(between, add_special_tokens=False)
        self._after: list[int] = tokenizer.encode(after, add_special_tokens=False)
        self._gap: list[int] = tokenizer.encode(_GAP, add_special_tokens=False)

    def build(
        self, document: str, question: str, limit: int | None, *, truncate_middle: bool = False
    ) -> Prompt:
        """The prompt that asks ``question`` about the whole ``document``.

        Args:
            limit: tokens that the model takes, room for the answer already subtracted; None for
                a prompt that is only retrieved from.
            truncate_middle: cut the middle of the document where it does not fit, instead of
                refusing it.

        Raises:
            PromptTooLong: more than ``limit`` tokens and not allowed to truncate, or no room
                for any of the document.
        """
        tokens = tokenize(document, self.tokenizer)
        asked = self._asked(question)
        total, omitted = len(self._before) + len(tokens.ids) + len(asked), 0
        if limit is not None and total > limit:
            if not truncate_middle:
                raise PromptTooLong(
                    f"the prompt has {total} tokens, but the model takes {limit} besides the answer; "
                    "use a shorter document, --truncate middle, or a model with a longer context"
                )
            room = limit - len(self._before) - len(asked)
            cut = self._cut_middle(document, tokens.char_starts, room)
            whole, tokens = tokens, tokenize(cut, self.tokenizer)
            omitted = len(whole.ids) - len(tokens.ids)
        start = len(self._before)
        chunks = chunk(tokens, size=self._chunk_tokens, offset=start)
        ids = [*self._before, *tokens.ids, *asked]
        return Prompt(ids, (start, start + len(tokens.ids)), chunks, tokens, omitted)

    def build_excerpt(self, prompt: Prompt, spans: Sequence[Span], question: str) -> list[int]:
        """Token ids of plain RAG's short prompt: the same question about only ``spans`` of ``prompt``."""
        document: list[int] = []
        for start, end in spans:
            document += [*(self._gap if document else ()), *prompt.ids[start:end]]
        return [*self._before, *document, *self._asked(question)]

    def excerpt_room(self, limit: int, question: str) -> int:
        """Document tokens that an excerpt prompt of ``limit`` tokens can carry, its gap marks paid for."""
        marks = len(self._gap) * (limit // self._chunk_tokens)
        return limit - len(self._before) - len(self._asked(question)) - marks

    def _asked(self, question: str) -> list[int]:
        return [*self._between, *tokenize(question, self.tokenizer).ids, *self._after]

    def _cut_middle(self, text: str, char_starts: Sequence[int], room: int) -> str:
        """``text`` without its middle, so that it has at most ``room`` tokens."""
        keep = room - len(self._gap)
        while keep >= 2:
            left, right = char_starts[keep // 2], char_starts[len(char_starts) - keep // 2]
            cut = text[:left] + _GAP + text[right:]
            excess = len(tokenize(cut, self.tokenizer).ids) - room
            if excess <= 0:
                return cut
            keep -= excess  # tokens may split differently at the new joints
        raise PromptTooLong(f"only {room} tokens are left for the document; ask for fewer new tokens")


def _rendered(tokenizer: Any) -> str:
    if tokenizer.chat_template is None:
        return _PLAIN
    messages = [{"role": "user", "content": _MESSAGE}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
