"""``rapid-sgl index``: cut documents into chunks, embed them once, keep them in a Chroma store."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapid_sgl.cli import options, retrieval_options

if TYPE_CHECKING:
    from rapid_sgl.cli.progress import Status

DESCRIPTION = """\
Index documents (text, Markdown, PDF): `rapid-sgl search` then finds passages in them, and
retrieval from a prompt that contains one of them does not embed it again. Chunks are kept by
content: indexing a file twice, under two names or from two processes leaves one copy.

examples:
  rapid-sgl index report.pdf notes.md
  rapid-sgl index *.md --store ./chunks
  rapid-sgl index report.pdf --store http://127.0.0.1:8000 --json
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when something could not be indexed, 2 on a wrong command line."""
    parser = options.Parser(
        prog="rapid-sgl index", usage="rapid-sgl index FILE... [options]", description=DESCRIPTION
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a document: text, Markdown or PDF")
    retrieval_options.add_store_flags(parser)
    retrieval_options.add_chunk_flags(parser)
    retrieval_options.add_tokenizer_flag(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(list(argv))
    retrieval_options.check_chunk_flags(parser, args)
    retrieval_options.share_the_machine()

    from rapid_sgl.cli.asking import AskError
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.models import ModelError
    from rapid_sgl.retrieval.chroma import StoreError
    from rapid_sgl.retrieval.chunking import TokenizerError
    from rapid_sgl.retrieval.documents import DocumentError
    from rapid_sgl.retrieval.embedding import EmbeddingError

    try:
        with Status("reading the documents") as status:
            report = _index(args, status)
    except (AskError, DocumentError, EmbeddingError, ModelError, StoreError, TokenizerError) as error:
        print(f"rapid-sgl index: {error}", file=sys.stderr)
        return 1
    if report["note"]:
        print(f"note: {report['note']}", file=sys.stderr)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
        return 0
    for row in report["documents"]:
        print(
            f"{row['document']}: {row['tokens']:,} tokens in {row['chunks']:,} chunks, {row['embedded']:,} embedded"
        )
    print(f"{report['store']} now holds {report['stored_chunks']:,} chunks of {report['embedder']}")
    return 0


def _index(args: argparse.Namespace, status: Status) -> dict[str, Any]:
    from rapid_sgl.retrieval.chunking import chunk, tokenize
    from rapid_sgl.retrieval.documents import load_document
    from rapid_sgl.retrieval.embedding import Embedder

    # All of them first: a bad file is refused before models are loaded and anything is stored.
    texts = {str(Path(file).resolve()): load_document(file) for file in args.files}
    embedder = Embedder(args.embedder)
    store = retrieval_options.open_store(args, embedder)
    status.update("loading the tokenizer")
    tokenizer = retrieval_options.load_tokenizer(args.model_path, status)
    rows = []
    for name, text in texts.items():
        document = tokenize(text, tokenizer)
        chunks = chunk(document, size=args.chunk_tokens, overlap=args.overlap)

        def show(done: int, name: str = name, total: int = len(chunks)) -> None:
            status.update(f"{Path(name).name}: {done:,} of {total:,} chunks")

        show(0)
        embedded = store.add(name, document, chunks, show)
        rows.append(
            {"document": name, "tokens": len(document.ids), "chunks": len(chunks), "embedded": embedded}
        )
    # A model that was not needed, because every chunk was there, is not loaded to be asked.
    loaded = embedder.known_dimension is not None
    note = retrieval_options.note_on_reading(embedder, args.chunk_tokens) if loaded else None
    return {
        "store": store.place,
        "embedder": embedder.id,
        "stored_chunks": store.count(),
        "documents": rows,
        "note": note,
    }
