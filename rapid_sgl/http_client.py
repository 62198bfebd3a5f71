"""A thin client of SGLang's native HTTP API: server facts, answers, streams with timings."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import requests

# A healthy server answers at once; a chunk of a long prefill on a small CPU takes minutes.
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 900.0


class ServerError(RuntimeError):
    """The server refused a request, cannot be reached or died; the text says what to do about it."""


@dataclass(frozen=True)
class ServerInfo:
    """What a client has to know of a server; ``raw`` is the merged /model_info and /server_info."""

    model_path: str
    tokenizer_path: str
    max_input_tokens: int  # the longest prompt the scheduler admits
    speculative_algorithm: str | None
    incremental_stream: bool  # stream chunks carry only new text (--incremental-streaming-output)
    raw: dict[str, Any] = field(repr=False)

    def max_prompt_tokens(self, max_new_tokens: int) -> int:
        """Prompt tokens that leave room for the answer within the model's context or the KV pool."""
        return self.max_input_tokens - max_new_tokens


@dataclass(frozen=True)
class Chunk:
    """One event of a stream: the new text, the counts so far, and when it arrived."""

    text: str
    completion_tokens: int  # generated so far, this event included
    meta_info: dict[str, Any]
    arrived: float  # time.perf_counter() seconds


@dataclass(frozen=True)
class Completion:
    """A finished answer with the timings that a client can see."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float  # request sent to first token seen: queueing and prefill
    decode_s: float  # first event to last event
    decode_tokens: int  # tokens that arrived after the first event
    meta_info: dict[str, Any]

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Decode speed without the prefill; None when everything came in one event."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None

    @property
    def accept_length(self) -> float | None:
        """Mean tokens committed per target pass (``spec_accept_length``); None without speculation."""
        return self.meta_info.get("spec_accept_length")

    @property
    def finish_reason(self) -> str:
        """SGLang's finish type: ``stop``, ``length`` or ``abort``."""
        reason = self.meta_info.get("finish_reason")
        return reason.get("type", "unknown") if isinstance(reason, dict) else str(reason)


