"""The table of `tests/measure/grid.py`, from reports made up here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

GRID = Path(__file__).parents[1] / "measure" / "grid.py"


def row(method, length, ms):
    cell = {"context": 256, "batch": 4, "temperature": 0.0, "speedup_range": [0.9, 1.1]}
    return {**cell, "method": method, "draft_length": length, "ms_per_token": ms}


def grid(path):
    return subprocess.run([sys.executable, GRID, path], capture_output=True, text=True)


def test_auto_is_compared_with_the_target_and_the_best_length(tmp_path):
    rows = [
        row("target", "auto", 20.0),
        row("view", "auto", 25.0),
        row("view", 1, 40.0),
        row("view", 4, 30.0),
    ]
    report = tmp_path / "report"
    report.write_text("a table\n" + json.dumps({"environment": {}, "rows": rows}) + "\n")
    lines = grid(report).stdout.splitlines()
    assert lines[2] == "| 256 | 4 | 0 | 20.0 | 25.0 | 0.80 | 0.90-1.10 | 4: 30.0 | 1.20 |"
    assert lines[-1] == "worst: 0.800 of the target, 1.200 of the best prescribed length"


@pytest.mark.parametrize("text", ["", "a table\n"])
def test_a_file_without_a_report_is_named(tmp_path, text):
    report = tmp_path / "report"
    report.write_text(text)
    result = grid(report)
    assert result.returncode == 1 and f"{report}: no line with a report" in result.stderr
