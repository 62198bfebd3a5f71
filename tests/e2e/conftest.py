"""Servers of the end-to-end tests: one per configuration, started on first use.

One lives to the end; the others serve one module each, so that at most two are in memory at once.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from rapid_sgl.client import Server
from rapid_sgl.http_client import ServerError
from rapid_sgl.models import embedded_model_path

# a leak makes SGLang's strict idle check raise; a crash leaves a traceback
ALARMS = re.compile(r"Traceback|memory leak|Scheduler hit an exception", re.IGNORECASE)
# Options of a request for tests that need drafts whatever they cost: where chains have no prescribed length, how far
# a step drafts depends on how fast the machine happens to be.
DRAFTED = {"rapid_draft_length": 4, "rapid_copy": "off"}
ALWAYS_DRAFT = ("--rapid-draft-length=4", "--rapid-copy=off")  # the same for a server
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1", "HF_HUB_OFFLINE": "1"}


def serve(tmp: Path, *args: str, env: Mapping[str, str] | None = None, **options: Any) -> Iterator[Server]:
    """Start a server, yield it, and at the end look for leaks and crashes in its log."""
    log = tmp / "server.log"
    with Server.start(args, env={**STRICT, **(env or {})}, log_path=log, **options) as server:
        yield server
        flush(server)
        assert server.alive, f"the server ended during the tests:\n{server.log_tail()}"
    alarms = [line for line in log.read_text(errors="replace").splitlines() if ALARMS.search(line)]
    assert not alarms, "\n".join(alarms[:20])


def flush(server: Server) -> None:
    """Empty the caches; SGLang refuses while the scheduler still lets go of the last request."""
    for _ in range(20):
        with contextlib.suppress(ServerError):
            server.client.flush_cache()
            return
        time.sleep(0.5)
    if server.alive:
        server.client.flush_cache()


@pytest.fixture(scope="session")
def rapid_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`rapid-sgl serve` with the embedded model and default options, and a cache that leaves memory for others."""
    yield from serve(
        tmp_path_factory.mktemp("rapid"),
        "--enable-metrics",
        "--max-total-tokens=48000",
        "--tool-call-parser=hermes",
    )


@pytest.fixture(scope="module")
def crowded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A KV pool far too small for the requests that the tests send at once, so that some are retracted."""
    yield from serve(
        tmp_path_factory.mktemp("crowded"),
        "--max-total-tokens=1600",
        "--max-running-requests=16",
        "--schedule-conservativeness=0.1",
        "--rapid-max-draft-length=4",  # verify slots for ten would be most of this pool
    )


@pytest.fixture(scope="module")
def draft_model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A separate draft model: the embedded one without four of its layers, so that it is often wrong."""
    pruned = tmp_path_factory.mktemp("pruned")
    pruned_checkpoint(pruned, drop=range(22, 26))
    yield from serve(
        tmp_path_factory.mktemp("draft-model"),
        f"--speculative-draft-model-path={pruned}",
        "--rapid-drafter=auto",
        "--rapid-draft-tokens=3000",
        "--rapid-draft-prefill=512",
        *ALWAYS_DRAFT,
    )


@pytest.fixture(scope="module")
def twin_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model's int8 twin drafts. Spans are to be chosen at once, so none ever are."""
    late = ("--rapid-auto-spans=bm25", "--rapid-auto-deadline=0")
    yield from serve(tmp_path_factory.mktemp("twin"), "--rapid-drafter-weights=int8", *late, *ALWAYS_DRAFT)


def pruned_checkpoint(folder: Path, drop: range) -> None:
    """Write the embedded model without the layers ``drop`` into ``folder``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded_model_path())
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in drop]
    model.model.layers = type(model.model.layers)(kept)
    model.config.num_hidden_layers = len(kept)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_model_path())


def chat_ids(document: str, question: str) -> list[int]:
    """Token ids of a chat-templated prompt: the document, then the question."""
    text = tokenizer().apply_chat_template(
        [{"role": "user", "content": f"{document}\n\n{question}".strip()}],
        tokenize=False,
        add_generation_prompt=True,
    )
    return tokenizer()(text)["input_ids"]


@cache
def reference_text(tokens: int) -> str:
    """The start of the Python language reference, about ``tokens`` long."""
    names = (
        "with",
        "try",
        "for",
        "while",
        "if",
        "function",
        "class",
        "import",
        "assert",
        "del",
        "return",
        "raise",
    )
    ids = tokenizer()("\n".join(topics[name] for name in names))["input_ids"]
    return tokenizer().decode(ids[:tokens])


def generate(
    server: Server, input_ids: list[int], max_new_tokens: int = 32, **options: Any
) -> dict[str, Any]:
    """One answer. ``rapid_*`` keywords go to ``custom_params``, others to ``sampling_params``."""
    return server.client.generate(**body(input_ids, max_new_tokens, **options))


def body(input_ids: Any, max_new_tokens: int = 32, **options: Any) -> dict[str, Any]:
    rapid = {key: value for key, value in options.items() if key.startswith("rapid_")}
    top = {
        key: options.pop(key) for key in ("return_logprob", "top_logprobs_num", "stream") if key in options
    }
    sampling = {key: value for key, value in options.items() if key not in rapid}
    params = {"temperature": 0, **sampling, "max_new_tokens": max_new_tokens, "custom_params": rapid or None}
    return {"input_ids": input_ids, "sampling_params": params, **top}


def undrafted(server: Server, prompts: list[list[int]], *args: Any, **options: Any) -> list[dict[str, Any]]:
    """The answers without drafts to prompts that share most of the longest one's beginning: it is prefilled once."""
    generate(server, max(prompts, key=len), 1, rapid_drafter="off")
    return in_parallel(8, lambda ids: generate(server, ids, *args, rapid_drafter="off", **options), prompts)


def in_parallel(count: int, call: Any, items: list[Any]) -> list[Any]:
    """``call`` over ``items`` with ``count`` requests under way at once; exceptions are raised."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, items))


def rapid_stats(server: Server) -> dict[str, Any]:
    """The ``rapid`` part of ``/server_info``."""
    return server.client.info().raw["internal_states"][0]["rapid"]
