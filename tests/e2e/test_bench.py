"""`rapid-sgl bench` on a real server and `bench steps` in a process of its own, in tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")
ISSUE_KEYS = {
    "method", "context", "batch", "ms_per_token", "accept_length", "accept_rate",
    "draft_ms", "verify_ms", "decode_ms", "speedup_vs_target",
}  # fmt: skip
TINY_VIEW = ["--rapid-budget=128", "--rapid-recent=64", "--rapid-head=16"]


def bench(*arguments):
    done = subprocess.run(
        [RAPID_SGL, "bench", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def smoke(rapid_server):
    return bench(
        f"--server={rapid_server.url}", "--contexts=200,600", "--batch=1,2", "--new-tokens=12",
        "--repeats=2", *TINY_VIEW,
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(smoke):
    return json.loads(smoke.stdout.splitlines()[-1])


def test_rows_have_the_keys_and_cover_every_cell(report):
    assert set(report) == {"environment", "rows"}
    assert all(set(row) >= ISSUE_KEYS for row in report["rows"])
    cells = [(row["context"], row["batch"], row["method"]) for row in report["rows"]]
    assert cells == [(c, b, m) for c in (200, 600) for b in (1, 2) for m in ("target", "view")]
    assert report["environment"]["server"]["speculative_algorithm"] == "RAPID"
    assert report["environment"]["options"]["budget"] == 128


def test_views_drafted_and_the_target_did_not(report):
    for row in report["rows"]:
        assert row["accept_length"] >= 1 and row["ms_per_token"] > 0 and row["decode_ms"] > 0
        assert row["cached_share"] > 0.9  # the warm-up left the prompts in the prefix cache
        if row["method"] == "view":
            assert row["draft_ms"] > 0 and 0 <= row["accept_rate"] <= 1
            assert row["accept_length"] == pytest.approx(1 + 4 * row["accept_rate"], abs=0.01)
            assert row["predicted_speedup"] > 0
        else:
            assert row["accept_length"] == 1 and row["draft_ms"] == 0 and row["accept_rate"] is None
            assert row["speedup_vs_target"] == 1


def test_the_whole_batch_decodes_together(report):
    """Step means of a batch hold only if its requests ran side by side while they were counted."""
    for row in report["rows"]:
        assert row["batch"] - 0.5 < row["mean_batch"] <= row["batch"]


def test_steps_and_their_parts_add_up(report):
    for row in report["rows"]:
        assert row["draft_ms"] + row["verify_ms"] <= row["step_ms"]
        assert 0 <= row["outside_share"] < 1


def test_the_table_comes_before_the_json_and_progress_goes_to_stderr(smoke):
    table = smoke.stdout.splitlines()[:-1]
    assert sum("view" in line for line in table) == 4 and "{" not in "".join(table)
    assert "view, 2 of 2" in smoke.stderr


def test_json_alone_and_prompts_that_fit_the_budget(rapid_server):
    """Where the prompt fits the budget nothing is drafted, and the row says so."""
    done = bench(
        f"--server={rapid_server.url}", "--contexts=120", "--batch=1", "--methods=view", "--new-tokens=4",
        "--repeats=1", "--json",
    )  # fmt: skip
    (line,) = done.stdout.splitlines()
    (row,) = json.loads(line)["rows"]
    assert row["accept_length"] == 1 and row["draft_ms"] == 0 and row["accept_rate"] is None
    assert row["speedup_vs_target"] is None  # no target was measured


def test_steps_measure_every_pass():
    done = bench("steps", "--contexts=64,200", "--repeats=2", "--", "--max-total-tokens=2048")
    report = json.loads(done.stdout.splitlines()[-1])
    for name in ("decode_ms", "extend1_ms", "verify1_ms", "verify5_ms"):
        assert set(report[name]) == {"64", "200"} and min(report[name].values()) > 0
    assert set(report["linears_ms"]) == {"1", "5"} and min(report["linears_ms"].values()) > 0
    assert report["environment"]["threads"] >= 1
    assert any(line.split()[1:2] == ["verify5"] for line in done.stdout.splitlines()[:-1])


def test_steps_refuse_what_does_not_fit():
    done = subprocess.run(
        [RAPID_SGL, "bench", "steps", "--contexts=9000", "--", "--max-total-tokens=2048"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "9000" in done.stderr.splitlines()[-1] and "--max-total-tokens" in done.stderr.splitlines()[-1]
