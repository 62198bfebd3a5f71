"""``rapid-sgl recall``: does retrieval find what it should, and how fast; needs no server."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapid_sgl.cli import options, retrieval_options
from rapid_sgl.cli.numbers import at_least, int_list, name_list

if TYPE_CHECKING:
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.retrieval.pipeline import RetrievalOptions
    from rapid_sgl.retrieval.recall import Measurement

# Same as retrieval.pipeline.SCORERS, which is not imported to keep --help instant (a test compares).
SCORERS = ("bm25", "dense", "hybrid")
DESCRIPTION = """\
Measure what each scorer retrieves. By default facts are planted into real text (Python's
reference and standard library) of the given lengths and asked for in three ways; with
--questions your own labelled questions are asked about your own documents.

kinds of question:
  verbatim     in the words of the fact
  multi-key    16 facts that differ in one word, one of them is asked for
  paraphrased  no content word in common with the fact
  user         from --questions: one JSON object a line, {"document": path, "question": ...,
               "answer": words of the document}; paths are relative to that file

examples:
  rapid-sgl recall
  rapid-sgl recall --contexts 8000,128000 --documents 2
  rapid-sgl recall --questions questions.jsonl --scorers hybrid --embedder BAAI/bge-m3
  rapid-sgl recall --scorers bm25 --contexts 8000,128000 --budget 448 --save recall.json
  rapid-sgl recall --json | jq '.rows[] | [.context, .scorer, .recall.paraphrased]'

A question counts as a hit when one span within the --budget holds the whole fact (or answer).
A table goes to stdout and, last, one JSON line {"environment": ..., "budget": ..., "rows": [...]}:

  recall       share of hits, by kind of question
  embed_s      embedding a whole document (median); done once, when its content is first seen
  first_ms     first question about a document: chunking and BM25's index, vectors not included
  next_ms      median of the others, each a new question; next_ms_max the slowest
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when the measurement failed, 2 on a wrong command line."""
    parser = _parser()
    args = parser.parse_args(list(argv))
    retrieval_options.check_chunk_flags(parser, args)
    retrieval_options.share_the_machine()
    if args.save == "":
        args.save = _in_the_store(parser)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; run `uv pip install matplotlib` or leave it out")

    from rapid_sgl.cli.asking import AskError
    from rapid_sgl.cli.progress import Status
    from rapid_sgl.models import ModelError
    from rapid_sgl.retrieval.chunking import TokenizerError
    from rapid_sgl.retrieval.documents import DocumentError
    from rapid_sgl.retrieval.embedding import EmbeddingError
    from rapid_sgl.retrieval.needles import NeedleError
    from rapid_sgl.retrieval.recall import QuestionsError

    try:
        with Status("preparing") as status:
            report = _measure(args, status)
        _save(report, args)
    except (
        AskError,
        DocumentError,
        EmbeddingError,
        ModelError,
        NeedleError,
        QuestionsError,
        TokenizerError,
    ) as error:
        print(f"rapid-sgl recall: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"rapid-sgl recall: cannot write {_written(error, args)}", file=sys.stderr)
        return 1
    if report["note"]:
        print(f"note: {report['note']}", file=sys.stderr)
    if not args.json:
        from rapid_sgl.cli.recall_report import print_rows

        print_rows(report["rows"])
    print(json.dumps(report))
    return 0


def _in_the_store(parser: options.Parser) -> str:
    """Where a server whose store that is looks for the report."""
    from rapid_sgl.retrieval.recall_guard import FILE_NAME
    from rapid_sgl.retrieval.store import default_place

    place = default_place()
    if "://" in place:
        parser.error(f"--save: the store {place} is no folder; name a FILE")
    return str(Path(place).expanduser() / FILE_NAME)


def _measure(args: argparse.Namespace, status: Status) -> dict[str, Any]:
    from rapid_sgl.bench.environment import environment
    from rapid_sgl.retrieval.needles import ProbedDocument, planted_document
    from rapid_sgl.retrieval.pipeline import make_vectors
    from rapid_sgl.retrieval.recall import load_questions, measure, summarised
    from rapid_sgl.retrieval.recall_guard import FORMAT

    # Before models are loaded: a bad file is refused at once.
    asked: list[tuple[int | None, ProbedDocument]] = []
    if args.questions:
        asked = [(None, document) for document in load_questions(Path(args.questions))]
    tokenizer = retrieval_options.load_tokenizer(args.model_path, status)
    if not args.questions:
        status.update("planting facts")
        asked = [
            (context, planted_document(tokenizer, context, member, args.documents))
            for context in args.contexts
            for member in range(args.documents)
        ]
    scorers = _scorers(args)
    vectors, note = None, None
    if any(option.scorer != "bm25" for option in scorers.values()):
        status.update("loading the embedding model")
        vectors = make_vectors(next(iter(scorers.values())))
        note = retrieval_options.note_on_reading(vectors.embedder, args.chunk_tokens)
    measurements: list[Measurement] = []
    for context, document in asked:
        measurements += measure(
            document,
            tokenizer,
            scorers,
            budget=args.budget,
            context=context,
            vectors=vectors,
            update=status.update,
        )
    return {
        "format": FORMAT,
        "environment": environment(args.model_path or "smollm2-135m-instruct"),
        "embedder": vectors.embedder.id if vectors else None,
        "budget": args.budget,
        "chunk_tokens": args.chunk_tokens,
        "overlap": args.overlap,
        "threshold": args.threshold,
        "rows": summarised(measurements),
        "note": note,
    }


def _save(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the files that were asked for.

    Raises:
        OSError: one of them cannot be written.
    """
    if args.save:
        Path(args.save).parent.mkdir(parents=True, exist_ok=True)
        Path(args.save).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from rapid_sgl.cli.recall_report import save_plot

        save_plot(report, args.plot)


