"""RAPID in Jupyter: ask a question of a long document and see where every token of the answer came from.

    from rapid_sgl.notebook import ask, server

    url = server()                       # RAPID_SERVER, or a server that ends with the notebook
    answer = ask(url, document, "Who signed it?", rapid_drafter="view")
    answer                               # coloured tokens, hover for p, q and p-hat, and the span map
    answer.save("answer.html")           # the same as a page of its own

No widgets: what is shown is HTML, so it survives in a saved notebook.
"""

from __future__ import annotations

import atexit
import html
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapid_sgl.config import RapidConfig
from rapid_sgl.drafter.rows import view_ranges
from rapid_sgl.request import SPANS_KEY, Span, spans_to_wire

# Colours of Okabe and Ito, which people with any kind of colour vision can tell apart.
COLOURS = {
    "model": "#009e73",
    "copy": "#56b4e9",
    "bonus": "#f0e442",
    "correction": "#d55e00",
    "plain": "#bbbbbb",
    "first": "#bbbbbb",
}
MEANINGS = {
    "model": "draft of the model, accepted",
    "copy": "copied draft, accepted",
    "bonus": "the target's token after a chain accepted whole",
    "correction": "the target's token in place of a rejected draft",
    "plain": "the target's token, nothing drafted",
    "first": "the prefill's token",
}
_STYLE = """<style>
.rapid{font:14px/1.7 system-ui,sans-serif;color:#222;background:#fff;padding:.5em}
.rapid span.t{white-space:pre-wrap;border-radius:3px;padding:1px 0;color:#111}
.rapid .legend span{margin-right:1em}.rapid .legend b{padding:0 .5em;border-radius:3px;margin-right:.3em}
.rapid .map{position:relative;height:18px;background:#eee;margin:.6em 0}
.rapid .map i{position:absolute;top:0;bottom:0}
</style>"""


@dataclass(frozen=True)
class Token:
    """One token of an answer; probabilities as in ``rapid_sgl.verify.law``, None where there are none."""

    text: str
    origin: str  # a key of COLOURS
    p: float | None = None
    q: float | None = None
    p_hat: float | None = None


