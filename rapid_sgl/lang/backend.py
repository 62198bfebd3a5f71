"""Backends of SGLang's language that carry rapid options: what all share, and the one for a server."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.chat_template import ChatTemplate, get_chat_template, get_chat_template_by_model_path
from sglang.lang.global_config import global_config
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglSamplingParams

from rapid_sgl.config import RapidConfig
from rapid_sgl.http_client import Client
from rapid_sgl.lang.options import QUERY_KEY, check_options, current_options, merged, register_submit
from rapid_sgl.lang.passages import Passages
from rapid_sgl.request import SPANS_KEY, spans_to_wire
from rapid_sgl.retrieval.pipeline import RetrievalOptions
from rapid_sgl.retrieval.spans import Span

_LOGPROB_FIELDS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
_WINDOWS = ("budget", "head", "recent")


class RapidBackend(RuntimeEndpoint):
    """A ``RuntimeEndpoint`` whose requests go through ``_send`` and ``_stream`` and carry rapid options.

    Args:
        passages: finds the spans that ``rapid_query`` asks for.
        options: defaults of every call; ``rapid_options`` says how.
    """

    def __init__(self, passages: Passages, options: Mapping[str, Any]) -> None:
        BaseBackend.__init__(self)  # RuntimeEndpoint's own asks a server
        register_submit()
        self.options = check_options(options)
        self.passages = passages

    @property
    def endpoint(self) -> RapidBackend:
        """Asked for by SGLang when a program starts: the backend with the options around that start, so that
        batches, streams and forks have them in every thread."""
        options = current_options()
        return self.with_options(**options) if options else self

    def with_options(self, **options: Any) -> RapidBackend:
        """This backend with other defaults; connection, tokenizer and retrieval are shared.

        Raises:
            RapidOptionError: see ``rapid_options``.
        """
        other = copy.copy(self)
        other.options = merged(self.options, check_options(options))
        return other

    def spans(self, text: str, query: str, **options: Any) -> list[Span]:
        """Spans of the prompt ``text`` that answer ``query``, as ``rapid_query`` selects them.

        Args:
            options: ``rapid_budget``, ``rapid_head``, ``rapid_recent``, where they are not this backend's.
        """
        config = RapidConfig(**_windows(merged(self.options, check_options(options))))
        return self.passages.find(text, query, budget=config.budget, head=config.head, recent=config.recent)

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[Any, Any]:
        """Text and ``meta_info`` of one answer, lists of them for ``n`` > 1.

        ``meta_info`` has SGLang's accept statistics (``spec_accept_length``) and the ``rapid_spans`` sent.
        """
        body = self._body(s, sampling_params)
        sent = _sent_spans(body)
        self._add_images(s, body)
        reply = self._send(body)
        if isinstance(reply, list):
            return [one["text"] for one in reply], [{**one["meta_info"], **sent} for one in reply]
        return reply["text"], {**reply["meta_info"], **sent}

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """New text and ``meta_info`` so far, per event."""
        body = self._body(s, sampling_params)
        sent = _sent_spans(body)
        self._add_images(s, body)
        for text, meta in self._stream(body):
            yield text, {**meta, **sent}

    def cache_prefix(self, prefix_str: str) -> None:
        self._send({"text": prefix_str, "sampling_params": {"max_new_tokens": 0}})

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        body = {"text": s.text_, "sampling_params": {"max_new_tokens": 0}}
        self._add_images(s, body)
        self._send(body)

    fill_image = commit_lazy_operations

    def _generate_http_request(self, s: StreamExecutor, data: dict[str, Any]) -> Any:
        """What the inherited ``select`` asks for, in the form that it expects.

        SGLang 0.5.23 reports the first token of the range asked for without a logprob, where ``select`` counts on
        the token behind it, and none at all of a prompt where no range is named.
        """
        self._add_images(s, data)
        if "input_ids" in data:
            return self._send({**data, "logprob_start_len": 0})
        replies = self._send(data)
        for reply in replies if isinstance(replies, list) else []:
            logprobs = reply["meta_info"]["input_token_logprobs"]
            if logprobs and logprobs[0][0] is None:
                del logprobs[0]
        return replies

    def _send(self, body: dict[str, Any]) -> Any:
        """The reply to one ``/generate`` body."""
        raise NotImplementedError

    def _stream(self, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """New text and ``meta_info`` per event of the answer to one ``/generate`` body."""
        raise NotImplementedError

    def _body(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> dict[str, Any]:
        self._handle_dtype_to_regex(sampling_params)
        sampling = {
            "skip_special_tokens": global_config.skip_special_tokens_in_output,
            "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
            **sampling_params.to_srt_kwargs(),
        }
        custom = self._custom_params(s.text_)
        if custom:
            sampling["custom_params"] = custom
        given = {name: getattr(sampling_params, name) for name in _LOGPROB_FIELDS}
        logprobs = {name: value for name, value in given.items() if value is not None}
        return {"text": s.text_, "sampling_params": sampling, **logprobs}

    def _custom_params(self, text: str) -> dict[str, Any]:
        """The options in force for a prompt, its query answered with spans."""
        options = merged(self.options, current_options())
        options = {key: value for key, value in options.items() if value is not None}
        query = options.pop(QUERY_KEY, None)
        if query is None or options.get("rapid_drafter") == "off":
            return options
        # The spans fill a budget of ours, so the request names it instead of relying on the server's.
        windows = {f"rapid_{name}": value for name, value in _windows(options).items()}
        return {**options, **windows, SPANS_KEY: spans_to_wire(self.spans(text, query, **options))}


class RapidEndpoint(RapidBackend):
    """A server as the backend of ``sgl.function`` programs.

        backend = RapidEndpoint("http://127.0.0.1:30000", rapid_draft_length=3)
        state = program.run(question="…", backend=backend)
        print(state["answer"], state.get_meta_info("answer")["spec_accept_length"])

    Args:
        base_url: of the server; for an ``sgl.Runtime`` its ``url``.
        api_key: sent as a bearer token with every request, streams included.
        chat_template_name: one of SGLang's (``sglang.lang.chat_template``); None: the one that the model's
            name or the tokenizer's own template suggests.
        tokenizer_path: folder or hub id, where the server's own is not on this machine.
        retrieval: how ``rapid_query`` finds spans; None: by words (BM25).
        options: defaults of every call; ``rapid_options`` says how.

    Raises:
        RapidOptionError: a wrong option.
        ServerError: the server cannot be reached or is not an SGLang server.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        chat_template_name: str | None = None,
        tokenizer_path: str | None = None,
        retrieval: RetrievalOptions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(Passages(self._load_tokenizer, retrieval), options)
        self.client = Client(base_url, api_key)
        self.base_url, self.api_key, self.verify = self.client.url, api_key, None
        self.info = self.client.info()
        self.model_info = self.info.raw
        self._tokenizer_path = tokenizer_path or self.info.tokenizer_path
        own = _template_files(self._tokenizer_path)
        self.chat_template = chat_template(chat_template_name, self.info.model_path, own)

    def flush_cache(self) -> None:
        self.client.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        return self.client.info().raw

    def _load_tokenizer(self) -> Any:
        from rapid_sgl.cli.asking import load_builder

        return load_builder(self._tokenizer_path).tokenizer

    def _send(self, body: dict[str, Any]) -> Any:
        return self.client.generate(**body)

    def _stream(self, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for chunk in self.client.stream(incremental=self.info.incremental_stream, **body):
            yield chunk.text, chunk.meta_info


def chat_template(name: str | None, model_path: str, own: str) -> ChatTemplate:
    """SGLang's template of that name or for that model; ChatML where only the tokenizer's ``own`` says so."""
    if name is not None:
        return get_chat_template(name)
    found = get_chat_template_by_model_path(model_path)
    if found.name == "default" and "<|im_start|>" in own:
        return get_chat_template("chatml")
    return found


def _template_files(tokenizer_path: str) -> str:
    """What a tokenizer's files say about its chat template; "" where they are not on this machine."""
    files = (Path(tokenizer_path) / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def _windows(options: Mapping[str, Any]) -> dict[str, Any]:
    """Budget, head and recent window that a request with these options is drafted with."""
    given = {name: options.get(f"rapid_{name}") for name in _WINDOWS}
    return {name: getattr(RapidConfig, name) if value is None else value for name, value in given.items()}


def _sent_spans(body: Mapping[str, Any]) -> dict[str, Any]:
    custom = body["sampling_params"].get("custom_params") or {}
    return {SPANS_KEY: custom[SPANS_KEY]} if SPANS_KEY in custom else {}
