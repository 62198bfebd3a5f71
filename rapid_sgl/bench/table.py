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
    ("p50", "inter_token_p50_ms", "{:.1f}"),
    ("p99", "inter_token_p99_ms", "{:.1f}"),
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    ("end to end s", "end_to_end_ms", "{:.2f}"),
    ("KV MB", "kv_mb", "{:.0f}"),
)
# Columns that are shown only where their values differ, since most measurements do not vary them.
VARYING = (
    ("workload", "workload", "{}"),
    ("T", "temperature", "{:g}"),
    ("spans", "retrieval", "{}"),
    ("options", "varied", "{}"),
)
SECONDS = ("end_to_end_ms",)
# Without a terminal rich assumes 80 columns and would cut every number short.
PIPED_WIDTH = 240


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of ``rapid-sgl bench``, one section per cell."""
    columns = _columns(rows)
    table = Table()
    for heading, _, _ in columns:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for index, row in enumerate(rows):
        following = rows[index + 1] if index + 1 < len(rows) else None
        ends = following is not None and _cell(following) != _cell(row)
        table.add_row(*(_shown(_value(row, key), form) for _, key, form in columns), end_section=ends)
    _print(table)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The usual columns, behind the method those that tell rows of one method apart; none that is empty."""
    varying = [column for column in VARYING if len({str(row.get(column[1])) for row in rows}) > 1]
    usual = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    return [*usual[:1], *varying, *usual[1:]]


def _cell(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("workload", "temperature", "context", "batch"))


def _value(row: Mapping[str, Any], key: str) -> Any:
    value = row.get(key)
    if key == "varied":
        return " ".join(f"{name}={one}" for name, one in (value or {}).items()) or None
    return value / 1e3 if key in SECONDS and value is not None else value


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same table in Markdown."""
    columns = _columns(rows)
    lines = [[heading for heading, _, _ in columns], ["---"] * len(columns)]
    lines += [[_shown(_value(row, key), form) for _, key, form in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
