"""Decoding methods as they are named on the command line, and what they ask of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rapid_sgl.config import AUTO, TRANSFERS, WIRE_PREFIX, RapidConfig, RapidOptionError
from rapid_sgl.eval import EvalError
from rapid_sgl.request import SPANS_KEY, spans_to_wire
from rapid_sgl.retrieval.spans import Span

TARGET, RAG_ONLY = "target", "rag-only"
DRAFTERS = ("view", "rag")
# Of methods with a transfer where the server would choose by what it has measured: how much of an answer is
# transferred depends on it, and has to be the same in every run.
TRANSFER_DRAFT_LENGTH = 4
FORMS = "target, rag-only, view, rag, or a drafter with a transfer and its weight, as rag:distill:10 or view:mixture:0.1"


@dataclass(frozen=True)
class Method:
    """One way to answer.

    ``drafter`` is None for target and rag-only; ``weight`` is eta under transfer distill, else lambda.
    """

    name: str
    drafter: str | None = None
    transfer: str = "none"
    weight: float = 0.0

    @property
    def lossless(self) -> bool:
        """Whether its greedy answers are the target's by design."""
        return self.name == TARGET or (self.drafter is not None and self.transfer == "none")

    def config(self, base: RapidConfig) -> RapidConfig:
        """``base`` with this method's drafter and transfer, the latter with a fixed draft length."""
        values: dict[str, Any] = {"drafter": self.drafter or "off", "transfer": self.transfer}
        if self.transfer != "none":
            values["eta" if self.transfer == "distill" else "lam"] = self.weight
            if base.draft_length == AUTO:
                values["draft_length"] = TRANSFER_DRAFT_LENGTH
        return replace(base, **values)

    def custom_params(self, base: RapidConfig, spans: Sequence[Span]) -> dict[str, Any]:
        """The request's options."""
        if self.drafter is None:
            return {f"{WIRE_PREFIX}drafter": "off"}
        return {**self.config(base).to_wire(), SPANS_KEY: spans_to_wire(spans)}


def parse_method(text: str) -> Method:
    """A method from its name.

    Raises:
        EvalError: no such drafter, transfer or weight.
    """
    drafter, _, rest = text.partition(":")
    if text in (TARGET, RAG_ONLY):
        return Method(text)
    if drafter not in DRAFTERS:
        raise EvalError(f"{text!r} is not a method; use {FORMS}")
    if not rest:
        return Method(text, drafter)
    transfer, _, number = rest.partition(":")
    known = [name for name in TRANSFERS if name != "none"]
    if transfer not in known:
        raise EvalError(f"method {text!r}: {transfer!r} is not one of {', '.join(known)}; use {FORMS}")
    try:
        method = Method(text, drafter, transfer, float(number))
        method.config(RapidConfig())
    except ValueError as error:
        reason = str(error) if isinstance(error, RapidOptionError) else f"{number!r} is not a number"
        raise EvalError(f"method {text!r}: {reason}; use {FORMS}") from error
    return method


def parse_methods(text: str) -> list[Method]:
    """Methods separated by commas; raises EvalError for a wrong or repeated one."""
    methods = [parse_method(part.strip()) for part in text.split(",")]
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise EvalError(f"--methods {text} names one twice")
    return methods
