"""Is a length chosen by the server ever slower than no drafts, or than a prescribed length? Reads reports of the bench.

    .venv/bin/rapid-sgl bench --contexts 7000 --batch 1,4,8,16 --temperature 0,1 --methods target,view --keep-cache \\
        --vary draft-length=auto,2,4 --new-tokens 48 --json | tail -1 > 7000.json
    .venv/bin/python tests/measure/grid.py 7000.json

Prints a Markdown table, one line per cell: speed of ``auto`` as a multiple of the target's and of the best prescribed
length's (medians over the repeats, which take turns), and the range of the former over the repeats. The last line names
the worst of each. Lines of the file that are not JSON are skipped, so the whole output of the bench will do.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def rows_of(path: Path) -> list[Row]:
    """Rows of the last report in a file."""
    reports = [line for line in path.read_text().splitlines() if line.startswith('{"environment"')]
    if not reports:
        raise SystemExit(f"{path}: no line with a report of rapid-sgl bench")
    rows: list[Row] = json.loads(reports[-1])["rows"]
    return rows


def cells(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows by cell and form: target, auto, or the prescribed length."""
    found: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        form = "target" if row["method"] == "target" else str(row["draft_length"])
        found[row["context"], row["batch"], row["temperature"]][form] = row
    return found


def main(paths: list[str]) -> None:
    print("| context | batch | T | target ms | auto ms | auto/target | range | best prescribed | auto/best |")
    print("|---|---|---|---|---|---|---|---|---|")
    worst = [9.9, 9.9]
    for (context, batch, temperature), forms in sorted(
        cells([row for path in paths for row in rows_of(Path(path))]).items()
    ):
        ms = {name: row["ms_per_token"] for name, row in forms.items()}
        best = min((name for name in ms if name not in ("target", "auto")), key=lambda name: ms[name])
        over_target, over_best = ms["target"] / ms["auto"], ms[best] / ms["auto"]
        low, high = forms["auto"]["speedup_range"]
        print(
            f"| {context} | {batch} | {temperature:g} | {ms['target']:.1f} | {ms['auto']:.1f} | {over_target:.2f} "
            f"| {low:.2f}-{high:.2f} | {best}: {ms[best]:.1f} | {over_best:.2f} |"
        )
        worst = [min(worst[0], over_target), min(worst[1], over_best)]
    print(f"worst: {worst[0]:.3f} of the target, {worst[1]:.3f} of the best prescribed length")


if __name__ == "__main__":
    main(sys.argv[1:])