class Client:
    """One server, addressed by its base URL.

    Args:
        url: base address, for example ``http://127.0.0.1:30000``.
        api_key: sent as a bearer token when the server was started with ``--api-key``.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        host = urlsplit(self.url).hostname
        if urlsplit(self.url).scheme not in ("http", "https") or not host:
            raise ServerError(f"server address {url!r} is not a URL; use http://HOST:PORT")
        self._session = requests.Session()
        if host in ("localhost", "127.0.0.1", "::1"):
            self._session.trust_env = False  # a proxy from the environment cannot reach loopback
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def healthy(self) -> bool:
        """True once the server has warmed up and answers."""
        try:
            return self._session.get(f"{self.url}/health", timeout=CONNECT_TIMEOUT_S).status_code == 200
        except requests.RequestException:
            return False

    def info(self) -> ServerInfo:
        """Model and limits of the server.

        Raises:
            ServerError: unreachable, not an SGLang server, or an error status.
        """
        raw = {**self._json("GET", "/server_info"), **self._json("GET", "/model_info")}
        try:
            return ServerInfo(
                model_path=raw["model_path"],
                tokenizer_path=raw.get("tokenizer_path") or raw["model_path"],
                # SGLang refuses a prompt of max_req_input_len tokens or more.
                max_input_tokens=int(raw["max_req_input_len"]) - 1,
                speculative_algorithm=raw.get("speculative_algorithm"),
                incremental_stream=bool(raw.get("incremental_streaming_output")),
                raw=raw,
            )
        except KeyError as error:
            raise ServerError(
                f"{self.url} does not report {error.args[0]}; is it an SGLang server of a matching release?"
            ) from error

    def generate(self, **body: Any) -> Any:
        """POST /generate without streaming; the keywords are SGLang's ``GenerateReqInput`` fields.

        Raises:
            ServerError: the request was refused (its text is the server's message) or the server is gone.
        """
        return self._json("POST", "/generate", json=body)

    def flush_cache(self) -> None:
        """Empty the server's prefix cache; raises ServerError while requests are running."""
        self._request("POST", "/flush_cache")

    def stream(self, *, incremental: bool = False, **body: Any) -> Iterator[Chunk]:
        """POST /generate with ``stream: true``; closing the iterator aborts the request on the server.

        Args:
            incremental: the server's ``ServerInfo.incremental_stream``.
            body: SGLang's ``GenerateReqInput`` fields.

        Raises:
            ServerError: refused, aborted by the server, or the connection broke.
        """
        response = self._request("POST", "/generate", json={**body, "stream": True}, stream=True)
        seen = 0
        with contextlib.closing(response):
            try:
                for event in _events(response):
                    _raise_stream_error(event)
                    text = event.get("text") or ""
                    new = text if incremental else text[seen:]
                    seen = len(text)
                    meta = event.get("meta_info", {})
                    yield Chunk(new, int(meta.get("completion_tokens", 0)), meta, time.perf_counter())
            except requests.RequestException as error:
                raise ServerError(f"connection to {self.url} broke mid-answer: {error}") from error

    def complete(
        self, *, on_text: Callable[[str], None] | None = None, incremental: bool = False, **body: Any
    ) -> Completion:
        """Stream one answer to its end and time it.

        Args:
            on_text: called with each piece of new text as it arrives.
            incremental, body: as for ``stream``.
        """
        sent = time.perf_counter()
        chunks: list[Chunk] = []
        for chunk in self.stream(incremental=incremental, **body):
            chunks.append(chunk)
            if on_text and chunk.text:
                on_text(chunk.text)
        if not chunks:
            raise ServerError(f"{self.url} closed the stream without an answer; look at the server's log")
        first, last = chunks[0], chunks[-1]
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            prompt_tokens=int(last.meta_info.get("prompt_tokens", 0)),
            cached_tokens=int(last.meta_info.get("cached_tokens", 0)),
            completion_tokens=last.completion_tokens,
            ttft_s=first.arrived - sent,
            decode_s=last.arrived - first.arrived,
            decode_tokens=last.completion_tokens - first.completion_tokens,
            meta_info=last.meta_info,
        )

    def _json(self, method: str, path: str, **kwargs: Any) -> Any:
        response = self._request(method, path, **kwargs)
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(
                f"{self.url}{path} did not answer with JSON; is it an SGLang server?"
            ) from error

    def _request(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        timeout = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
        try:
            response = self._session.request(method, f"{self.url}{path}", timeout=timeout, **kwargs)
        except requests.RequestException as error:
            raise ServerError(
                f"cannot reach a server at {self.url} ({type(error).__name__}); "
                "start one with `rapid-sgl serve` or check the address"
            ) from error
        if response.status_code >= 400:
            raise ServerError(f"server answered {response.status_code} to {path}: {_error_text(response)}")
        return response


def _events(response: requests.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if not line.startswith(b"data:"):
            continue
        payload = line[len(b"data:") :].strip()
        if payload == b"[DONE]":
            return
        yield json.loads(payload)


def _raise_stream_error(event: Mapping[str, Any]) -> None:
    if "error" in event:
        raise ServerError(f"server refused the request: {_message(event)}")
    reason = event.get("meta_info", {}).get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise ServerError(f"server aborted the request: {_message(reason)}")


def _error_text(response: requests.Response) -> str:
    try:
        return _message(response.json())
    except ValueError:
        return response.text[:300].strip() or response.reason


def _message(body: Any) -> str:
    """The human part of SGLang's several error shapes, on one line."""
    while isinstance(body, Mapping):
        body = next((body[key] for key in ("error", "message", "detail") if key in body), str(dict(body)))
    return " ".join(str(body).split())
