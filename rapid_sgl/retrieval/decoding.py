"""Text of a prompt of which only the token ids are known, with the place of every token in it.

A server gets prompts as ids, special tokens included, and its spans are ranges of just these
ids: tokenising the text again could split it differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rapid_sgl.retrieval.chunking import TokenizedText

_REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
# Tokens tried together for one character: 4 bytes, each a token of its own, and as many again
# where a token ends one character and begins the next.
_MOST_TOGETHER = 8
_MOST_REMEMBERED = 500_000  # strings of a few characters; several times the largest vocabularies


class TokenDecoder:
    """Decodes prompts of one tokenizer; remembers the texts of tokens it has met.

    Safe to share between threads.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[tuple[int, ...], str] = {}
        # SentencePiece tokenizers drop the space in front of a text's first token, so each
        # token is decoded behind another one.
        self._anchor: tuple[int, ...] = tuple(tokenizer.encode("a", add_special_tokens=False))
        self._anchor_text = self._raw(self._anchor)

    def decode(self, ids: Sequence[int]) -> TokenizedText:
        """The text of ``ids`` and where each token begins in it."""
        ids = list(ids)
        alone = {token: self._text((token,)) for token in set(ids)}
        parts = [alone[token] for token in ids]
        joined: list[tuple[int, int]] = []  # ranges of tokens that are read together
        for index in [index for index, part in enumerate(parts) if _REPLACEMENT in part]:
            if joined and index < joined[-1][1]:
                continue
            parts[index], count = self._character(ids, index)
            parts[index + 1 : index + count] = [""] * (count - 1)
            joined.append((index, index + count))
        starts = [0, *accumulate(map(len, parts))][:-1]
        whole = [True] * len(ids)
        for first, last in joined:
            # A cut before another one of several tokens would fall inside a character.
            starts[first + 1 : last] = [starts[first]] * (last - first - 1)
            whole[first + 1 : last] = [False] * (last - first - 1)
        return TokenizedText("".join(parts), ids, starts, whole)

    def _character(self, ids: list[int], index: int) -> tuple[str, int]:
        """Text of the token at ``index``, with as many of the next ones as it takes to be readable."""
        first = self._text((ids[index],))
        if _REPLACEMENT not in first:
            return first, 1
        for count in range(2, 1 + min(_MOST_TOGETHER, len(ids) - index)):
            text = self._text(tuple(ids[index : index + count]))
            if _REPLACEMENT not in text:
                return text, count
        return first, 1  # bytes that are no text, or U+FFFD itself

    def _text(self, ids: tuple[int, ...]) -> str:
        text = self._texts.get(ids)
        if text is None:
            if len(self._texts) >= _MOST_REMEMBERED:
                self._texts = {}
            text = self._raw((*self._anchor, *ids)).removeprefix(self._anchor_text)
            self._texts[ids] = text
        return text

    def _raw(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
