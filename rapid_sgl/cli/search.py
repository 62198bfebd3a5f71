"""``rapid-sgl search``: passages of indexed documents that answer a question."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rapid_sgl.cli import options, retrieval_options
from rapid_sgl.cli.numbers import at_least

if TYPE_CHECKING:
    from rapid_sgl.retrieval.store import Hit

DESCRIPTION = """\
Find the passages nearest in meaning to a question, among documents that `rapid-sgl index` has
put into the same store with the same --chunk-tokens, --overlap and --embedder. Each is shown
with its cosine similarity, where it stands (document, characters) and its text.

examples:
  rapid-sgl search "what did the auditors object to?"
  rapid-sgl search "disk failure" -n 3 --store ./chunks
  rapid-sgl search "disk failure" --json | jq -r '.hits[0].text'
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when nothing could be searched, 2 on a wrong command line."""
    parser = options.Parser(
        prog="rapid-sgl search", usage="rapid-sgl search QUESTION [options]", description=DESCRIPTION
    )
    parser.add_argument("question", metavar="QUESTION", help="what to look for")
    parser.add_argument(
        "-n", "--count", type=at_least(1), default=5, metavar="N", help="passages to show (default: 5)"
    )
    retrieval_options.add_store_flags(parser)
    retrieval_options.add_chunk_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(list(argv))
    retrieval_options.check_chunk_flags(parser, args)
    retrieval_options.share_the_machine()
    if not args.question.strip():
        parser.error("the question is empty; say what to look for")

    from rapid_sgl.cli.progress import Status
    from rapid_sgl.retrieval.chroma import StoreError
    from rapid_sgl.retrieval.embedding import Embedder, EmbeddingError

    try:
        with Status("searching"):
            store = retrieval_options.open_store(args, Embedder(args.embedder))
            hits = store.search(args.question, args.count)
            if not hits:
                raise StoreError(
                    f"nothing is indexed in {store.place} with these options; run `rapid-sgl index FILE...` first"
                )
    except (EmbeddingError, StoreError) as error:
        print(f"rapid-sgl search: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(
            json.dumps({"question": args.question, "hits": [asdict(hit) for hit in hits]}, ensure_ascii=False)
        )
    else:
        print("\n\n".join(map(_shown, hits)))
    return 0


def _shown(hit: Hit) -> str:
    places = ", ".join(f"{place.document}:{place.start}-{place.end}" for place in hit.places)
    return f"{hit.similarity:.2f}  {places}\n{hit.text.strip()}"
