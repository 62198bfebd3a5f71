"""How much of what it should a scorer retrieves, and how long that takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rapid_sgl.retrieval.chunking import TokenizedText, chunk, tokenize
from rapid_sgl.retrieval.documents import load_document
from rapid_sgl.retrieval.needles import Probe, ProbedDocument
from rapid_sgl.retrieval.pipeline import RetrievalOptions, Retriever
from rapid_sgl.retrieval.vectors import ChunkVectors

QUESTION_KEYS = {"document", "question", "answer"}


class QuestionsError(ValueError):
    """A file of labelled questions cannot be used; the text names file, line and fix."""


@dataclass(frozen=True)
class Measurement:
    """One scorer on one document."""

    scorer: str
    context: int | None  # tokens that were asked for; None for documents of the user
    tokens: int
    hits: list[tuple[str, bool]]  # kind and outcome of every question
    embed_s: float | None  # embedding all chunks, before the first question; None without vectors
    first_s: float  # the first question: chunking, and BM25's index
    next_s: list[float]  # every other one; the question itself is embedded in it


def load_questions(path: Path) -> list[ProbedDocument]:
    """Labelled questions, one JSON object a line: ``{"document": path, "question": …, "answer": …}``.

    Paths are relative to the file's folder. The answer must occur in the document word for word;
    retrieving one occurrence counts.

    Raises:
        QuestionsError: a line is not such an object or its answer is not in the document.
        DocumentError: the file or a document cannot be read.
    """
    texts: dict[str, str] = {}
    probes: dict[str, list[Probe]] = {}
    for number, line in enumerate(load_document(path).splitlines(), 1):
        if not line.strip():
            continue
        row = _question(f"{path}:{number}", line)
        name = row["document"]
        if name not in texts:
            texts[name] = load_document(path.parent / name)
        answers = tuple(_occurrences(texts[name], row["answer"]))
        if not answers:
            raise QuestionsError(
                f"{path}:{number}: {name} does not contain the answer {row['answer'][:60]!r}; "
                "give words that stand in the document"
            )
        probes.setdefault(name, []).append(Probe("user", row["question"], answers))
    return [ProbedDocument(name, texts[name], probes[name]) for name in probes]


def _question(where: str, line: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise QuestionsError(f"{where}: no JSON ({error}); write one object a line") from error
    good = isinstance(row, dict) and set(row) == QUESTION_KEYS
    if not good or not all(isinstance(value, str) and value.strip() for value in row.values()):
        raise QuestionsError(
            f'{where}: not a question; write {{"document": "PATH", "question": "…", "answer": "…"}}, all texts'
        )
    return row


def _occurrences(text: str, answer: str) -> Iterator[tuple[int, int]]:
    place = text.find(answer)
    while place >= 0:
        yield place, place + len(answer)
        place = text.find(answer, place + 1)


def measure(
    document: ProbedDocument,
    tokenizer: Any,
    scorers: Mapping[str, RetrievalOptions],
    *,
    budget: int,
    context: int | None = None,
    vectors: ChunkVectors | None = None,
    update: Callable[[str], None] = lambda text: None,
) -> list[Measurement]:
    """Ask every question of ``document`` with every scorer; ``budget`` tokens are retrieved each time.

    Args:
        scorers: options by name; they must agree in how they cut and embed.
        vectors: shared by the scorers that use vectors, so the document is embedded once.
    """
    tokens = tokenize(document.text, tokenizer)
    embed_s = None
    if vectors is not None:
        update(f"{document.name}: embedding {len(tokens.ids):,} tokens")
        options = next(iter(scorers.values()))
        began = time.perf_counter()
        pieces = chunk(tokens, size=options.chunk_tokens, overlap=options.overlap)
        vectors.documents([piece.text for piece in pieces])
        embed_s = time.perf_counter() - began
    results = []
    for name, options in scorers.items():
        update(f"{document.name}: {len(document.probes)} questions with {name}")
        retriever = Retriever(options, vectors=vectors)
        # Libraries are imported and compiled at first use, which is no cost of a document.
        retriever.select(tokenize("to be or not to be", tokenizer), "to be?", budget=1, head=0, recent=0)
        if vectors is not None:
            vectors.forget_queries()
        hits, seconds = [], []
        for probe in document.probes:
            began = time.perf_counter()
            spans = retriever.select(tokens, probe.question, budget=budget, head=0, recent=0)
            seconds.append(time.perf_counter() - began)
            hits.append((probe.kind, len(tokens.ids) <= budget or _hit(tokens, spans, probe)))
        embedded = None if options.scorer == "bm25" else embed_s
        results.append(Measurement(name, context, len(tokens.ids), hits, embedded, seconds[0], seconds[1:]))
    return results


def _hit(tokens: TokenizedText, spans: Sequence[tuple[int, int]], probe: Probe) -> bool:
    """Whether one answer lies in one span, whole."""
    ranges = []
    for start, end in spans:
        first = len(tokens.slice(0, start))
        ranges.append((first, first + len(tokens.slice(start, end))))
    return any(first <= start and end <= last for start, end in probe.answers for first, last in ranges)


def summarised(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row for each context and scorer: recall by kind of question, latencies in milliseconds."""
    groups: dict[tuple[Any, str], list[Measurement]] = {}
    for item in measurements:
        groups.setdefault((item.context, item.scorer), []).append(item)
    rows = []
    for (context, scorer), group in groups.items():
        hits = [hit for item in group for hit in item.hits]
        kinds = list(dict.fromkeys(kind for kind, _ in hits))
        later = [seconds for item in group for seconds in item.next_s]
        embed = [item.embed_s for item in group if item.embed_s is not None]
        rows.append(
            {
                "context": context,
                "scorer": scorer,
                "documents": len(group),
                "tokens": round(sum(item.tokens for item in group) / len(group)),
                "tokens_max": max(item.tokens for item in group),
                "questions": {kind: sum(name == kind for name, _ in hits) for kind in kinds},
                "recall": {kind: _share([good for name, good in hits if name == kind]) for kind in kinds},
                "embed_s": round(median(embed), 3) if embed else None,
                "first_ms": round(1000 * median(item.first_s for item in group), 2),
                "next_ms": round(1000 * median(later), 2) if later else None,
                "next_ms_max": round(1000 * max(later), 2) if later else None,
            }
        )
    return rows


def _share(outcomes: Sequence[bool]) -> float:
    return round(sum(outcomes) / len(outcomes), 4)
