"""What a suite is made of: samples, and how their answers are scored."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rapid_sgl.eval import EvalError

if TYPE_CHECKING:
    from rapid_sgl.eval.prompts import Prompts

# Fractions of the golden ratio cover [0, 1) evenly however many samples are asked for.
GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Sample:
    """One question. The user's message is ``before + context + after``; only ``context`` is retrieved from."""

    id: str  # unique in its suite and the same in every run with the same seed
    task: str
    group: str  # what the table calls length: tokens, or a suite's own bin
    before: str
    context: str
    after: str
    question: str  # what retrieval looks for
    answers: Any  # as the suite's scorer wants them
    max_new_tokens: int
    answer_prefix: str = ""  # the model's answer is made to begin like this
    system: str | None = None  # system message, where the official harness sends one
    chat: bool = True  # False: the official harness leaves the chat template out for this task
    stop_at_newline: bool = False
    numbered_excerpts: bool = False  # retrieved chunks are headed "Retrieved chunk 1: " and so on
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteOptions:
    """What the user chose."""

    prompts: Prompts
    lengths: tuple[int, ...] = ()  # tokens, prompt and answer; for generated tasks
    count: int = 50  # samples per task and length
    seed: int = 42
    data: Path | None = None  # file or folder with the official data
    haystack: Path | None = None  # RULER's essay text


class Suite(Protocol):
    """One benchmark."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks."""

    @property
    def default_tasks(self) -> tuple[str, ...]:
        """Those that need no data; all where each does."""

    @property
    def temperature(self) -> float:
        """Of the official runs."""

    def samples(self, task: str, options: SuiteOptions) -> list[Sample]:
        """The samples of one task, by length and index.

        Raises:
            EvalError: data is missing or malformed, or a length is too short for the task.
        """

    def score(self, sample: Sample, answer: str) -> float:
        """0 to 1."""


def sample_rng(options: SuiteOptions, task: str, length: int, index: int) -> random.Random:
    """Random numbers of one sample, whichever other samples are made."""
    return random.Random(f"{options.seed} {task} {length} {index}")


def fill(
    make: Callable[[random.Random, int], Sample],
    options: SuiteOptions,
    task: str,
    length: int,
    index: int,
    size: int,
) -> Sample:
    """The sample of ``size`` units or, where it exceeds ``length`` tokens, of a few less.

    Args:
        make: from random numbers and a number of units (sentences, words, pairs) to a sample.
    """
    while size > 0:
        sample = make(sample_rng(options, task, length, index), size)
        if options.prompts.length(sample) <= length:
            return sample
        size -= max(1, size // 50)
    raise EvalError(f"{task} does not fit into {length} tokens; use a larger length")


def largest_size(
    tokens: Callable[[int], int], limit: int, least: int, what: str, most: int | None = None
) -> int:
    """The most units whose sample has at most ``limit`` tokens.

    Args:
        tokens: prompt and answer tokens of a sample of so many units; grows with them.
        least: units that the task needs.
        what: the task, for the error.
        most: units that there are; None: any number.

    Raises:
        EvalError: not even ``least`` fit, or more than ``most`` would.
    """
    if (needed := tokens(least)) > limit:
        raise EvalError(f"{what} does not fit into {limit} tokens: it needs {needed} at least")
    low, high = least, 2 * least
    while tokens(high if most is None else min(high, most)) <= limit:
        if most is not None and high >= most:
            raise EvalError(
                f"{what} needs more than the {most} different units that there are; use a shorter length"
            )
        low, high = high, 2 * high
    high = high if most is None else min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if tokens(middle) <= limit:
            low = middle
        else:
            high = middle
    return low


def read_jsonl(path: Path, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file (or of a JSON file with one list), each with all ``fields``.

    Raises:
        EvalError: unreadable, or naming the line that is not such an object.
    """
    for where, item in _items(path):
        if not isinstance(item, dict):
            raise EvalError(f"{path}, {where}: not a JSON object")
        missing = [name for name in fields if name not in item]
        if missing:
            raise EvalError(
                f"{path}, {where}: no field {missing[0]!r}; the official files have {', '.join(fields)}"
            )
        yield item


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"cannot read {path}: {error}") from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except ValueError as error:
            raise EvalError(f"{path} is not JSON: {error}") from error
        yield from ((f"item {number}", item) for number, item in enumerate(items, 1))
        return
    # not splitlines(): JSON strings may hold U+2028 and other line separators as they are
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except ValueError as error:
            raise EvalError(f"{path}, line {number}: not JSON ({error})") from error


def data_file(options: SuiteOptions, names: Sequence[str]) -> Path | None:
    """The first of ``names`` in the folder ``--data``, or the file that it names itself."""
    if options.data is None:
        return None
    if options.data.is_file():
        return options.data
    return next((options.data / name for name in names if (options.data / name).is_file()), None)


def need_data(options: SuiteOptions, task: str, names: Sequence[str], source: str) -> Path:
    """As ``data_file``; raises EvalError naming what to fetch where there is none."""
    path = data_file(options, names)
    if path is None:
        place = f"not in {options.data}" if options.data else "name its folder with --data"
        raise EvalError(f"task {task} needs {names[0]} from {source}; {place}")
    return path
