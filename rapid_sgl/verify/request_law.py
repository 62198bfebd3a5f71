"""What each request asks of verification: temperature, filters, transfer and its schedule, residual.

``law.py`` and ``schedule.py`` say what the values mean and compute with them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rapid_sgl.verify.schedule import Schedule, retrieval_weight

TOP_K_OFF = 1 << 30  # larger than any vocabulary; SGLang's TOP_K_ALL


class Transfer(enum.IntEnum):
    """How the draft distribution changes the target law."""

    NONE = 0
    MIXTURE = 1
    LOGITS = 2
    DISTILL = 3


class Residual(enum.IntEnum):
    """What a rejected draft is replaced from."""

    EXACT = 0
    PAPER = 1


@dataclass(frozen=True)
class LawRow:
    """One request's entry of a ``Law`` as Python scalars. Raises ValueError for a value outside its range."""

    greedy: bool = False
    temperature: float = 1.0  # > 0; ignored when greedy
    top_k: int = TOP_K_OFF  # >= 1
    top_p: float = 1.0  # (0, 1]; 1 is off
    min_p: float = 0.0  # [0, 1]; 0 is off
    transfer: Transfer = Transfer.NONE
    weight: float = 0.0  # λ in [0, 1] for MIXTURE and LOGITS, η >= 0 for DISTILL; at 0 the law is NONE's
    alpha: float = 0.1  # [0, 1]; DISTILL only
    residual: Residual = Residual.EXACT
    schedule: Schedule = Schedule.CONSTANT  # of the weight
    gate: float = 0.0  # [0, 1]; CONFIDENCE and RETRIEVAL only
    answer_length: int = 0  # tokens, >= 1 for LINEAR, which alone reads it
    score: float = 0.0  # [0, 1]; RETRIEVAL only

    def __post_init__(self) -> None:
        lambda_like = self.transfer in (Transfer.MIXTURE, Transfer.LOGITS)
        checks = (
            (
                "temperature",
                self.greedy or 0 < self.temperature < math.inf,
                "a finite T > 0, or greedy for T=0",
            ),
            ("top_k", 1 <= self.top_k <= TOP_K_OFF, f"1 <= top_k <= {TOP_K_OFF} (the latter is off)"),
            ("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1 (1 is off)"),
            ("min_p", 0 <= self.min_p <= 1, "0 <= min_p <= 1 (0 is off)"),
            ("weight", 0 <= self.weight < math.inf, "a finite weight >= 0"),
            ("weight", self.weight <= 1 or not lambda_like, f"λ <= 1 with {self.transfer.name}"),
            ("alpha", 0 <= self.alpha <= 1, "0 <= alpha <= 1"),
            ("gate", 0 <= self.gate <= 1, "0 <= gate <= 1"),
            ("score", 0 <= self.score <= 1, "0 <= score <= 1"),
            (
                "answer_length",
                self.answer_length >= 1 or self.schedule is not Schedule.LINEAR,
                "answer_length >= 1 with LINEAR",
            ),
        )
        for name, valid, wanted in checks:
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)!r} gives no distribution: use {wanted}")

    @property
    def request_weight(self) -> float:
        """The weight as far as the request alone decides it: at position 0, with an open CONFIDENCE gate."""
        if self.schedule is Schedule.RETRIEVAL:
            return retrieval_weight(self.weight, self.score, self.gate)
        return self.weight

    @property
    def horizon(self) -> float:
        """Tokens after which the weight is 0; infinite unless LINEAR."""
        return float(self.answer_length) if self.schedule is Schedule.LINEAR else math.inf

    @property
    def min_confidence(self) -> float:
        """max q below which the weight is 0; 0 unless CONFIDENCE."""
        return self.gate if self.schedule is Schedule.CONFIDENCE else 0.0


class Group(NamedTuple):
    """Some rows of a law, for computing on them alone; ``Law.only`` gives their entries."""

    host: Tensor  # int64 [m], CPU: which rows, rising
    rows: Tensor | slice  # the same on the law's device; slice(None) for all: indexes without a copy


