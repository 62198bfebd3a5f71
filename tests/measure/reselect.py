"""What re-selection brings long answers, against spans chosen once; run by hand on a server of its own or yours.

    .venv/bin/python tests/measure/reselect.py
    .venv/bin/python tests/measure/reselect.py --url http://127.0.0.1:30000 --tokens 7000 --prompts 2 --kinds jump
    .venv/bin/python tests/measure/reselect.py --cost

Documents are Python's reference with three passages planted far from each other: a letter, an inventory and a
configuration (those of ``rapid-sgl bench``). Three kinds of answers are asked for:

- jump: the first lines of all three passages word for word, from the middle of the document, from its beginning,
  from its end. A small model does not find them by itself: the answer begins with four lines of the first one, and a
  regular expression gives as many of the others. The lines behind those are free.
- quote: one of the passages word for word, which goes on to the answer's end; begun in the same way.
- summary: the text in the model's own words, sampled at T = 0.8 with a seed (greedy, a small model soon repeats itself).

Every prompt is asked with each budget and each value of ``rapid_reselect``, in turns, without copies. The fixed spans
are those that BM25 finds for the question, and they are what re-selection starts from. Prints a table of means and,
as the last line, JSON. Times are compared prompt by prompt, since other work on the machine comes and goes: the
median of the ratios. ``--cost`` needs no server: milliseconds of the index and of a re-selection, by prompt length.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, median
from typing import Any

import torch

from rapid_sgl.bench.workloads import CHARS_PER_TOKEN, make_task
from rapid_sgl.cli.asking import load_builder
from rapid_sgl.client import Client, Server
from rapid_sgl.config import RapidConfig
from rapid_sgl.drafter.reselect import Reselection
from rapid_sgl.drafter.rows import DraftRows, view_ranges
from rapid_sgl.models import embedded_model_path
from rapid_sgl.request import spans_to_wire
from rapid_sgl.retrieval.chunking import tokenize
from rapid_sgl.retrieval.pipeline import RetrievalOptions, Retriever
from rapid_sgl.retrieval.prompt import PromptBuilder

WINDOWS = {256: (16, 64), 512: (32, 128), 1024: (64, 512)}  # budget: head, recent
PLACES = (0.5, 0.15, 0.75)  # of a jump's passages: outside of all windows
SOURCES = ("quote", "extract", "rewrite")  # workloads with passages to repeat
BEGUN_LINES, FREE_LINES = 4, 4
KINDS = ("jump", "quote", "summary")


@dataclass(frozen=True)
class Asked:
    """One prompt: token ids, the question in it, and what goes into ``sampling_params``."""

    kind: str
    ids: list[int]
    chunks: list[Any]
    question: str
    sampling: dict[str, Any]


def main(argv: list[str]) -> None:
    args = _parser().parse_args(argv)
    builder = load_builder(str(embedded_model_path()))
    if args.cost:
        print(json.dumps([cost(builder, tokens) for tokens in (7000, 32000, 128000)]))
        return
    prompts = [
        make_prompt(builder, kind, args.tokens, member)
        for kind, member in product(args.kinds.split(","), range(args.prompts))
    ]
    with _client(args.url) as client:
        rows = [row for asked in prompts for row in measure(client, asked, args)]
    report(rows, args)


def make_prompt(builder: PromptBuilder, kind: str, tokens: int, member: int) -> Asked:
    """The ``member``-th prompt of a kind, about ``tokens`` long with the question."""
    order = SOURCES[member % 3 :] + SOURCES[: member % 3]
    tasks = [make_task(workload, member, tokens) for workload in order]
    passages = [task.text[slice(*task.source)].strip() + "\n" for task in tasks if task.source]
    hay = make_task("answer", member, tokens).text[: (tokens - 1000) * CHARS_PER_TOKEN]
    text = hay
    for place, passage in sorted(zip(PLACES, passages, strict=True), reverse=True):
        at = hay.index("\n", int(place * len(hay))) + 1
        text = f"{text[:at]}\n{passage}\n{text[at:]}"
    lines = [passage.splitlines(keepends=True) for passage in passages]
    begun, sampling = "".join(lines[0][:BEGUN_LINES]), {"temperature": 0.0}
    if kind == "jump":
        question = " Then: ".join(task.question for task in tasks)
        free = f"([^\\n]{{10,200}}\\n){{{FREE_LINES}}}"
        given = [re.escape("".join(part[:BEGUN_LINES])).replace("\\\n", "\\n") for part in lines[1:]]
        sampling["regex"] = free + "".join(part.replace("\\ ", " ") + free for part in given)
    elif kind == "quote":
        question = tasks[0].question
    else:
        question, begun = "Summarise the text in a long essay.", ""
        sampling = {"temperature": 0.8, "sampling_seed": member}
    prompt = builder.build(text, question, None)
    return Asked(
        kind, [*prompt.ids, *tokenize(begun, builder.tokenizer).ids], prompt.chunks, question, sampling
    )


def measure(client: Client, asked: Asked, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per budget and setting; greedy answers must equal the first one, which is undrafted."""
    plain = ask(client, asked, args.new_tokens, rapid_drafter="off")
    retriever = Retriever(RetrievalOptions("bm25"))
    for budget in map(int, args.budgets.split(",")):
        head, recent = WINDOWS[budget]
        spans = retriever.select_chunks(
            asked.chunks, asked.question, len(asked.ids), budget=budget, head=head, recent=recent
        )
        options = {
            "rapid_budget": budget,
            "rapid_head": head,
            "rapid_recent": recent,
            "rapid_spans": spans_to_wire(spans),
            "rapid_draft_length": 4,
            "rapid_copy": "off",
        }
        for every in map(int, args.reselect.split(",")):
            answer = ask(client, asked, args.new_tokens, rapid_reselect=every, **options)
            row = {
                "kind": asked.kind,
                "budget": budget,
                "reselect": every,
                "accept_length": answer.accept_length,
                "ms": 1000 * answer.decode_s / max(1, answer.decode_tokens),
                "tokens": answer.completion_tokens,
                "reselections": answer.meta_info.get("rapid_reselections", 0),
                "same": answer.text == plain.text,
            }
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row


