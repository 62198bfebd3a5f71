"""From a long prompt and a question to the spans that a draft row attends to: one entry point.

    retriever = Retriever(RetrievalOptions(scorer="hybrid", store="~/chunks"))
    spans = retriever.spans(prompt, question, budget=1024, head=64, recent=512)

A server that has only token ids decodes them first (``decoding.TokenDecoder``) and calls
``select``. Calls may come from many threads; what a document costs is paid at its first question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapid_sgl.retrieval.cache import SelectionCache
from rapid_sgl.retrieval.chunking import CHUNK_TOKENS, CHUNKER_VERSION, Chunk, TokenizedText, chunk
from rapid_sgl.retrieval.embedding import Embedder, Reranker
from rapid_sgl.retrieval.lru import Lru, content_key
from rapid_sgl.retrieval.prompt import Prompt
from rapid_sgl.retrieval.scorers import (
    EMBEDDED_THRESHOLD,
    FUSION_CONSTANT,
    SIMILARITY_THRESHOLD,
    WORD_SHARE,
    Bm25Scorer,
    DenseScorer,
    DiverseScorer,
    HybridScorer,
    RerankingScorer,
    Scorer,
)
from rapid_sgl.retrieval.spans import Span, select_spans
from rapid_sgl.retrieval.store import ChunkStore
from rapid_sgl.retrieval.vectors import ChunkVectors

SCORERS = ("bm25", "dense", "hybrid")
CHUNKED_DOCUMENTS = 16


@dataclass(frozen=True)
class RetrievalOptions:
    """What spans are chosen by. Two equal records choose the same spans.

    Raises:
        ValueError: an unknown scorer, or re-ranking by vectors that scorer bm25 does not have.
    """

    scorer: str = "hybrid"  # one of SCORERS
    embedder: str | None = None  # folder or hub id; None: the embedded one
    store: str | None = None  # folder or Chroma URL that keeps vectors; None: memory only
    collection: str | None = None  # None: the store's own one for this embedder
    threshold: float | None = (
        None  # cosine below which a chunk is no evidence; None: the embedder's usual one
    )
    fusion: float = FUSION_CONSTANT  # k of reciprocal rank fusion
    rerank: str | None = None  # folder or hub id of a cross-encoder
    diversity: float | None = None  # weight of relevance in MMR, 0 to 1; None: off
    chunk_tokens: int = CHUNK_TOKENS
    overlap: int = 0  # tokens that neighbouring chunks share

    def __post_init__(self) -> None:
        if self.scorer not in SCORERS:
            raise ValueError(f"unknown scorer {self.scorer!r}; use one of {', '.join(SCORERS)}")
        if self.diversity is not None and self.scorer == "bm25":
            raise ValueError("diversity compares vectors, which scorer bm25 has none of; use dense or hybrid")


class Retriever:
    """Chooses spans. Models and store are opened at first use.

    Args:
        options: None for the defaults.
        cache: reuses selections for near-duplicate questions; None: every question is scored.
        vectors: shared with other retrievers; None for its own, made from the options.
    """

    def __init__(
        self,
        options: RetrievalOptions | None = None,
        cache: SelectionCache | None = None,
        vectors: ChunkVectors | None = None,
    ) -> None:
        self.options = options or RetrievalOptions()
        self._vectors = None if self.options.scorer == "bm25" else vectors or make_vectors(self.options)
        self._scorer = _scorer(self.options, self._vectors)
        self._cache = cache
        self._chunks: Lru[tuple[str, int], list[Chunk]] = Lru(CHUNKED_DOCUMENTS)

    def spans(self, prompt: Prompt, question: str, *, budget: int, head: int, recent: int) -> list[Span]:
        """Spans of a prompt that was built around a document; see ``select_spans``.

        The prompt's own chunks are scored, so ``options.chunk_tokens`` is its builder's business.
        """
        return self.select_chunks(
            prompt.chunks,
            question,
            len(prompt),
            budget=budget,
            head=head,
            recent=recent,
            document=content_key(piece.text for piece in prompt.chunks),
        )

    def select(
        self,
        prompt: TokenizedText,
        question: str,
        *,
        budget: int,
        head: int,
        recent: int,
        document: str | None = None,
    ) -> list[Span]:
        """Spans of a whole prompt of which only the tokens are known; see ``select_spans``.

        Args:
            document: as for ``select_chunks``.

        Raises:
            EmbeddingError: the embedding or re-ranking model cannot be used.
            StoreError: the store cannot be used; without ``options.store`` never.
        """
        size, overlap = self.options.chunk_tokens, self.options.overlap
        key = (content_key([prompt.text]), hash(tuple(prompt.ids)))
        chunks = self._chunks.get_or_make(key, lambda: chunk(prompt, size=size, overlap=overlap))
        return self.select_chunks(
            chunks, question, len(prompt.ids), budget=budget, head=head, recent=recent, document=document
        )

    def select_chunks(
        self,
        chunks: Sequence[Chunk],
        question: str,
        prompt_len: int,
        *,
        budget: int,
        head: int,
        recent: int,
        document: str | None = None,
    ) -> list[Span]:
        """Spans of a prompt that the caller has cut up; windows as in ``select_spans``.

        Args:
            document: identifies what is asked about (and by whom, where tenants are kept apart) in
                the selection cache. By default the chunks between the windows, whose number can
                change with the length of a question behind them.
        """
        # Only what can be selected is scored: head and recent are attended to anyway.
        middle = [piece for piece in chunks if piece.end > head and piece.start < prompt_len - recent]
        if prompt_len <= budget or not middle:
            return []
        texts = [piece.text for piece in middle]
        vectors = self._vectors
        last = prompt_len - recent
        # Without the prompt's length, which rises and falls with the question at its end.
        key = (document or content_key(texts), middle[0].start, self.options, budget, head, recent)
        if self._cache is not None:
            near = (lambda: vectors.query(question)) if vectors else None
            found = self._cache.get(key, question, near)
            if found is not None:
                return [(start, min(end, last)) for start, end in found if start < last]
        spans = select_spans(
            [(piece.start, piece.end) for piece in middle],
            self._scorer.scores(texts, question).tolist(),
            budget=budget,
            prompt_len=prompt_len,
            head=head,
            recent=recent,
            overlapping=True,
        )
        if self._cache is not None:
            self._cache.put(key, question, spans, vectors.query(question) if vectors else None)
        return spans


def chunker_id(chunk_tokens: int, overlap: int) -> str:
    """Names how a text is cut, the tokenizer apart: stored chunks of different names are kept apart."""
    return f"tokens-{chunk_tokens}-{overlap}-v{CHUNKER_VERSION}"


def make_vectors(options: RetrievalOptions) -> ChunkVectors:
    """Vectors of the embedder and store that the options name."""
    embedder = Embedder(options.embedder)
    return ChunkVectors(embedder, open_store(options, embedder) if options.store else None)


def open_store(options: RetrievalOptions, embedder: Embedder) -> ChunkStore:
    """The store that the options name; nothing is opened before its first use.

    Raises:
        StoreError: a malformed URL.
    """
    assert options.store is not None
    chunker = chunker_id(options.chunk_tokens, options.overlap)
    return ChunkStore(options.store, embedder, chunker, options.collection)


def _scorer(options: RetrievalOptions, vectors: ChunkVectors | None) -> Scorer:
    scorer: Scorer
    if vectors is None:
        scorer = Bm25Scorer()
    else:
        usual = EMBEDDED_THRESHOLD if options.embedder is None else SIMILARITY_THRESHOLD
        scorer = DenseScorer(vectors, usual if options.threshold is None else options.threshold)
        if options.scorer == "hybrid":
            scorer = HybridScorer([Bm25Scorer(WORD_SHARE), scorer], options.fusion)
    if options.rerank is not None:
        scorer = RerankingScorer(scorer, Reranker(options.rerank))
    if options.diversity is not None and vectors is not None:
        scorer = DiverseScorer(scorer, vectors, options.diversity)
    return scorer
