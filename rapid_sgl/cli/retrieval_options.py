"""Flags that the retrieval commands share: where chunks are kept, how they are cut and embedded."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from rapid_sgl.cli.numbers import at_least

if TYPE_CHECKING:
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.retrieval.embedding import Embedder
    from rapid_sgl.retrieval.store import ChunkStore

# Same as retrieval.chunking.CHUNK_TOKENS, which is not imported to keep --help instant (a test compares).
CHUNK_TOKENS = 128


def add_store_flags(parser: argparse.ArgumentParser) -> None:
    """``--store``, ``--collection``."""
    parser.add_argument(
        "--store",
        metavar="PLACE",
        help="a folder, or http://HOST:PORT of a Chroma server "
        "(default: $RAPID_STORE, else a folder in the user's cache)",
    )
    parser.add_argument(
        "--collection", metavar="NAME", help="Chroma collection (default: one for each embedding model)"
    )


def add_chunk_flags(parser: argparse.ArgumentParser) -> None:
    """``--embedder``, ``--chunk-tokens``, ``--overlap``."""
    parser.add_argument(
        "--embedder",
        metavar="MODEL",
        help="folder or hub id of a sentence-transformers model (default: the embedded all-MiniLM-L6-v2)",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=at_least(1),
        default=CHUNK_TOKENS,
        metavar="N",
        help=f"tokens of a chunk at most (default: {CHUNK_TOKENS})",
    )
    parser.add_argument(
        "--overlap",
        type=at_least(0),
        default=0,
        metavar="N",
        help="tokens that neighbouring chunks share at most (default: 0)",
    )


def add_tokenizer_flag(parser: argparse.ArgumentParser) -> None:
    """``--model-path``."""
    parser.add_argument(
        "--model-path",
        metavar="MODEL",
        help="served model whose tokenizer counts the tokens (default: the embedded one)",
    )


def check_chunk_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a one-line error where size and overlap do not go together."""
    if 2 * args.overlap >= args.chunk_tokens and args.overlap:
        most = (args.chunk_tokens - 1) // 2
        parser.error(
            f"--overlap {args.overlap} is too large for --chunk-tokens {args.chunk_tokens}; use 0 to {most}"
        )


def share_the_machine() -> None:
    """Call before torch is imported: its OpenMP threads then wait for each other without spinning,
    which beside other busy processes makes embedding several times slower."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def load_tokenizer(model_path: str | None, status: Status) -> Any:
    """The tokenizer that counts tokens.

    Raises:
        AskError, ModelError: it cannot be loaded.
    """
    from rapid_sgl.cli.asking import load_builder
    from rapid_sgl.models import embedded_model_path

    return load_builder(model_path or str(embedded_model_path(status.update))).tokenizer


def open_store(args: argparse.Namespace, embedder: Embedder) -> ChunkStore:
    """The store that the flags name, not yet opened."""
    from rapid_sgl.retrieval.pipeline import chunker_id
    from rapid_sgl.retrieval.store import ChunkStore, default_place

    chunker = chunker_id(args.chunk_tokens, args.overlap)
    return ChunkStore(args.store or default_place(), embedder, chunker, args.collection)


def note_on_reading(embedder: Embedder, chunk_tokens: int) -> str | None:
    """What to tell the user when the embedding model does not read chunks to their end."""
    if chunk_tokens <= embedder.max_tokens:
        return None
    return (
        f"{embedder.id} reads the first {embedder.max_tokens} of its tokens of a text, so the end of chunks of "
        f"{chunk_tokens} tokens is not found; use --chunk-tokens {embedder.max_tokens // 2} or another --embedder"
    )
