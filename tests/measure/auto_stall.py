"""What choosing spans costs a server and brings its clients; run by hand, prints one JSON line.

    .venv/bin/python tests/measure/auto_stall.py
    .venv/bin/python tests/measure/auto_stall.py --documents 100 --rounds 3 -- --max-total-tokens=60000

It starts a server with ``--rapid-auto-spans bm25`` and measures

- drafts: clients that know nothing of it ask about 7,000-token documents; accept length, and the time for
  choosing spans as a share of the prefill;
- stall: the gaps between the tokens of an unrelated stream while many requests arrive at once, in turns with
  spans chosen for them and without (``rapid_spans: []``), the cache flushed before each turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import openai

from rapid_sgl.cli.asking import load_builder
from rapid_sgl.cli.options import split_server_args
from rapid_sgl.client import Client, Server
from rapid_sgl.http_client import ServerError
from rapid_sgl.models import embedded_model_path
from rapid_sgl.retrieval.needles import KEYED_QUESTION, KEYS, Probe, planted_document

SERVER = ("--rapid-auto-spans=bm25", "--rapid-draft-length=4", "--max-total-tokens=30000")


def main(argv: list[str]) -> None:
    own, server_args = split_server_args(argv)
    args = _parser().parse_args(own)
    tokenizer = load_builder(str(embedded_model_path())).tokenizer
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with Server.start([*SERVER, *server_args], env={"HF_HUB_OFFLINE": "1"}, log_path=log) as server:
            report: dict[str, Any] = {"options": vars(args)}
            if args.questions:
                report["drafts"] = drafts(server, tokenizer, args.questions)
                print(json.dumps(report), file=sys.stderr)
            report["stall"] = stall(server.client, tokenizer, args)
    print(json.dumps(report))


def drafts(server: Server, tokenizer: Any, count: int) -> dict[str, Any]:
    """Accept length of answers to ``openai`` and ``curl``, and the share of choosing spans in the prefill.

    Each is about another document of 7,000 tokens: prefilled, chunked and indexed from nothing for two tokens of
    answer (one alone has no ``meta_info`` of RAPID's), whose time is nearly the prefill's, then asked for 64
    tokens; a second question comes by ``curl``.
    """
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    accepted: dict[str, list[float]] = {"openai": [], "curl": []}
    shares, milliseconds, later = [], [], []
    for member in range(count):
        document = planted_document(tokenizer, 7000, member, 24)
        named = [probe for probe in document.probes if _has_spans(probe, document.text)]
        one, two = (
            {
                "model": "default",
                "messages": [{"role": "user", "content": f"{document.text}\n\n{probe.question}"}],
                "temperature": 0,
            }
            for probe in (named[0], named[-1])
        )
        look = {"return_meta_info": True}  # SGLang's own
        flush(server.client)
        began = time.perf_counter()
        answer = client.chat.completions.create(**one, max_tokens=2, extra_body=look)
        took_ms = 1000 * (time.perf_counter() - began)
        info = answer.choices[0].meta_info
        assert info["rapid_spans_source"] == "auto", info
        milliseconds.append(info["rapid_auto_ms"])
        shares.append(milliseconds[-1] / (took_ms - milliseconds[-1]))
        answer = client.chat.completions.create(**one, max_tokens=64, extra_body=look)
        infos = {"openai": answer.choices[0].meta_info, "curl": _curl(server.url, two | look)}
        for name, info in infos.items():
            assert (info["rapid_spans_source"], info["rapid_drafter"]) == ("auto", "view"), info
            accepted[name].append(info["spec_accept_length"])
        later.append(infos["curl"]["rapid_auto_ms"])
    return {
        "answers": count,
        "accept_length": {name: round(fmean(values), 2) for name, values in accepted.items()},
        "accept_length_least": min(accepted["openai"]),
        "auto_ms": median(milliseconds),
        "auto_ms_next_question": median(later),
        "share_of_prefill": round(median(shares), 4),
        "share_of_prefill_max": round(max(shares), 4),
    }


def _has_spans(probe: Probe, text: str) -> bool:
    """BM25 has nothing to go by in a question without a word of the text, nor where the windows hold all there is."""
    between = (start > 1000 and end < len(text) - 4000 for start, end in probe.answers)
    return probe.kind != "paraphrased" and all(between)


def _curl(url: str, body: dict[str, Any]) -> dict[str, Any]:
    command = ["curl", "-s", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", "@-"]
    answer = subprocess.run(
        command, input=json.dumps(body | {"max_tokens": 64}), capture_output=True, text=True, check=True
    )
    return json.loads(answer.stdout)["choices"][0]["meta_info"]


def stall(client: Client, tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Gaps of the stream in milliseconds, by whether spans were chosen; the turns alternate."""
    prompts = [
        planted_document(tokenizer, args.tokens, index % args.documents, 24).text
        + "\n\n"
        + KEYED_QUESTION.format(key=KEYS[index % len(KEYS)])
        for index in range(args.requests)
    ]
    gaps: dict[str, list[float]] = {"with": [], "without": []}
    early: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(2 * args.rounds):
        name = ("with", "without")[(turn + turn // 2) % 2]
        flush(client)
        times, burst = _turn(client, prompts, name == "with", args.new_tokens)
        after = [time for time in times if time >= burst]
        pairs = list(pairwise(after))
        gaps[name] += [right - left for left, right in pairs]
        early[name] += [right - left for left, right in pairs if left < burst + 2]
    result: dict[str, Any] = {name: _summary(values) for name, values in gaps.items()}
    result |= {f"{name}_first_2_s": _summary(values) for name, values in early.items()}
    result["ratio"] = round(median(gaps["with"]) / median(gaps["without"]), 3)
    return result


def _turn(client: Client, prompts: list[str], chosen: bool, new_tokens: int) -> tuple[list[float], float]:
    """Arrival times of the stream's tokens, and when the burst of requests began."""
    times: list[float] = []
    over = threading.Event()

    def watch() -> None:
        params = {"max_new_tokens": 6000, "temperature": 0, "ignore_eos": True}
        params["custom_params"] = {"rapid_drafter": "off"}  # a token at a time
        events: Iterator[Any] = client.stream(text="Once upon a time", sampling_params=params)
        for _ in events:
            times.append(time.perf_counter())
            if over.is_set():
                events.close()  # type: ignore[attr-defined]  # hangs up, which aborts the request
                return

    def ask(text: str) -> None:
        params: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        if not chosen:
            params["custom_params"] = {"rapid_spans": []}
        info = client.generate(text=text, sampling_params=params)["meta_info"]
        assert chosen == ("rapid_auto_ms" in info), info

    watcher = threading.Thread(target=watch)
    watcher.start()
    while len(times) < 20:
        time.sleep(0.05)
    burst = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(ask, prompts))
    over.set()
    watcher.join()
    return times, burst


def _summary(gaps: list[float]) -> dict[str, Any]:
    ordered = sorted(1000 * gap for gap in gaps)
    at = {name: ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {"gaps": len(ordered), **{name: round(value, 1) for name, value in at.items()}}


def flush(client: Client) -> None:
    """Empty the radix cache; refused while the scheduler still lets go of the last request."""
    for _ in range(60):
        try:
            return client.flush_cache()
        except ServerError:
            time.sleep(0.5)
    raise TimeoutError("the server does not come to rest")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=6, help="answers for the accept length; 0: none")
    parser.add_argument("--requests", type=int, default=100, help="that arrive at once")
    parser.add_argument("--documents", type=int, default=10, help="that they are about")
    parser.add_argument("--tokens", type=int, default=2500, help="of a document")
    parser.add_argument("--new-tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each kind")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