def ask(client: Client, asked: Asked, new_tokens: int, **rapid: Any) -> Any:
    params = {"max_new_tokens": new_tokens, "custom_params": rapid, **asked.sampling}
    if "regex" not in params:
        params["ignore_eos"] = True
    return client.complete(input_ids=asked.ids, sampling_params=params)


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Means per kind, budget and setting; ratios against the first setting, prompt by prompt."""
    print(
        "| answer | budget | reselect | accept length | ms/token, ratio | times re-selected | as undrafted |"
    )
    print("|---|---|---|---|---|---|---|")
    table = []
    settings = list(map(int, args.reselect.split(",")))
    for kind, budget, every in product(args.kinds.split(","), map(int, args.budgets.split(",")), settings):
        mine, first = (
            [row for row in rows if (row["kind"], row["budget"], row["reselect"]) == (kind, budget, setting)]
            for setting in (every, settings[0])
        )
        ratio = median(a["ms"] / b["ms"] for a, b in zip(mine, first, strict=True))
        accepted, times = (fmean(row[key] for row in mine) for key in ("accept_length", "reselections"))
        same = sum(row["same"] for row in mine)
        equal = "sampled" if kind == "summary" else f"{same} of {len(mine)}"
        print(f"| {kind} | {budget} | {every} | {accepted:.2f} | {ratio:.2f} | {times:.1f} | {equal} |")
        table.append([kind, budget, every, round(accepted, 3), round(ratio, 3), round(times, 1), same])
    print(json.dumps({"options": vars(args), "table": table}))


def cost(builder: PromptBuilder, tokens: int) -> dict[str, float]:
    """Milliseconds of one thread: to index a prompt, and to choose again and rewrite the row (median, slowest)."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenize(text, builder.tokenizer).ids
    ids = (ids * (1 + tokens // len(ids)))[:tokens]
    config = RapidConfig(reselect=16)
    rows = DraftRows(torch.zeros(1, tokens + 1000, dtype=torch.int32))
    view = rows.build(0, tokens, view_ranges(tokens, [], config))
    with ThreadPoolExecutor(1) as pool:
        began = time.perf_counter()
        reselection = Reselection(ids, [], config, pool)
        reselection.select([])
        built = time.perf_counter() - began
        times = []
        for end in range(16, 960, 16):
            began = time.perf_counter()
            reselection.advance(rows, view, ids[1000 : 1000 + end])
            times.append(1000 * (time.perf_counter() - began))
    return {
        "tokens": tokens,
        "index": round(1000 * built, 1),
        "again": round(median(times), 2),
        "slowest": round(max(times), 2),
    }


@contextlib.contextmanager
def _client(url: str | None) -> Iterator[Client]:
    if url is not None:
        yield Client(url)
        return
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with Server.start(["--max-total-tokens=16000"], env={"HF_HUB_OFFLINE": "1"}, log_path=log) as server:
            yield server.client


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a running server with the embedded model; default: one of its own")
    parser.add_argument("--tokens", type=int, default=3500, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--budgets", default="256,512", help=f"of {', '.join(map(str, WINDOWS))}")
    parser.add_argument(
        "--reselect", default="0,16,64", help="values of the option; others are compared with the first"
    )
    parser.add_argument("--cost", action="store_true", help="only the time that re-selection takes")
    parser.add_argument("--new-tokens", type=int, default=220)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
