"""The whole measurement on running servers: every cell, warm-up, interleaved repeats, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

from rapid_sgl.bench import RETRIEVING, BenchError
from rapid_sgl.bench.environment import environment, server_facts
from rapid_sgl.bench.limits import Sizes, check_fits, kv_mb, kv_token_bytes
from rapid_sgl.bench.prompts import BenchPrompt, SpanChooser, bench_prompts
from rapid_sgl.bench.records import Run
from rapid_sgl.bench.rows import make_row
from rapid_sgl.bench.runner import Asked, Side, rapid_report
from rapid_sgl.config import AUTO, RapidConfig
from rapid_sgl.http_client import ServerInfo
from rapid_sgl.retrieval.prompt import PromptBuilder

# A first run whose prompts came from the prefix cache to a larger part than this says nothing about prefill.
COLD_SHARE = 0.1


@dataclass(frozen=True)
class Cell:
    """One combination of the axes that all methods are compared in."""

    workload: str
    temperature: float
    context: int
    batch: int

    def __str__(self) -> str:
        extra = [self.workload] if self.workload != "answer" else []
        extra += [f"T={self.temperature:g}"] if self.temperature else []
        return ", ".join([*extra, f"{self.context:,} tokens", f"batch {self.batch}"])


@dataclass(frozen=True)
class Axes:
    """The values of every axis.

    Args:
        repeats: how often each method runs in a cell.
        keep_cache: the cells share the prefix cache, so that only new prompts are prefilled.
    """

    contexts: Sequence[int]
    batches: Sequence[int]
    repeats: int
    workloads: Sequence[str] = ("answer",)
    temperatures: Sequence[float] = (0.0,)
    keep_cache: bool = False

    def cells(self) -> Iterator[Cell]:
        for workload in self.workloads:
            for temperature in self.temperatures:
                for context in self.contexts:
                    for batch in self.batches:
                        yield Cell(workload, temperature, context, batch)


@dataclass
class Measurement:
    """The sides, their prompts and what is known about them.

    Args:
        sides: the methods to compare; the first one's server describes the environment.
        builder: of the served model's tokenizer.
        update: told what runs now.
    """

    sides: Sequence[Side]
    builder: PromptBuilder
    axes: Axes
    update: Callable[[str], None]
    chooser: SpanChooser = field(default_factory=SpanChooser)

    def report(self, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """``{"environment": …, "rows": […]}``.

        Args:
            facts: more entries of the environment.

        Raises:
            BenchError, ServerError: before the first run when a cell cannot be served, else from a run.
        """
        first = self.sides[0]
        for cell in self.axes.cells():
            for side in self.sides:
                check_fits(side, cell.context, cell.batch, side.sizes)
        rows = [row for cell in self.axes.cells() for row in self._rows(cell)]
        known = {
            **environment(first.info.model_path),
            "server": server_facts(first.info),
            "options": vars(first.sizes.config),
            "new_tokens": first.sizes.new_tokens,
            "temperature": self.axes.temperatures[0],
            "workloads": list(self.axes.workloads),
            **(facts or {}),
        }
        return {"environment": known, "rows": rows}

    def _rows(self, cell: Cell) -> list[dict[str, Any]]:
        # As many as any batch or repeat needs, so that cells of one context share prompts.
        count = max(*self.axes.batches, self.axes.repeats)
        prompts = bench_prompts(self.builder, cell.context, count, cell.workload)
        groups = [_group(prompts, cell.batch, repeat) for repeat in range(self.axes.repeats)]
        cold = self._warm_up(cell, groups)
        runs = self._interleaved(cell, groups)
        target = next((done for side, done in runs if side.method == "target"), [])
        return [self._row(cell, prompts, side, done, target, cold) for side, done in runs]

    def _row(
        self,
        cell: Cell,
        prompts: Sequence[BenchPrompt],
        side: Side,
        runs: Sequence[Run],
        target: Sequence[Run],
        cold: Mapping[tuple[str, bool], float],
    ) -> dict[str, Any]:
        config, choosing = side.sizes.config, None
        if side.retrieval is not None:
            choosing = median(self.chooser.find(one, side.retrieval, config).ms for one in prompts)
        return make_row(
            side.method,
            side.weights,
            cell.context,
            cell.batch,
            runs,
            target,
            workload=cell.workload,
            temperature=cell.temperature,
            retrieval=side.retrieval,
            draft_length=config.draft_length,
            budget=config.budget,
            varied=side.varied,
            new_tokens=side.sizes.new_tokens,
            retrieval_ms=choosing,
            cold_ttft_ms=cold.get(_prefill(side)),
            kv_mb=kv_mb(side.method, cell.context, cell.batch, side.sizes, *self._token_bytes),
        )

    @cached_property
    def _token_bytes(self) -> tuple[int | None, int | None]:
        """Of the target's KV, and of the draft model's where a side has one."""
        dtype = str(self.sides[0].info.raw.get("dtype"))
        drafting = [side.info.raw.get("speculative_draft_model_path") for side in self.sides]
        paths = [self.sides[0].info.model_path, next((path for path in drafting if path), None)]
        target, draft = (kv_token_bytes(path, dtype) if path else None for path in paths)
        return target, draft

    def _warm_up(self, cell: Cell, groups: Sequence[Sequence[BenchPrompt]]) -> dict[tuple[str, bool], float]:
        """Unrecorded runs that fill every cache; returns the times to first token of uncached prompts, by prefill."""
        distinct = list({id(group[0]): group for group in groups}.values())
        for side in {side.url: side for side in self.sides}.values():
            if not self.axes.keep_cache:
                side.forget_prompts()
        cold: dict[tuple[str, bool], float] = {}
        filled: set[tuple[str, bool]] = set()
        for side in self.sides:
            self.update(f"{cell}: {side.name}, warm-up")
            # Those that read the prompts of a method before them, and have no draft prompts, find all in the cache;
            # that of ngram is emptied before each run.
            known = side.method == "ngram" or (
                _prefill(side) in filled and side.method not in ("rag", "rag-only")
            )
            for number, group in enumerate(distinct[:1] if known else distinct):
                run = side.run(self._asked(side, group), cell.temperature)
                if number == 0 and _prefill(side) not in filled and run.cached_share < COLD_SHARE:
                    cold[_prefill(side)] = run.ttft_ms
            filled.add(_prefill(side))
        return cold

    def _interleaved(
        self, cell: Cell, groups: Sequence[Sequence[BenchPrompt]]
    ) -> list[tuple[Side, list[Run]]]:
        """Runs by method, one per group of prompts."""
        runs: list[tuple[Side, list[Run]]] = [(side, []) for side in self.sides]
        for repeat, group in enumerate(groups):
            first = repeat % len(runs)  # so that no method always runs after the same other one
            for side, done in [*runs[first:], *runs[:first]]:
                self.update(f"{cell}: {side.name}, {repeat + 1} of {len(groups)}")
                asked = self._asked(side, group)
                if side.method == "ngram":
                    # It drafts from its earlier answers; the warm-up's are the very ones that are asked for now.
                    side.forget_prompts()
                    side.prefill(asked)
                done.append(side.run(asked, cell.temperature))
        return runs

    def _asked(self, side: Side, group: Sequence[BenchPrompt]) -> list[Asked]:
        config, retrieval = side.sizes.config, side.retrieval
        if retrieval is None:
            return [Asked(prompt.ids) for prompt in group]
        if side.method == "rag-only":
            budget = config.budget
            return [Asked(self.chooser.excerpt(self.builder, one, retrieval, budget)) for one in group]
        return [Asked(one.ids, self.chooser.find(one, retrieval, config).spans) for one in group]


def _prefill(side: Side) -> tuple[str, bool]:
    """Sides of one server that send the same prompts."""
    return side.url, side.method == "rag-only"


def _group(prompts: Sequence[BenchPrompt], batch: int, repeat: int) -> list[BenchPrompt]:
    """The prompts of one repeat: each takes the next ``batch`` ones, so that no single text decides a cell."""
    return [prompts[(repeat * batch + member) % len(prompts)] for member in range(batch)]


def drafting_config(info: ServerInfo, given: dict[str, Any]) -> RapidConfig:
    """The server's defaults with this command line's options on top.

    Raises:
        BenchError: the server does not run RAPID, or reserves fewer draft tokens than asked for.
        RapidOptionError: a value is out of range.
    """
    report = rapid_report(info)
    if report is None:
        algorithm = info.speculative_algorithm or "none"
        raise BenchError(
            f"the server does not run RAPID (its speculative algorithm: {algorithm}), so it has no method view or rag; "
            "start it with `rapid-sgl serve`, or measure --methods target"
        )
    config = replace(RapidConfig(**report["config"]), **given)
    reserved = (info.raw.get("speculative_num_draft_tokens") or 1) - 1
    if config.draft_length != AUTO and int(config.draft_length) > reserved:
        raise BenchError(
            f"--draft-length {config.draft_length} exceeds the server's {reserved}; "
            "lower it or start the server with a larger --rapid-max-draft-length"
        )
    return config


def shared_sides(
    method: str,
    url: str,
    info: ServerInfo,
    sizes: Sizes,
    *,
    weights: Sequence[str],
    retrievals: Sequence[str],
    variants: Sequence[Mapping[str, Any]],
) -> list[Side]:
    """Every form of one method on the shared server.

    Args:
        weights: what drafts run on, for the methods that draft with a model.
        retrievals: how spans are chosen, for the methods that take some.
        variants: options to try, each with all of its values set.
    """
    if method == "target":
        return [Side(method, url, info, sizes)]
    # A form is dropped where the method knows nothing of what tells it from another one.
    without = {"copy", "budget"} if method == "copy" else set()
    if method == "rag-only":
        without = {name for variant in variants for name in variant} - {"budget"}
    forms = [{name: value for name, value in one.items() if name not in without} for one in variants]
    forms = [form for number, form in enumerate(forms) if form not in forms[:number]]
    return [
        Side(
            method,
            url,
            info,
            Sizes(sizes.new_tokens, replace(sizes.config, **form)),
            kind,
            retrieval=retrieval,
            varied=form,
        )
        for form in forms
        for kind in (weights if method in ("view", "recent", "rag") else ["same"])
        for retrieval in (retrievals if method in RETRIEVING else ["bm25"])
    ]
