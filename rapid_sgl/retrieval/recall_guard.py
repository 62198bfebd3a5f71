"""Whether retrieval is good enough to draft by: measured recall against a bound.

Spans that miss what the answer quotes cost drafts. ``rapid-sgl recall --save`` measures, this module
keeps the report and looks the prompt's length up in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rapid_sgl.retrieval.pipeline import RetrievalOptions

FILE_NAME = "recall.json"  # in a store's folder
FORMAT = 1  # raise when the meaning of a report changes
LOW_RECALL, UNMEASURED = "low_recall", "unmeasured"


class RecallReportError(ValueError):
    """A recall report cannot be used; the text names the file, the fault and the fix."""


@dataclass(frozen=True)
class LengthClass:
    """Prompts that one measurement speaks for."""

    up_to: int  # tokens of the documents that were measured
    recall: float  # mean over the kinds of question, so that none counts more for being asked more often


class RecallGuard:
    """Tells which prompts get no retrieved spans.

    A prompt is judged by the measurement at the shortest length that is not shorter than it. Longer prompts
    than any that was measured, and requests that retrieve fewer tokens than the measurement, are not judged
    and get none either.

    Args:
        path: a report of ``rapid-sgl recall --save``.
        options: how the server retrieves; the report must be about the same.
        embedder: its id (``Embedder.id``); None for bm25.
        room: tokens that the server retrieves for a request by default.
        least: recall below which no spans are chosen, 0 to 1.

    Raises:
        RecallReportError: there is no usable report about these options.
    """

    def __init__(
        self, path: Path, options: RetrievalOptions, embedder: str | None, room: int, least: float
    ) -> None:
        self._least = least
        try:
            report = _load(path)
            _check(report, options, embedder, room)
            self._budget = int(report["budget"])
            self.classes = _classes(report, options.scorer)
        except (KeyError, TypeError, ValueError) as error:
            detail = error if type(error) is ValueError else "it is none of this version of rapid-sgl"
            flags = f" --embedder {options.embedder}" if options.embedder else ""
            raise RecallReportError(
                f"cannot go by recall report {path}: {detail}; make one with "
                f"`rapid-sgl recall --scorers {options.scorer}{flags} --budget {room} --save {path}`"
            ) from error

    def refusal(self, prompt_len: int, room: int) -> str:
        """Why a prompt gets no spans: LOW_RECALL or UNMEASURED; "" when it may have some.

        Args:
            prompt_len: tokens.
            room: tokens that are retrieved for it.
        """
        judge = next((one for one in self.classes if prompt_len <= one.up_to), None)
        if judge is None or room < self._budget:
            return UNMEASURED
        return LOW_RECALL if judge.recall < self._least else ""

    def __str__(self) -> str:
        """For the log: what each length was found to have."""
        verdicts = [
            f"up to {one.up_to} tokens {one.recall:.2f}{' (too low)' if one.recall < self._least else ''}"
            for one in self.classes
        ]
        return f"recall within {self._budget} tokens, {self._least:g} wanted: {', '.join(verdicts)}"


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        ) from error
    report = json.loads(text)
    if report["format"] != FORMAT:
        raise ValueError(f"it has format {report['format']}, this version of rapid-sgl has {FORMAT}")
    return report


def _check(report: Mapping[str, Any], options: RetrievalOptions, embedder: str | None, room: int) -> None:
    """That the report is about what the server does."""
    ours: dict[str, Any] = {"chunk_tokens": options.chunk_tokens, "overlap": options.overlap}
    if options.scorer != "bm25":
        ours |= {"embedder": embedder, "threshold": options.threshold}
    for key, value in ours.items():
        if report[key] != value:
            raise ValueError(f"it was measured with {key} {report[key]}, this server has {value}")
    if report["budget"] > room:
        raise ValueError(
            f"it was measured with {report['budget']} retrieved tokens, this server retrieves {room} "
            "(its budget less the windows)"
        )


def _classes(report: Mapping[str, Any], scorer: str) -> list[LengthClass]:
    classes = [
        LengthClass(int(row["context"] or row["tokens_max"]), fmean(row["recall"].values()))
        for row in report["rows"]
        if row["scorer"] == scorer
    ]
    if not classes:
        raise ValueError(f"it says nothing about scorer {scorer}")
    return sorted(classes, key=lambda one: one.up_to)
