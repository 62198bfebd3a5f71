"""A whole evaluation on a running server: samples, requests, report."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapid_sgl.bench.runner import rapid_report
from rapid_sgl.bench.session import drafting_config
from rapid_sgl.config import RapidConfig
from rapid_sgl.eval import EVAL_VERSION, EvalError
from rapid_sgl.eval.infinitebench import InfiniteBench
from rapid_sgl.eval.longbench import LongBench, LongBenchV2
from rapid_sgl.eval.methods import Method
from rapid_sgl.eval.prompts import Prompts
from rapid_sgl.eval.report import make_report
from rapid_sgl.eval.ruler import Ruler
from rapid_sgl.eval.runner import Asking, Runner
from rapid_sgl.eval.samples import Sample, Suite, SuiteOptions
from rapid_sgl.eval.store import RunFolder
from rapid_sgl.http_client import ServerInfo
from rapid_sgl.retrieval.pipeline import RetrievalOptions, Retriever

# Options that methods set themselves.
OF_METHODS = ("rapid_drafter", "rapid_transfer", "rapid_lambda", "rapid_eta")
SUITE_TYPES: dict[str, Callable[[], Suite]] = {
    "ruler": Ruler,
    "infinitebench": InfiniteBench,
    "longbench": LongBench,
    "longbench2": LongBenchV2,
}


@dataclass(frozen=True)
class Plan:
    """What the user asked for."""

    suite: str
    tasks: tuple[str, ...]  # empty: the suite's default ones
    lengths: tuple[int, ...]
    samples: int  # per task and length
    methods: tuple[Method, ...]
    output: Path
    data: Path | None
    haystack: Path | None
    seed: int
    chat: bool | None
    temperature: float | None  # None: the suite's own
    max_prompt: int | None
    scorer: str
    concurrency: int
    rapid: dict[str, Any]  # RapidConfig fields that were given


def choose_tasks(suite: Suite, tasks: Sequence[str]) -> tuple[str, ...]:
    """The tasks of that name; raises EvalError listing the known ones."""
    for task in tasks:
        if task not in suite.tasks:
            raise EvalError(f"{task!r} is not a task of this suite; known: {', '.join(suite.tasks)}")
    if len(set(tasks)) < len(tasks):
        raise EvalError("--tasks names one twice")
    return tuple(tasks) or suite.default_tasks


def evaluate(
    plan: Plan,
    url: str,
    info: ServerInfo,
    tokenizer: Any,
    update: Callable[[str], None],
    started: Callable[[int, int], None],
    advance: Callable[[], None],
) -> dict[str, Any]:
    """Run what is missing in the output folder and report all of it.

    Args:
        url, info: the server, and what it said of itself.
        tokenizer: the served model's.
        update: told what is done now.
        started: told once how many answers are wanted, and how many of them are there already.
        advance: called after each answer.

    Raises:
        BenchError: a drafting method, but the server does not run RAPID or reserves too few drafts.
        EvalError: data, lengths or the folder do not fit what is asked for.
        ServerError: a request failed; a second run goes on where this one stopped.
    """
    suite = SUITE_TYPES[plan.suite]()
    tasks = choose_tasks(suite, plan.tasks)
    # Without drafts no option of RAPID matters, and any SGLang server will do.
    drafting = any(method.drafter for method in plan.methods)
    rapid = drafting or rapid_report(info) is not None
    config = drafting_config(info, plan.rapid) if rapid else RapidConfig(**plan.rapid)
    temperature = suite.temperature if plan.temperature is None else plan.temperature
    prompts = Prompts(tokenizer, plan.chat)
    asking = Asking(
        prompts, Retriever(RetrievalOptions(plan.scorer)), config, temperature, plan.seed, plan.max_prompt
    )
    settings = _settings(plan, info, prompts, config, temperature)
    with RunFolder(plan.output, settings) as folder:
        runner = Runner(url, info, suite, asking, folder, plan.concurrency, advance)
        options = SuiteOptions(prompts, plan.lengths, plan.samples, plan.seed, plan.data, plan.haystack)
        cells = []
        for task in tasks:
            update(f"making samples of {task}")
            made = suite.samples(task, options)
            runner.check_fits(made, plan.lengths)
            cells += _cells(made)
        wanted = [
            (sample.id, method.name) for *_, made in cells for sample in made for method in plan.methods
        ]
        started(len(wanted), sum(key in folder.predictions for key in wanted))
        for task, length, made in cells:
            update(f"{task}, {length}")
            runner.run(made, plan.methods)
        report = make_report(cells, plan.methods, folder.predictions, greedy=temperature == 0)
        report = {"suite": plan.suite, "settings": settings, **report}
        folder.write_report(report)
    return report


def _cells(samples: Sequence[Sample]) -> list[tuple[str, str, list[Sample]]]:
    """Samples by task and length, lengths in the order in which they come."""
    found: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.task, sample.group), []).append(sample)
    return [(task, length, made) for (task, length), made in found.items()]


def _settings(
    plan: Plan, info: ServerInfo, prompts: Prompts, config: RapidConfig, temperature: float
) -> dict[str, Any]:
    """What all predictions of a folder share. Tasks, lengths, samples and methods may be added to later."""
    report = rapid_report(info)
    return {
        "eval_version": EVAL_VERSION,
        "suite": plan.suite,
        "model": info.model_path,
        "dtype": info.raw.get("dtype"),
        "algorithm": info.speculative_algorithm if report is not None else None,
        "template": "chat" if prompts.chat else "plain",
        "temperature": temperature,
        "seed": plan.seed,
        "max_prompt": plan.max_prompt,
        "haystack": _digest(plan.haystack),
        "scorer": plan.scorer,
        "concurrency": plan.concurrency,
        "rapid": {name: value for name, value in config.to_wire().items() if name not in OF_METHODS},
    }


def _digest(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise EvalError(f"cannot read {path}: {error}") from error
