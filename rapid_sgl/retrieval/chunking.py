"""Cut a document into chunks that are ranges of its own tokens.

A draft row is made of KV slots, one per prompt token, so a chunk has to be a token range of
the prompt as served: text is tokenised once, and chunk bounds are token bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# The default draft row keeps 448 tokens for retrieved spans (budget 1024 less 64 head and
# 512 recent): chunks of 128 let it hold passages from three or four places of the document.
CHUNK_TOKENS = 128

# Raise when bounds change: stored chunks of another version are then told apart.
CHUNKER_VERSION = 2

_SENTENCE_MARKS = ".!?:;"
_WIDE_SENTENCE_MARKS = "。！？；…"
_CLOSING = "\"'`)]}»”’」』）】》"
# Code and markup: a line that begins like this belongs to the line below it (heading, comment,
# decorator), or to the line above it (closing bracket).
_INTRODUCING = ("#", "//", "@")
_ENDING = ("}", "]", ")")
_NEAR = 64  # characters looked at on either side of a cut
_LINE = 256  # characters looked back for the start of a line


class TokenizerError(ValueError):
    """The model's tokenizer cannot say which characters a token stands for."""


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a prompt and the text they stand for.

    ``text`` runs from the first character of token ``start`` to the first character of
    token ``end``, so the texts of all chunks join to the document.
    """

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class TokenizedText:
    """A text and its tokens."""

    text: str
    ids: list[int]
    char_starts: list[int]  # per token: index of its first character
    whole: list[bool]  # per token: it starts with a character of its own, not inside the previous token's

    def slice(self, start: int, end: int) -> str:
        """Text from the first character of token ``start`` to the first one of token ``end``."""
        if start >= end:
            return ""
        first = self.char_starts[start] if start else 0
        last = self.char_starts[end] if end < len(self.ids) else len(self.text)
        return self.text[first:last]


def tokenize(text: str, tokenizer: Any) -> TokenizedText:
    """Tokenise a part of a prompt: no special tokens are added, and none are recognised in
    ``text``, so a document cannot end the user's turn by spelling ``<|im_end|>``.

    Args:
        tokenizer: a fast Hugging Face tokenizer.

    Raises:
        TokenizerError: the tokenizer is not a fast one.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise TokenizerError(
            f"{type(tokenizer).__name__} has no offset mapping, which chunking needs; "
            "serve the model with a fast tokenizer (a tokenizer.json beside the weights)"
        )
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )
    starts: list[int] = []
    whole: list[bool] = []
    covered = 0
    for start, end in encoded["offset_mapping"]:
        starts.append(max(start, starts[-1]) if starts else start)
        # Byte-level tokens split characters: " Ø" may be the tokens " \xc3" and "\x98".
        whole.append(start >= covered)
        covered = max(covered, end)
    return TokenizedText(text, list(encoded["input_ids"]), starts, whole)


def chunk(
    document: TokenizedText, *, size: int = CHUNK_TOKENS, offset: int = 0, overlap: int = 0
) -> list[Chunk]:
    """Cut a tokenised document into chunks of at most ``size`` tokens.

    A chunk is closed in the second half of its room, at the strongest boundary found there
    (see ``_boundary_strength``; the last of equals). Bounds depend on the text before them and
    ``size`` tokens ahead, so documents with a common prefix have its chunks in common.

    Args:
        size: tokens per chunk at most, 1 or more.
        offset: position of the document's first token in the prompt; added to every bound.
        overlap: a chunk repeats up to this many tokens of the one before, and about half of
            them at least, from a boundary on. 0: every token belongs to exactly one chunk.

    Returns:
        Chunks whose starts and ends both rise, without a gap between them.
    """
    if size < 1:
        raise ValueError(f"chunk size {size} is not positive; use 1 or more tokens")
    if not 0 <= 2 * overlap < max(size, 1):
        raise ValueError(
            f"overlap {overlap} is out of range; use 0 to {(size - 1) // 2} for chunks of {size}"
        )
    chunks = []
    start, total = 0, len(document.ids)
    while start < total:
        end = _chunk_end(document, start, size)
        chunks.append(Chunk(offset + start, offset + end, document.slice(start, end)))
        if end == total:
            break
        start = _best_cut(document, range(end - overlap // 2, end - overlap - 1, -1)) if overlap else end
    return chunks


def _chunk_end(document: TokenizedText, start: int, size: int) -> int:
    limit = start + size
    if limit >= len(document.ids):
        return len(document.ids)
    return _best_cut(document, range(start + (size + 1) // 2, limit + 1))


def _best_cut(document: TokenizedText, candidates: Sequence[int]) -> int:
    """The token before which it is best to cut; the last one of equals."""
    best = max(range(len(candidates)), key=lambda i: (_boundary_strength(document, candidates[i]), i))
    return candidates[best]


def _boundary_strength(document: TokenizedText, token: int) -> int:
    """How good a cut before ``token`` is.

    6 blank line that ends an indented block, 5 blank line, 4 sentence, 3 line, 2 line that belongs
    to its neighbour, 1 word, 0 within a word, -1 within a character.
    """
    if not document.whole[token]:
        return -1
    cut = document.char_starts[token]
    left, right = document.text[max(0, cut - _NEAR) : cut], document.text[cut : cut + _NEAR]
    before, after = left.rstrip(), right.lstrip()
    gap = left[len(before) :] + right[: len(right) - len(after)]
    if "\n" in gap:
        line_end = cut - len(left) + len(before)
        line_start = document.text.rfind("\n", max(0, line_end - _LINE), line_end) + 1
        line = document.text[line_start or max(0, line_end - _LINE) : line_end]
        strength = _line_strength(line, gap, after)
        if strength:
            return strength
    mark = before.rstrip(_CLOSING)[-1:]
    if mark and (mark in _WIDE_SENTENCE_MARKS or (gap and mark in _SENTENCE_MARKS)):
        return 4
    if "\n" in gap:
        return 3
    return 1 if gap else 0


def _line_strength(line: str, gap: str, after: str) -> int:
    """Strength of a cut at the end of ``line``, 0 where the line's last mark decides.

    Args:
        gap: white space between this line and the next one.
        after: text from the next line's first visible character on.
    """
    text = line.lstrip()
    indent, next_indent = len(line) - len(text), len(gap) - gap.rfind("\n") - 1
    if next_indent > indent or text.startswith(_INTRODUCING) or after.startswith(_ENDING):
        return 2
    if gap.count("\n") > 1:
        return 6 if next_indent < indent else 5
    return 0
