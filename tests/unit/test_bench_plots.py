"""Charts of `rapid-sgl bench`: what they show, and that they are written."""

import importlib.util
import json

import pytest

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.plots import check_matplotlib, cost_per_token, grid, label, save_plots

ROW = {
    "method": "view", "drafter_weights": "same", "context": 3500, "batch": 1, "speedup_vs_target": 1.5,
    "accept_length": 4.0, "draft_ms": 40.0, "verify_ms": 50.0, "step_ms": 100.0,
    "accept_by_position": [0.9, 0.8], "retrieval": "bm25", "varied": {}, "workload": "answer", "temperature": 0.0,
}  # fmt: skip
TARGET = {**ROW, "method": "target", "speedup_vs_target": 1.0, "draft_ms": 0.0, "accept_by_position": None}
NGRAM = {**ROW, "method": "ngram", "step_ms": None, "retrieval": None, "batch": 8, "speedup_vs_target": 0.7}
ROWS = [TARGET, ROW, NGRAM]


def test_the_heat_map_has_every_cell_of_every_method():
    contexts, batches, table = grid([*ROWS, {**ROW, "context": 7000, "speedup_vs_target": 2.5}])
    assert (contexts, batches) == ([3500, 7000], [1, 8])
    assert table == {"view": [[1.5, None], [2.5, None]], "ngram": [[None, 0.7], [None, None]]}


def test_a_label_says_what_sets_a_row_apart():
    row = {
        **ROW,
        "drafter_weights": "int8",
        "retrieval": "random",
        "varied": {"copy": "off"},
        "temperature": 1.0,
    }
    assert label(row) == "view int8 random copy=off T=1" and label(NGRAM) == "ngram"


def test_costs_add_up_to_the_step_per_token():
    assert cost_per_token(ROW) == {"verify": 12.5, "draft": 10.0, "outside": 2.5}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the optional extra plot")
def test_charts_are_written_and_empty_ones_left_out(tmp_path):
    written = save_plots({"rows": ROWS}, tmp_path / "new")
    names = {"speedup", "accept_by_position", "cost"}
    charts = {f"{name}.{form}" for name in names for form in ("png", "svg")}
    assert {path.name for path in written} == {*charts, "table.md", "report.json"}
    assert all(path.stat().st_size > 5000 for path in written if path.name in charts)
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == {"rows": ROWS}
    table = (tmp_path / "new" / "table.md").read_text().splitlines()
    assert len(table) == 2 + len(ROWS) and "| ngram |" in table[-1] and "0.70x" in table[-1]
    assert (tmp_path / "new" / "cost.png").read_bytes().startswith(b"\x89PNG")
    bare = [{**TARGET, "step_ms": None}]
    assert [path.name for path in save_plots({"rows": bare}, tmp_path / "bare")] == [
        "table.md",
        "report.json",
    ]


def test_a_missing_matplotlib_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"rapid-sgl\[plot\]"):
        check_matplotlib()
