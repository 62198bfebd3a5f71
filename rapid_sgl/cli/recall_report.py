"""The report of ``rapid-sgl recall``: a table, and a chart where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

# Without a terminal rich assumes 80 columns and would cut every number short.
PIPED_WIDTH = 170


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line for each context and scorer, one section per context."""
    kinds = _kinds(rows)
    table = Table()
    table.add_column("context", justify="right")
    table.add_column("scorer")
    for heading in ("tokens", *kinds, "questions", "embed s", "first ms", "next ms", "max ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        following = rows[index + 1] if index + 1 < len(rows) else None
        table.add_row(
            _shown(row["context"], "{:,}"),
            row["scorer"],
            f"{row['tokens']:,}",
            *(_shown(row["recall"].get(kind), "{:.2f}") for kind in kinds),
            str(sum(row["questions"].values())),
            _shown(row["embed_s"], "{:.1f}"),
            _shown(row["first_ms"], "{:.1f}"),
            _shown(row["next_ms"], "{:.1f}"),
            _shown(row["next_ms_max"], "{:.1f}"),
            end_section=following is not None and following["context"] != row["context"],
        )
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(table)


def save_plot(report: Mapping[str, Any], path: str) -> None:
    """Recall by kind of question on the left, time of a question on the right.

    Raises:
        OSError: ``path`` cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["rows"]
    kinds = _kinds(rows)
    names = [f"{row['scorer']}\n{_shown(row['context'], '{:,}')}" for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(5 + 1.2 * len(rows), 4), layout="constrained")
    width = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        places = [index + (number - (len(kinds) - 1) / 2) * width for index in range(len(rows))]
        left.bar(places, [row["recall"].get(kind, 0) for row in rows], width, label=kind)
    left.set(ylim=(0, 1.05), ylabel=f"recall within {report['budget']:,} tokens")
    left.legend(loc="lower right")
    for key, label, side in (("first_ms", "first question", -0.2), ("next_ms", "next questions", 0.2)):
        right.bar(
            [index + side for index in range(len(rows))], [row[key] or 0 for row in rows], 0.4, label=label
        )
    right.set(yscale="log", ylabel="ms to select (document embedded)")
    right.legend()
    for axes in (left, right):
        axes.set_xticks(range(len(rows)), names, fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # a suffix that matplotlib cannot write
        raise OSError(str(error)) from error
    finally:
        pyplot.close(figure)


def _kinds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(kind for row in rows for kind in row["recall"]))


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
