"""Passages of a program's text as token ranges of the prompt that the server makes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rapid_sgl.retrieval.chunking import TokenizedText
from rapid_sgl.retrieval.decoding import TokenDecoder
from rapid_sgl.retrieval.pipeline import RetrievalOptions, Retriever
from rapid_sgl.retrieval.spans import Span


class Passages:
    """Finds and reads passages with the served model's tokenizer. Safe to share between threads.

    Args:
        load_tokenizer: called at first use.
        retrieval: how passages are found; None: by words, which needs no model.
    """

    def __init__(self, load_tokenizer: Callable[[], Any], retrieval: RetrievalOptions | None = None) -> None:
        self._load_tokenizer = load_tokenizer
        self._retriever = Retriever(retrieval or RetrievalOptions("bm25"))
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._decoder: TokenDecoder | None = None

    @property
    def tokenizer(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
                self._decoder = TokenDecoder(self._tokenizer)
            return self._tokenizer

    def tokens(self, text: str) -> TokenizedText:
        """``text`` as ``/generate`` tokenises it, special tokens included, with the place of every token."""
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        assert self._decoder is not None
        return self._decoder.decode(ids)

    def find(self, text: str, query: str, *, budget: int, head: int = 0, recent: int = 0) -> list[Span]:
        """Spans of ``text`` that answer ``query``; see ``retrieval.spans.select_spans``.

        With the windows at 0 they are simply the best ``budget`` tokens, all of a text that is no longer
        than that excepted, which has none.
        """
        return self._retriever.select(self.tokens(text), query, budget=budget, head=head, recent=recent)

    def quote(self, text: str, span: Span) -> str:
        """What the tokens of ``span`` say."""
        return self.tokens(text).slice(*span)
