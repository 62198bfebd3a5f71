"""Spans of a prompt that came without a question: finds what is asked and retrieves for it.

The question of a prompt is read off its text, by this rule:

1. *Turn.* What stands after the last user-message mark of the tokenizer's chat template, up to the mark
   that ends the message. The marks are found by rendering the template, so any template will do. Tool
   results that a template writes as user messages are passed over. A prompt without such a mark (no
   template, a plain completion) is one turn.
2. *Tail.* The last 400 characters of the turn, from a word on: in "document, then question" the question.
3. *Paragraphs.* Of the tail its last paragraphs, as few as hold three terms, or two and a question mark, so
   that the end of a document does not speak for the question below it.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tqdm import tqdm

from rapid_sgl.retrieval.bm25 import Bm25Index, query_terms
from rapid_sgl.retrieval.breaker import CircuitBreaker, GuardedStore
from rapid_sgl.retrieval.cache import SelectionCache
from rapid_sgl.retrieval.chunking import TokenizedText
from rapid_sgl.retrieval.decoding import TokenDecoder
from rapid_sgl.retrieval.embedding import Embedder
from rapid_sgl.retrieval.lru import Lru, content_key
from rapid_sgl.retrieval.pipeline import RetrievalOptions, Retriever, open_store
from rapid_sgl.retrieval.spans import Span
from rapid_sgl.retrieval.vectors import ChunkVectors

QUESTION_CHARS = 400  # 60 to 100 tokens of English
LEAST_TERMS = 3
QUESTION_MARKS = ("?", "？", "؟", "\u037e")  # the last one is Greek
# A document is cut up to a multiple of this many tokens: a question that is a few words longer moves the
# recent window, and would otherwise make another document of it.
EDGE_GRID = 256
TENANTS = 32
_USER, _ASSISTANT, _LAST = "\ue000user\ue000", "\ue000assistant\ue000", "\ue000last\ue000"


@dataclass(frozen=True)
class TurnMarks:
    """What a chat template writes around a user message; without white space at the ends."""

    opening: str  # before it
    closing: str  # behind it; "" where nothing common follows
    tool: str  # what tool results begin with where they are written as user messages, else ""


class PromptSelector:
    """Selects spans of bare token ids, for many tenants. Safe to share between threads.

    Args:
        tokenizer: the served model's.
        options: scorer, embedder and store.

    Raises:
        EmbeddingError: the scorer needs an embedding model that is not there.
        StoreError: ``options.store`` is a malformed URL.
    """

    def __init__(self, tokenizer: Any, options: RetrievalOptions) -> None:
        # bm25s counts with tqdm, whose default lock is a semaphore between processes: a server that is
        # killed with its children would end with a traceback about it.
        tqdm.set_lock(threading.RLock())
        self._tokenizer = tokenizer
        self._options = options
        self._embedder = None if options.scorer == "bm25" else Embedder(options.embedder)
        self._store = open_store(options, self._embedder) if options.store and self._embedder else None
        self._breaker = CircuitBreaker()
        self._decoder = TokenDecoder(tokenizer)
        # Chunks, indexes and vectors are kept per tenant: what one has sent must not even show in
        # how fast another one is answered.
        self._retrievers: Lru[Hashable, Retriever] = Lru(TENANTS)

    def warm_up(self) -> None:
        """Import what selecting needs, load the embedding model and open the store: about a second, ten
        with a model.

        Raises:
            EmbeddingError: the model cannot be used.
            StoreError: the store cannot be used for now.
        """
        Bm25Index(["warm up"]).scores("warm")
        # bm25s sets its own logger to DEBUG on import: a line for every document, in the server's log.
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        if self._embedder is not None:
            self._embedder.query("warm up")
        if self._store is not None:
            self._breaker.call(self._store.count)

    def select(
        self, ids: Sequence[int], *, budget: int, head: int, recent: int, tenant: Hashable = None
    ) -> list[Span]:
        """Spans of ``ids`` for the question that the prompt ends with; as ``spans.select_spans``.

        Args:
            tenant: whose caches are used.
        """
        prompt = self._decoder.decode(ids)
        asked = question(prompt.text, self._marks)
        last = len(prompt.ids) - recent
        edge = min(-(-last // EDGE_GRID) * EDGE_GRID, len(prompt.ids))
        document = _prefix(prompt, edge)
        inside = edge - last  # tokens of the recent window that the document still has
        return self._retriever(tenant).select(
            document,
            asked,
            budget=budget - recent + inside,
            head=head,
            recent=inside,
            document=content_key([document.text]),
        )

    @cached_property
    def _marks(self) -> TurnMarks | None:
        return turn_marks(self._tokenizer)

    def _retriever(self, tenant: Hashable) -> Retriever:
        return self._retrievers.get_or_make(tenant, lambda: self._new_retriever(tenant))

    def _new_retriever(self, tenant: Hashable) -> Retriever:
        return Retriever(self._options, SelectionCache(), self._new_vectors(tenant))

    def _new_vectors(self, tenant: Hashable) -> ChunkVectors | None:
        if self._embedder is None or self._store is None:
            return None if self._embedder is None else ChunkVectors(self._embedder)
        # Requests that name no tenant share what `rapid-sgl index` has stored.
        named = isinstance(tenant, tuple) and any(part is not None for part in tenant)
        store = self._store.apart(content_key([repr(tenant)])[:16]) if named else self._store
        return ChunkVectors(self._embedder, GuardedStore(store, self._breaker))


def turn_marks(tokenizer: Any) -> TurnMarks | None:
    """The marks of the tokenizer's chat template; None when it has none or they cannot be told."""
    first = {"role": "user", "content": _USER}
    second = {"role": "assistant", "content": _ASSISTANT}
    rendered = _render(tokenizer, [first, second, {"role": "user", "content": _LAST}])
    if rendered is None:
        return None
    before, answering, between, after = rendered
    opening = _common_prefix(before[::-1], between[::-1])[::-1].strip()
    if not opening:
        return None
    tool = ""
    with_tool = _render(tokenizer, [first, second, {"role": "tool", "content": _LAST}])
    if with_tool is not None and opening in with_tool[2]:
        tool = with_tool[2].rpartition(opening)[2].strip()
    return TurnMarks(opening, _common_prefix(answering, after).strip(), tool)


