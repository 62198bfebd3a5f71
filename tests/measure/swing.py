"""Throughput while the load swings between 1 and 16 requests: lengths chosen by the server against no drafts.

    .venv/bin/python tests/measure/swing.py
    .venv/bin/python tests/measure/swing.py --rounds 5 --levels 1,16,2 -- --rapid-drafter-weights=int8

It starts a server and swings through the levels, ``--window`` seconds at each, in turns with drafts (defaults of the
server: draft length auto, copies) and without (``rapid_drafter: off``). A level is the number of clients that are
busy: each asks one question after the other about documents of mixed length that are in the prefix cache. When the
level falls, the clients beyond it drop their answers: were they to end them, much of a window would be the load of
the one before it, and more so the slower that was served. Prints the tokens that arrived in each window and, as the last
line, JSON; the ratio of a window is the median over rounds of drafted / undrafted tokens in the same window of
neighbouring turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from rapid_sgl.bench.prompts import BenchPrompt, SpanChooser, exact_prompt
from rapid_sgl.cli.asking import load_builder
from rapid_sgl.cli.options import split_server_args
from rapid_sgl.client import Client, Server
from rapid_sgl.config import RapidConfig
from rapid_sgl.models import embedded_model_path
from rapid_sgl.request import spans_to_wire

OFF = {"rapid_drafter": "off"}


@dataclass
class Load:
    """How many clients are busy, and when each token of theirs arrived."""

    prompts: list[tuple[BenchPrompt, dict[str, Any]]]
    new_tokens: int
    level: int = 0
    over: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def set(self, level: int, over: bool = False) -> None:
        with self.changed:
            self.level, self.over = level, over
            self.changed.notify_all()

    def client(self, number: int, url: str, drafted: bool) -> None:
        """Ask until it is over, while fewer than ``level`` clients have a lower number."""
        client, asked = Client(url), 0
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.over or number < self.level)
                    if self.over:
                        return
                self._ask(client, number, *self.prompts[(5 * number + asked) % len(self.prompts)], drafted)
                asked += 1
        except BaseException as error:  # raised by the main thread
            self.errors.append(error)

    def _ask(
        self, client: Client, number: int, prompt: BenchPrompt, options: dict[str, Any], drafted: bool
    ) -> None:
        params = {"max_new_tokens": self.new_tokens, "temperature": 0, "ignore_eos": True}
        known = 0
        stream = client.stream(
            input_ids=prompt.ids, sampling_params=params | {"custom_params": options if drafted else OFF}
        )
        with contextlib.closing(stream):
            for chunk in stream:
                self.arrivals.append((chunk.arrived, chunk.completion_tokens - known))
                known = chunk.completion_tokens
                if number >= self.level:
                    return


def turn(url: str, load: Load, levels: list[int], window_s: float, drafted: bool) -> list[int]:
    """Tokens that arrived in each window of one swing through the levels."""
    load.arrivals, load.errors = [], []
    load.set(0)
    threads = [
        threading.Thread(target=load.client, args=(number, url, drafted)) for number in range(max(levels))
    ]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    for number, level in enumerate(levels):
        load.set(level)
        time.sleep(max(0.0, began + (number + 1) * window_s - time.perf_counter()))
    load.set(0, over=True)
    for thread in threads:
        thread.join()
    if load.errors:
        raise load.errors[0]
    counts = [0] * len(levels)
    for arrived, tokens in load.arrivals:
        window = int((arrived - began) / window_s)
        if window < len(levels):
            counts[window] += tokens
    return counts


def main(argv: list[str]) -> None:
    own, server_args = split_server_args(argv)
    args = _parser().parse_args(own)
    levels = [int(level) for level in args.levels.split(",")]
    builder, chooser, config = load_builder(str(embedded_model_path())), SpanChooser(), RapidConfig()
    prompts = []
    for member, context in zip(range(args.prompts), cycle(args.contexts.split(",")), strict=False):
        prompt = exact_prompt(builder, int(context), member)
        spans = chooser.find(prompt, "bm25", config).spans
        prompts.append((prompt, {"rapid_spans": spans_to_wire(spans)} if spans else {}))
    load = Load(prompts, args.new_tokens)
    counts: dict[bool, list[list[int]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--max-running-requests=16", *server_args]
        with Server.start(flags, env={"HF_HUB_OFFLINE": "1"}, log_path=Path(folder) / "server.log") as server:
            for prompt, _ in prompts:  # into the prefix cache
                server.client.generate(input_ids=prompt.ids, sampling_params={"max_new_tokens": 1})
            # what auto learns first is not what is measured
            turn(server.url, load, levels, args.window, True)
            for number in range(2 * args.rounds):
                drafted = (number + number // 2) % 2 == 0
                counts[drafted].append(turn(server.url, load, levels, args.window, drafted))
                print("drafted  " if drafted else "undrafted", *counts[drafted][-1], flush=True)
    pairs = list(zip(counts[True], counts[False], strict=True))
    ratios = [
        [drafted[window] / undrafted[window] for drafted, undrafted in pairs] for window in range(len(levels))
    ]
    result = {
        "levels": levels,
        "window_s": args.window,
        "ratio": [round(median(values), 3) for values in ratios],
        "ratio_range": [[round(min(values), 3), round(max(values), 3)] for values in ratios],
        "ratio_all": round(sum(map(sum, counts[True])) / sum(map(sum, counts[False])), 3),
    }
    print(json.dumps(result))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levels", default="1,16,4,16,1,8", help="busy clients, window after window")
    parser.add_argument("--window", type=float, default=10, help="seconds at each level")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--contexts", default="256,1000,3500,7000", help="tokens of the prompts, in turns")
    parser.add_argument("--new-tokens", type=int, default=64)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
