"""Reports as tables for people; programs read the JSON line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

# Columns of a bench table: heading, row key, format.
COLUMNS = (
    ("method", "method", "{}"),
    ("weights", "drafter_weights", "{}"),
    ("context", "context", "{:,}"),
    ("batch", "batch", "{}"),
    ("ms/token", "ms_per_token", "{:.1f}"),
    ("min-max", "ms_per_token_range", "{0[0]:.1f}-{0[1]:.1f}"),
    ("accept", "accept_length", "{:.2f}"),
    ("rate", "accept_rate", "{:.2f}"),
    ("draft ms", "draft_ms", "{:.1f}"),
    ("verify ms", "verify_ms", "{:.1f}"),
    ("step ms", "step_ms", "{:.1f}"),
    ("outside", "outside_share", "{:.1%}"),
    ("decode ms", "decode_ms", "{:.1f}"),
    ("predicted", "predicted_speedup", "{:.2f}x"),
    ("speedup", "speedup_vs_target", "{:.2f}x"),
    ("ttft ms", "ttft_ms", "{:.0f}"),
)
# Without a terminal rich assumes 80 columns and would cut every number short.
PIPED_WIDTH = 170


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of ``rapid-sgl bench``, one section per context and batch."""
    table = Table()
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for index, row in enumerate(rows):
        cell = (row["context"], row["batch"])
        following = rows[index + 1] if index + 1 < len(rows) else None
        ends = following is not None and (following["context"], following["batch"]) != cell
        table.add_row(*(_shown(row[key], form) for _, key, form in COLUMNS), end_section=ends)
    _print(table)


def print_steps(report: Mapping[str, Any]) -> None:
    """Print the passes of ``rapid-sgl bench steps``: one line per pass and size, with its spread."""
    table = Table()
    for heading, side in (("pass", "left"), ("size", "right"), ("median ms", "right"), ("min-max", "right")):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    for name, by_size in report["range_ms"].items():
        for size, (low, high) in by_size.items():
            table.add_row(
                name, f"{int(size):,}", f"{report[f'{name}_ms'][size]:.1f}", f"{low:.1f}-{high:.1f}"
            )
    _print(table)
    for name, value in report["ratios"].items():
        Console().print(f"{name} = {value:.2f}", markup=False, highlight=False)


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(table)
