"""From documents and a question to the request that is sent: prompt, spans, options."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapid_sgl.config import WIRE_PREFIX, RapidConfig, public_name
from rapid_sgl.http_client import ServerInfo
from rapid_sgl.models import offline_env
from rapid_sgl.request import SPANS_KEY, spans_to_wire
from rapid_sgl.retrieval.documents import DocumentError, load_document
from rapid_sgl.retrieval.pipeline import RetrievalOptions, Retriever
from rapid_sgl.retrieval.prompt import Prompt, PromptBuilder
from rapid_sgl.retrieval.spans import Span

METHODS = ("rapid", "target", "rag")


class AskError(RuntimeError):
    """The question cannot be asked as given; the text says why and what to do."""


@dataclass(frozen=True)
class Question:
    """What the user asked for.

    ``rapid`` holds the ``RapidConfig`` fields that were given explicitly, ``config`` all of them.
    """

    document: str
    text: str
    method: str  # one of METHODS
    max_new_tokens: int
    truncate_middle: bool
    config: RapidConfig
    rapid: dict[str, Any]
    # Words find most of what a question names, and need no model to be loaded first.
    retrieval: RetrievalOptions = field(default_factory=lambda: RetrievalOptions("bm25"))


@dataclass(frozen=True)
class Plan:
    """What is sent to the server, and what it was made from."""

    ids: list[int]  # the prompt that is sent
    whole: Prompt  # the full document's prompt; sent as it is except under method rag
    spans: list[Span]  # retrieved, in ``whole``'s coordinates
    custom_params: dict[str, Any]


def read_documents(files: Sequence[str], topics: Sequence[str] = ()) -> str:
    """All documents as one text; with more than one, each is headed by its name.

    Args:
        files: paths.
        topics: sections of the Python language reference that ships with CPython
            (``pydoc_data.topics``), for demonstrations without a file.

    Raises:
        DocumentError: a file cannot be used or a topic does not exist.
    """
    parts = [(Path(file).name, load_document(file)) for file in files]
    for topic in topics:
        from pydoc_data.topics import topics as reference

        if topic not in reference:
            raise DocumentError(
                f"the Python reference has no topic {topic!r}; try one of {', '.join(sorted(reference)[:8])}, …"
            )
        parts.append((f"Python reference: {topic}", reference[topic]))
    if len(parts) == 1:
        return parts[0][1]
    return "\n\n".join(f"# {name}\n\n{text}" for name, text in parts)


def load_builder(tokenizer_path: str) -> PromptBuilder:
    """A prompt builder on the tokenizer at a path or hub id.

    Raises:
        AskError: it cannot be loaded from this machine.
    """
    # Before transformers is imported: it reads these variables once.
    os.environ.update(offline_env(tokenizer_path))
    try:
        tokenizer = _tokenizer_class(Path(tokenizer_path)).from_pretrained(tokenizer_path)
    except (OSError, ValueError) as error:
        raise AskError(
            f"cannot load the server's tokenizer from {tokenizer_path} ({' '.join(str(error).split())[:200]}); "
            "name a local copy of the model with --model-path"
        ) from error
    return PromptBuilder(tokenizer)


def _tokenizer_class(folder: Path) -> Any:
    """``AutoTokenizer``, or the class it would choose where that is certain: importing
    ``AutoTokenizer`` brings torch and scikit-learn, ten seconds on a small machine."""
    config = folder / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_text()).get("tokenizer_class") == "TokenizersBackend":
        from transformers import TokenizersBackend

        return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer


def make_plan(question: Question, builder: PromptBuilder, info: ServerInfo) -> Plan:
    """Build the prompt, retrieve, and choose the request's options.

    Raises:
        PromptTooLong: see ``PromptBuilder.build``.
        AskError: method rag found nothing to answer from.
        EmbeddingError, StoreError: see ``Retriever.select``.
    """
    config = question.config
    limit = info.max_prompt_tokens(question.max_new_tokens)
    # Retrieval-only prompts may come from documents far longer than the model's context.
    whole = builder.build(
        question.document,
        question.text,
        None if question.method == "rag" else limit,
        truncate_middle=question.truncate_middle,
    )
    if question.method == "target":
        return Plan(whole.ids, whole, [], {f"{WIRE_PREFIX}drafter": "off"})
    if question.method == "rag":
        return _rag_plan(question, builder, whole, min(config.budget, limit))
    spans = Retriever(question.retrieval).spans(
        whole, question.text, budget=config.budget, head=config.head, recent=config.recent
    )
    # The spans fill a budget of ours, so the request names that budget instead of relying on the server's.
    sent = {**question.rapid, **{name: getattr(config, name) for name in ("budget", "head", "recent")}}
    sent.setdefault("drafter", config.drafter)
    wire = {WIRE_PREFIX + public_name(name): value for name, value in sent.items()}
    return Plan(whole.ids, whole, spans, {**wire, SPANS_KEY: spans_to_wire(spans)})


def _rag_plan(question: Question, builder: PromptBuilder, whole: Prompt, limit: int) -> Plan:
    target_only = {f"{WIRE_PREFIX}drafter": "off"}
    if len(whole) <= limit:
        return Plan(whole.ids, whole, [whole.document], target_only)
    room = builder.excerpt_room(limit, question.text)
    spans = Retriever(question.retrieval).spans(whole, question.text, budget=room, head=0, recent=0)
    if not spans:
        raise AskError(
            "no part of the document matches the question; rephrase it, or use --scorer hybrid or --method rapid"
        )
    return Plan(builder.build_excerpt(whole, spans, question.text), whole, spans, target_only)