@dataclass(frozen=True)
class TracedAnswer:
    """An answer with its provenance; shows itself in a notebook."""

    text: str
    tokens: list[Token]
    prompt_tokens: int
    kept: list[Span]  # prompt ranges that the drafter saw
    spans: list[Span]  # those of them that retrieval chose
    meta_info: dict[str, Any] = field(repr=False)

    @property
    def origins(self) -> dict[str, int]:
        """Tokens by origin."""
        return dict(Counter(token.origin for token in self.tokens))

    @property
    def accept_length(self) -> float:
        """Tokens per target pass."""
        return float(self.meta_info["spec_accept_length"])

    def _repr_html_(self) -> str:
        tokens = "".join(_token_html(token) for token in self.tokens)
        return (
            f'{_STYLE}<div class="rapid"><div class="legend">{self._legend()}</div>'
            f'<p class="answer">{tokens}</p>{self._map()}<small>{self._summary()}</small></div>'
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the display as an HTML page of its own."""
        page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>RAPID</title>{self._repr_html_()}</html>'
        Path(path).write_text(page, encoding="utf-8")
        return Path(path)

    def _legend(self) -> str:
        return "".join(
            f'<span><b style="background:{COLOURS[origin]}">{count}</b>{MEANINGS[origin]}</span>'
            for origin, count in sorted(self.origins.items(), key=lambda item: -item[1])
        )

    def _map(self) -> str:
        """The prompt as a bar: dark where retrieval chose, light where a window was kept."""
        if not self.kept:
            return ""
        bars = [_bar(span, self.prompt_tokens, "#0072b2", "window") for span in self.kept]
        bars += [_bar(span, self.prompt_tokens, "#cc79a7", "retrieved") for span in self.spans]
        return f'<div class="map">{"".join(bars)}</div>'

    def _summary(self) -> str:
        seen = sum(end - start for start, end in self.kept)
        drafter = self.meta_info.get("rapid_drafter", "off")
        return (
            f"{len(self.tokens)} tokens, {self.accept_length:.2f} per target pass; drafter {drafter}, "
            f"which saw {seen} of {self.prompt_tokens} prompt tokens"
        )


def server(*args: str) -> str:
    """URL of the server in ``RAPID_SERVER``, or of one started with ``args`` (flags of ``rapid-sgl serve``)
    that ends with this process.

    Raises:
        ServerError: it did not start; the text has the end of its log.
    """
    if url := os.environ.get("RAPID_SERVER"):
        return url
    from rapid_sgl.client import Server

    folder = tempfile.TemporaryDirectory(prefix="rapid-sgl-")
    started = Server.start(list(args), log_path=Path(folder.name) / "server.log")
    atexit.register(folder.cleanup)
    atexit.register(started.stop)
    return started.url


def ask(
    url: str,
    document: str,
    question: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    sampling_seed: int | None = None,
    **rapid: Any,
) -> TracedAnswer:
    """Ask a question of a document, spans by BM25, with ``rapid_trace`` on.

    Args:
        url: of a RAPID server.
        rapid: request options, ``rapid_draft_length=4`` and so on.

    Raises:
        ServerError: the server refused; the text is its message.
        PromptTooLong: the document does not fit.
    """
    from rapid_sgl.bench.session import drafting_config
    from rapid_sgl.cli.asking import load_builder
    from rapid_sgl.http_client import Client
    from rapid_sgl.retrieval.pipeline import RetrievalOptions, Retriever

    client = Client(url, os.environ.get("OPENAI_API_KEY"))
    info = client.info()
    config = drafting_config(info, {}).with_wire({k: v for k, v in rapid.items() if k != SPANS_KEY})
    prompt = load_builder(info.tokenizer_path).build(
        document, question, info.max_prompt_tokens(max_new_tokens)
    )
    windows = {"budget": config.budget, "head": config.head, "recent": config.recent}
    spans = Retriever(RetrievalOptions("bm25")).spans(prompt, question, **windows)
    given = {**rapid, SPANS_KEY: rapid.get(SPANS_KEY, spans_to_wire(spans)), "rapid_trace": "on"}
    sampling = {
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "sampling_seed": sampling_seed,
        "custom_params": given,
    }
    reply = client.generate(
        input_ids=prompt.ids, sampling_params=sampling, return_logprob=True, return_text_in_logprobs=True
    )
    return traced(reply, len(prompt.ids), given[SPANS_KEY], config)


def traced(
    reply: dict[str, Any], prompt_tokens: int, wire_spans: list[int], config: RapidConfig
) -> TracedAnswer:
    """A reply of ``/generate`` with ``rapid_trace``, log-probabilities and their texts as a ``TracedAnswer``."""
    info = reply["meta_info"]
    texts = [entry[2] for entry in info["output_token_logprobs"]]
    records = [("first", None, None, None), *info["rapid_trace"]]
    tokens = [Token(text, *record) for text, record in zip(texts, records, strict=False)]
    spans = list(zip(wire_spans[::2], wire_spans[1::2], strict=True))
    drafted = info.get("rapid_drafter") in ("view", "rag")
    kept = view_ranges(prompt_tokens, spans, config) if drafted else []
    return TracedAnswer(reply["text"], tokens, prompt_tokens, kept, spans if drafted else [], info)


def _token_html(token: Token) -> str:
    names = (("p", token.p), ("q", token.q), ("p̂", token.p_hat))
    numbers = [f"{name} = {value:.3g}" for name, value in names if value is not None]
    title = html.escape("\n".join([MEANINGS[token.origin], *numbers]), quote=True)
    style = f"background:{COLOURS[token.origin]}80;border-bottom:2px solid {COLOURS[token.origin]}"
    return f'<span class="t {token.origin}" title="{title}" style="{style}">{html.escape(token.text)}</span>'


def _bar(span: Span, whole: int, colour: str, kind: str) -> str:
    left, width = 100 * span[0] / whole, 100 * (span[1] - span[0]) / whole
    return (
        f'<i class="{kind}" title="{kind}: tokens {span[0]} to {span[1]}" '
        f'style="left:{left:.3f}%;width:{max(width, 0.2):.3f}%;background:{colour}"></i>'
    )
