"""RULER: needles, variable tracking, word counting, question answering, at any length.

Tasks, prompts, lengths and scores follow NVIDIA/RULER (Apache-2.0), scripts/data/synthetic/*.py and
scripts/eval/synthetic/constants.py; what differs is listed in docs/eval.md.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rapid_sgl.eval import EvalError
from rapid_sgl.eval.ruler_prompts import NEW_TOKENS
from rapid_sgl.eval.ruler_qa import read_hotpotqa, read_squad
from rapid_sgl.eval.ruler_tasks import (
    HOPS,
    MANY_WORDS,
    NIAH,
    common_words_task,
    essay_words,
    frequent_words_task,
    niah,
    questions,
    variable_tracking,
)
from rapid_sgl.eval.ruler_words import common_words
from rapid_sgl.eval.samples import Sample, SuiteOptions, fill, largest_size, need_data, sample_rng

QA = {"qa_1": ("squad.json", read_squad), "qa_2": ("hotpotqa.json", read_hotpotqa)}


class Ruler:
    """The suite ``ruler``."""

    default_tasks = (*NIAH, "vt", "cwe", "fwe")
    tasks = (*default_tasks, *QA)
    temperature = 0.0

    def samples(self, task: str, options: SuiteOptions) -> list[Sample]:
        make = self._maker(task, options)
        return [
            sample
            for length in options.lengths
            for sample in _samples_of(make(length), options, task, length)
        ]

    def score(self, sample: Sample, answer: str) -> float:
        """Part of the references found in the answer; for questions, whether any of them is."""
        text = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
        found = [reference.lower() in text for reference in sample.answers]
        return float(any(found)) if sample.task in QA else sum(found) / len(found)

    def _maker(self, task: str, options: SuiteOptions) -> Callable[[int], _Task]:
        if task in NIAH:
            haystack = essay_words(options.haystack) if NIAH[task][0] == "essay" else []
            return lambda length: _Task(lambda rng, index, size: niah(rng, task, size, haystack), 1)
        if task == "vt":
            return lambda length: _Task(
                lambda rng, index, size: variable_tracking(rng, size, options), HOPS + 1
            )
        if task == "cwe":
            return lambda length: _Task(
                lambda rng, index, size: common_words_task(rng, size, length),
                11,
                units=len(common_words(MANY_WORDS)),
            )
        if task == "fwe":
            return lambda length: _Task(lambda rng, index, size: frequent_words_task(rng, size, length), 30)
        name, read = QA[task]
        data = read(need_data(options, task, [name], "RULER's download_qa_dataset.sh"))
        return lambda length: _Task(
            lambda rng, index, size: questions(rng, size, data, index), data.gold, len(data)
        )


@dataclass(frozen=True)
class _Task:
    """How one task at one length is made."""

    make: Callable[[random.Random, int, int], dict[str, Any]]  # from random numbers, index and units
    least: int  # units that it needs
    most: int | None = None  # samples that there are
    units: int | None = None  # the most units that can be had


def _samples_of(made: _Task, options: SuiteOptions, task: str, length: int) -> list[Sample]:
    if made.most is not None and options.count > made.most:
        raise EvalError(f"{task} has {made.most} questions; use --samples {made.most} or fewer")

    def sample(rng: random.Random, index: int, size: int) -> Sample:
        kind = "niah" if task in NIAH else "qa" if task in QA else task
        return Sample(
            id=f"{task}/{length}/{index}",
            task=task,
            group=str(length),
            max_new_tokens=NEW_TOKENS[kind],
            **made.make(rng, index, size),
        )

    def tokens(size: int) -> int:
        return options.prompts.length(sample(sample_rng(options, task, length, 0), 0, size))

    size = largest_size(tokens, length, made.least, f"{task} at length {length}", made.units)
    return [
        fill(lambda rng, units, at=index: sample(rng, at, units), options, task, length, index, size)  # type: ignore[misc]
        for index in range(options.count)
    ]
