"""Progress and table of ``rapid-sgl eval``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# Columns: heading, row key, format.
COLUMNS = (
    ("task", "task", "{}"),
    ("length", "length", "{}"),
    ("method", "method", "{}"),
    ("n", "samples", "{}"),
    ("score", "score", "{:.1f}"),
    ("95 %", "interval", "{0[0]:.1f}-{0[1]:.1f}"),
    ("to target", "difference", "{:+.1f}"),
    ("95 %", "difference_interval", "{0[0]:+.1f} {0[1]:+.1f}"),
    ("changed", "changed", "{}"),
    ("ms/token", "ms_per_token", "{:.1f}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("accept", "accept_length", "{:.2f}"),
)
PIPED_WIDTH = 150  # without a terminal rich assumes 80 columns and would cut numbers short


class Bar:
    """A progress bar over all answers on stderr; a context manager.

    Without a terminal each new text is printed as one line instead.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
            *(TimeElapsedColumn(), TimeRemainingColumn()),
        )
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def update(self, text: str) -> None:
        """Say what is done now."""
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(f"{text} ...", markup=False, soft_wrap=True)

    def started(self, total: int, done: int) -> None:
        """How many answers are wanted, and how many are there from an earlier run."""
        self._progress.update(self._task, total=total, completed=done)
        if done:
            self._console.print(f"{done} of {total} answers are there from an earlier run", markup=False)

    def advance(self) -> None:
        self._progress.advance(self._task)


def print_report(report: Mapping[str, Any]) -> None:
    """The table, one section per task and length, averages, and what became of the lossless methods."""
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    table = Table()
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("task", "method") else "right", no_wrap=True)
    rows = report["rows"]
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        ends = following is not None and [row["task"], row["length"]] != [
            following["task"],
            following["length"],
        ]
        table.add_row(*(_shown(row[key], form) for _, key, form in COLUMNS), end_section=ends)
    console.print(table)
    for average in report["averages"]:
        console.print(
            f"{average['method']}: {average['score']:.1f} on average over {average['cells']} cells",
            markup=False,
            highlight=False,
        )
    if report["lossless"]:
        console.print(lossless_text(report["lossless"]), markup=False, highlight=False)


def lossless_text(found: Mapping[str, Any]) -> str:
    """One line: how many answers of lossless methods differ from long context's."""
    if not found["comparable"]:
        return "lossless methods: answers are sampled, so they cannot be compared one by one (use --temperature 0)"
    return (
        f"lossless methods against target, greedy: {found['texts_differ']} of {found['answers']} answers differ, "
        f"{found['scores_differ']} scores differ"
    )


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
