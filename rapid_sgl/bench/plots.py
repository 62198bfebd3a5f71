"""Charts of a report of ``rapid-sgl bench``; need matplotlib, the optional extra ``plot``."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.table import markdown

Row = Mapping[str, Any]
FORMATS = ("png", "svg")
COLUMNS = 4  # heat maps side by side


def check_matplotlib() -> None:
    """Raises BenchError where charts cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plots needs matplotlib; run `pip install 'rapid-sgl[plot]'` or leave it out")


def save_plots(report: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Write ``speedup``, ``accept_by_position`` and ``cost`` as PNG and SVG, ``table.md`` and ``report.json``.

    Charts without data are left out.

    Args:
        report: as ``rapid-sgl bench`` prints it.
        folder: made where it does not exist.

    Returns:
        The files that were written.

    Raises:
        BenchError: no matplotlib, or the folder cannot be written.
    """
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rapid-sgl"  # the same chart is the same file
    from matplotlib import pyplot

    written = []
    charts = {"speedup": _speedup, "accept_by_position": _accept_by_position, "cost": _cost}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("table.md", markdown(report["rows"])),
            ("report.json", json.dumps(report, indent=1)),
        ):
            path = Path(folder) / name
            path.write_text(text)
            written.append(path)
        for name, draw in charts.items():
            figure = draw(report["rows"])
            if figure is None:
                continue
            for form in FORMATS:
                path = Path(folder) / f"{name}.{form}"
                figure.savefig(path, dpi=130, metadata={"Date": None} if form == "svg" else None)
                written.append(path)
            pyplot.close(figure)
    except OSError as error:
        raise BenchError(
            f"cannot write charts to {folder}: {error.strerror}; use a folder that you own"
        ) from error
    return written


def label(row: Row) -> str:
    """What is compared: the method and all that sets this form of it apart."""
    parts = [row["method"]]
    parts += [row["drafter_weights"]] if row["drafter_weights"] != "same" else []
    parts += [row["retrieval"]] if row.get("retrieval") not in (None, "bm25") else []
    parts += [f"{name}={value}" for name, value in (row.get("varied") or {}).items()]
    parts += [row["workload"]] if row.get("workload", "answer") != "answer" else []
    parts += [f"T={row['temperature']:g}"] if row.get("temperature") else []
    return " ".join(map(str, parts))


def grid(rows: Sequence[Row]) -> tuple[list[int], list[int], dict[str, list[list[float | None]]]]:
    """(contexts, batches, speedups by method [context][batch]), the target left out."""
    contexts, batches = (sorted({row[key] for row in rows}) for key in ("context", "batch"))
    table: dict[str, list[list[float | None]]] = {}
    for row in rows:
        if row["method"] != "target" and row["speedup_vs_target"] is not None:
            cells = table.setdefault(label(row), [[None] * len(batches) for _ in contexts])
            cells[contexts.index(row["context"])][batches.index(row["batch"])] = row["speedup_vs_target"]
    return contexts, batches, table


def _speedup(rows: Sequence[Row]) -> Any:
    """One heat map per method; 1 is the target's speed, red is slower."""
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    contexts, batches, table = grid(rows)
    if not table:
        return None
    known = [value for cells in table.values() for line in cells for value in line if value is not None]
    norm = TwoSlopeNorm(1.0, min(0.5, *known), max(2.0, *known))
    wide = min(COLUMNS, len(table))
    high = -(-len(table) // wide)
    figure, axes = pyplot.subplots(
        high,
        wide,
        figsize=(1.6 + 2.3 * wide, 1 + high * (0.9 + 0.5 * len(contexts))),
        squeeze=False,
        layout="constrained",
        sharex=True,
        sharey=True,
    )
    for panel in axes.flat[len(table) :]:
        panel.set_axis_off()
    for panel, (name, cells) in zip(axes.flat, table.items(), strict=False):
        numbers = [[float("nan") if value is None else value for value in line] for line in cells]
        image = panel.imshow(numbers, norm=norm, cmap="RdYlGn", aspect="auto", origin="lower")
        panel.set_title(name, fontsize=9)
        panel.set_xticks(range(len(batches)), batches)
        panel.set_yticks(range(len(contexts)), [f"{context:,}" for context in contexts])
        for y, line in enumerate(cells):
            for x, value in enumerate(line):
                if value is not None:
                    panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9)
    figure.supxlabel("batch", fontsize=9)
    figure.supylabel("context tokens", fontsize=9)
    figure.colorbar(image, ax=axes, label="speedup over target")
    return figure


def _accept_by_position(rows: Sequence[Row]) -> Any:
    """Of the drafts that were reached, the share that was kept; per method over the longest context."""
    from matplotlib import pyplot

    shown = [row for row in rows if row.get("accept_by_position")]
    if not shown:
        return None
    longest = max(row["context"] for row in shown)
    shown = [row for row in shown if row["context"] == longest]
    figure, panel = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    several = len({row["batch"] for row in shown}) > 1
    for row in shown:
        shares = row["accept_by_position"]
        name = label(row) + (f", batch {row['batch']}" if several else "")
        panel.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, label=name)
    panel.set(
        xlabel="position in the chain",
        ylabel="kept, of those reached",
        ylim=(0, 1.03),
        title=f"{longest:,} tokens",
    )
    panel.set_xticks(range(1, 1 + max(len(row["accept_by_position"]) for row in shown)))
    panel.legend(fontsize=7)
    return figure


def _cost(rows: Sequence[Row]) -> Any:
    """Milliseconds of a step, divided by the tokens that it commits, so that bars compare by height."""
    from matplotlib import pyplot

    shown = [row for row in rows if row.get("step_ms") is not None]
    if not shown:
        return None
    figure, panel = pyplot.subplots(figsize=(2 + 0.45 * len(shown), 4.2), layout="constrained")
    bottom = [0.0] * len(shown)
    for part in ("verify", "draft", "outside"):
        heights = [cost_per_token(row)[part] for row in shown]
        panel.bar(range(len(shown)), heights, 0.7, bottom, label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    names = [f"{label(row)}\n{row['context']:,} x {row['batch']}" for row in shown]
    panel.set_xticks(range(len(shown)), names, rotation=90, fontsize=7)
    panel.set_ylabel("ms of a step per committed token")
    panel.legend()
    return figure


def cost_per_token(row: Row) -> dict[str, float]:
    """Milliseconds of verify passes, draft passes and the rest, per token that a request commits."""
    parts = {"verify": row["verify_ms"], "draft": row["draft_ms"]}
    parts["outside"] = max(0.0, row["step_ms"] - sum(parts.values()))
    return {name: value / row["accept_length"] for name, value in parts.items()}