def question(text: str, marks: TurnMarks | None) -> str:
    """The question that a prompt ends with, by the rule above; "" for a prompt without words."""
    turn = last_turn(text, marks).strip()
    tail = turn[-QUESTION_CHARS:]
    if len(tail) < len(turn):
        tail = re.sub(r"^\S*\s", "", tail, count=1)
    asked = ""
    for paragraph in reversed(re.split(r"\n\s*\n", tail)):
        asked = f"{paragraph}\n\n{asked}".strip()
        if len(query_terms(asked)) >= (LEAST_TERMS - 1 if asked.endswith(QUESTION_MARKS) else LEAST_TERMS):
            break
    return asked


def last_turn(text: str, marks: TurnMarks | None) -> str:
    """The last user message of a rendered chat; all of ``text`` where none is marked."""
    if marks is None:
        return text
    end = len(text)
    while (start := text.rfind(marks.opening, 0, end)) >= 0:
        turn = text[start + len(marks.opening) : end].lstrip()
        if not (marks.tool and turn.startswith(marks.tool)):
            return turn.partition(marks.closing)[0] if marks.closing else turn
        end = start
    return text


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, str, str, str] | None:
    """What a chat template writes before, between and behind three messages."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # templates refuse what they do not know in whatever way their author chose
        return None
    parts = re.split("|".join((_USER, _ASSISTANT, _LAST)), text)
    return (parts[0], parts[1], parts[2], parts[3]) if len(parts) == 4 else None


def _common_prefix(left: str, right: str) -> str:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return left[:length]


def _prefix(prompt: TokenizedText, tokens: int) -> TokenizedText:
    """The first ``tokens`` tokens; a character that is cut in two is left out of the text."""
    return TokenizedText(
        prompt.slice(0, tokens), prompt.ids[:tokens], prompt.char_starts[:tokens], prompt.whole[:tokens]
    )