@dataclass(frozen=True, eq=False)
class Law:
    """One entry per request; every tensor is [bs] and on one device.

    Properties decide from a CPU copy which rows need what, so that using a law never waits for the device.
    Making that copy does, once, for a law built from tensors of an accelerator: prefer ``from_rows``.
    """

    greedy: Tensor  # bool
    temperature: Tensor  # float32, > 0; ignored where greedy
    top_k: Tensor  # int32, >= 1; >= vocabulary is off; ignored where greedy, like top_p and min_p
    top_p: Tensor  # float32, (0, 1]; 1 is off
    min_p: Tensor  # float32, [0, 1]; 0 is off
    transfer: Tensor  # int8, Transfer codes
    weight: Tensor  # float32, λ or η: ``LawRow.request_weight``
    alpha: Tensor  # float32, DISTILL's threshold
    residual: Tensor  # int8, Residual codes
    horizon: Tensor  # float32, tokens after which the weight is 0; inf is never
    min_confidence: Tensor  # float32, max q below which the weight is 0; 0 is never

    @classmethod
    def from_rows(cls, rows: Sequence[LawRow], device: torch.device | str = "cpu") -> Law:
        """Stack per-request entries, without waiting for the device."""
        columns = (
            torch.tensor([getattr(row, _SOURCES.get(name, name)) for row in rows], dtype=dtype)
            for name, dtype in _DTYPES.items()
        )
        host = cls(*columns)
        return host if torch.device(device).type == "cpu" else host._on(torch.device(device))

    def __len__(self) -> int:
        return self.greedy.shape[0]

    def select(self, rows: Tensor) -> Law:
        """The entries at ``rows`` (int64 [m]; repeats allowed). CPU rows keep this free of device waits."""
        if self.host is not self:
            return self.host.select(rows.cpu())._on(self.greedy.device)
        return Law(*(tensor[rows] for tensor in self._tensors()))

    def only(self, group: Group) -> Law:
        """The entries of a group of this law."""
        return self if isinstance(group.rows, slice) else self.select(group.host)

    @property
    def host(self) -> Law:
        """The same law on the CPU (itself when it is there already)."""
        return self if self.greedy.device.type == "cpu" else self._mirror

    @cached_property
    def any_sampled(self) -> bool:
        """Some row is not greedy: uniforms and q are needed."""
        return not bool(self.host.greedy.all())

    @cached_property
    def any_transfer(self) -> bool:
        """Some row's target law depends on the draft distribution: q is needed."""
        return bool(self.host._transfers().any())

    @cached_property
    def any_plain_greedy(self) -> bool:
        """Some row commits argmax z."""
        return bool((self.host.greedy & ~self.host._transfers()).any())

    @cached_property
    def needs_filter(self) -> bool:
        """Some sampled row has an active top-k, top-p or min-p."""
        host = self.host
        active = (host.top_k < TOP_K_OFF) | (host.top_p < 1) | (host.min_p > 0)
        return bool((active & ~host.greedy).any())

    @cached_property
    def sampled(self) -> Group | None:
        """The rows that draw tokens."""
        return self._group(~self.host.greedy)

    @cached_property
    def greedy_transfer(self) -> Group | None:
        """The greedy rows that commit argmax p̂ where p̂ is not p."""
        return self._group(self.host.greedy & self.host._transfers())

    @cached_property
    def mixture(self) -> Group | None:
        """The rows with transfer MIXTURE and λ > 0."""
        return self._group((self.host.transfer == Transfer.MIXTURE) & self.host._transfers())

    @cached_property
    def logits(self) -> Group | None:
        """The rows with transfer LOGITS and λ > 0; w is needed."""
        return self._group((self.host.transfer == Transfer.LOGITS) & self.host._transfers())

    @cached_property
    def distill(self) -> Group | None:
        """The rows with transfer DISTILL and η > 0."""
        return self._group((self.host.transfer == Transfer.DISTILL) & self.host._transfers())

    @cached_property
    def any_fading(self) -> bool:
        """Some row's transfer weakens over the answer (LINEAR): positions are needed."""
        return bool((self.host._transfers() & (self.host.horizon < math.inf)).any())

    @cached_property
    def gated(self) -> Group | None:
        """The rows whose transfer waits for a confident drafter (CONFIDENCE)."""
        return self._group(self.host._transfers() & (self.host.min_confidence > 0))

    @cached_property
    def paper(self) -> Group | None:
        """The rows whose rejections follow the paper's Algorithm 1."""
        return self._group(self.host.residual == Residual.PAPER)

    def filter_groups(self, vocab: int) -> tuple[Group | None, Group | None]:
        """The rows that top-k or top-p truncates, and the rows that only min-p does, for a vocabulary size."""
        if not self.needs_filter:
            return None, None
        host = self.host
        ranked = ((host.top_k < vocab) | (host.top_p < 1)) & ~host.greedy
        return self._group(ranked), self._group((host.min_p > 0) & ~host.greedy & ~ranked)

    @cached_property
    def scale(self) -> Tensor:
        """float32 [bs, 1]: what logits are divided by; T, and 1 where greedy."""
        return torch.where(self.greedy, 1.0, self.temperature).unsqueeze(-1)

    def _transfers(self) -> Tensor:
        return (self.transfer != Transfer.NONE) & (self.weight > 0)

    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in _DTYPES)

    @cached_property
    def _mirror(self) -> Law:
        return Law(*(tensor.cpu() for tensor in self._tensors()))

    def _on(self, device: torch.device) -> Law:
        """A copy of this CPU law on an accelerator that keeps it as its ``host``."""
        law = Law(*(tensor.to(device, non_blocking=True) for tensor in self._tensors()))
        law.__dict__["_mirror"] = self
        return law

    def _group(self, mask: Tensor) -> Group | None:
        host = mask.nonzero().squeeze(-1)
        if host.numel() == 0:
            return None
        return Group(host, slice(None) if host.numel() == len(self) else host.to(self.greedy.device))


_DTYPES = {
    "greedy": torch.bool,
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "transfer": torch.int8,
    "weight": torch.float32,
    "alpha": torch.float32,
    "residual": torch.int8,
    "horizon": torch.float32,
    "min_confidence": torch.float32,
}
_SOURCES = {"weight": "request_weight"}  # columns that are not the field of a row with their name
