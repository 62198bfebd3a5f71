"""The whole measurement on a running server: every cell, warm-up, interleaved repeats, rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.environment import environment, server_facts
from rapid_sgl.bench.prompts import BenchPrompt, bench_prompts
from rapid_sgl.bench.records import Run, make_row
from rapid_sgl.bench.runner import Side, Sizes, check_fits, rapid_report
from rapid_sgl.config import RapidConfig
from rapid_sgl.http_client import ServerInfo
from rapid_sgl.retrieval.prompt import PromptBuilder


def measure(
    sides: Sequence[Side],
    builder: PromptBuilder,
    contexts: Sequence[int],
    batches: Sequence[int],
    sizes: Sizes,
    *,
    repeats: int,
    update: Callable[[str], None],
) -> dict[str, Any]:
    """The report of ``rapid-sgl bench``: ``{"environment": …, "rows": […]}``.

    Args:
        sides: the methods to compare; the first one's server describes the environment.
        builder: of the served model's tokenizer.
        update: told what runs now.

    Raises:
        BenchError, ServerError: before the first run when a cell cannot be served, else from a run.
    """
    for side in sides:
        for context in contexts:
            for batch in batches:
                check_fits(side, context, batch, sizes)
    rows = []
    for context in contexts:
        prompts = bench_prompts(builder, context, max(*batches, repeats), sizes.config)
        for batch in batches:
            cell = f"{context:,} tokens, batch {batch}"
            groups = [_group(prompts, batch, repeat) for repeat in range(repeats)]
            runs = _interleaved(sides, groups, cell, update)
            target = next((done for side, done in runs if side.method == "target"), [])
            rows += [make_row(side.method, side.weights, context, batch, done, target) for side, done in runs]
    facts = {
        **environment(sides[0].info.model_path),
        "server": server_facts(sides[0].info),
        "options": vars(sizes.config),
        "new_tokens": sizes.new_tokens,
        "temperature": sizes.temperature,
    }
    return {"environment": facts, "rows": rows}


def _interleaved(
    sides: Sequence[Side],
    groups: Sequence[Sequence[BenchPrompt]],
    cell: str,
    update: Callable[[str], None],
) -> list[tuple[Side, list[Run]]]:
    """Runs by method, one per group of prompts. An unrecorded run of each comes first: it fills the prefix cache."""
    distinct = {id(group[0]): group for group in groups}
    for side in sides:
        update(f"{cell}: {side.name}, warm-up")
        for group in distinct.values():
            side.run(group)
    runs: list[tuple[Side, list[Run]]] = [(side, []) for side in sides]
    for repeat, group in enumerate(groups):
        first = repeat % len(sides)  # so that no method always runs after the same other one
        for side, done in [*runs[first:], *runs[:first]]:
            update(f"{cell}: {side.name}, {repeat + 1} of {len(groups)}")
            done.append(side.run(group))
    return runs


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
    if config.draft_length > reserved:
        raise BenchError(
            f"--draft-length {config.draft_length} exceeds the server's {reserved}; "
            "lower it or start the server with a larger --rapid-draft-length"
        )
    return config