def _written(error: OSError, args: argparse.Namespace) -> str:
    return f"{error.filename or args.plot}: {error.strerror or error}"


def _scorers(args: argparse.Namespace) -> dict[str, RetrievalOptions]:
    """Options by the name that the report gives them."""
    from rapid_sgl.retrieval.pipeline import RetrievalOptions

    common = {"embedder": args.embedder, "chunk_tokens": args.chunk_tokens, "overlap": args.overlap}
    common |= {"threshold": args.threshold}
    scorers = {name: RetrievalOptions(name, **common) for name in args.scorers}
    if args.rerank:
        scorers["hybrid+rerank"] = RetrievalOptions("hybrid", rerank=args.rerank, **common)
    if args.diversity is not None:
        scorers["hybrid+mmr"] = RetrievalOptions("hybrid", diversity=args.diversity, **common)
    return scorers


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range; use 0 to 1")
    return value


def _parser() -> options.Parser:
    parser = options.Parser(
        prog="rapid-sgl recall", usage="rapid-sgl recall [options]", description=DESCRIPTION
    )
    add = parser.add_argument
    add(
        "--contexts", type=int_list, default=[8000], metavar="N,N", help="tokens per document (default: 8000)"
    )
    add(
        "--documents",
        type=at_least(1),
        default=3,
        metavar="N",
        help="documents per context; the facts are shared out among them (default: 3)",
    )
    add("--questions", metavar="FILE", help="your own labelled questions instead, as JSON lines")
    add(
        "--budget",
        type=at_least(1),
        default=1024,
        metavar="N",
        help="tokens to retrieve for a question (default: 1024)",
    )
    add(
        "--scorers",
        type=name_list(SCORERS, "scorer"),
        default=list(SCORERS),
        metavar="S,S",
        help=f"(default: {','.join(SCORERS)})",
    )
    add(
        "--threshold",
        type=_share,
        metavar="X",
        help="cosine below which a chunk is no evidence (default: 0.1, for other embedders 0.3)",
    )
    add("--rerank", metavar="MODEL", help="also measure hybrid re-ranked by this cross-encoder")
    add(
        "--diversity",
        type=_share,
        metavar="X",
        help="also measure hybrid under MMR with this weight of relevance, 0 to 1",
    )
    retrieval_options.add_chunk_flags(parser)
    retrieval_options.add_tokenizer_flag(parser)
    add(
        "--save",
        nargs="?",
        const="",
        metavar="FILE",
        help="keep the JSON, for `rapid-sgl serve --rapid-min-recall` (default FILE: recall.json in the store's "
        "folder, $RAPID_STORE or the user's cache)",
    )
    add("--plot", metavar="FILE", help="save a chart (png, svg, pdf); needs matplotlib")
    add("--json", action="store_true", help="print the JSON line only")
    return parser
