"""`rapid-sgl bench` on a real server and `bench steps` in a process of its own, in tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import rapid_stats

RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")
ISSUE_KEYS = {
    "method", "context", "batch", "ms_per_token", "accept_length", "accept_rate",
    "draft_ms", "verify_ms", "decode_ms", "speedup_vs_target",
    "tokens_per_s", "ttft_ms", "inter_token_p50_ms", "inter_token_p99_ms", "end_to_end_ms", "kv_mb",
}  # fmt: skip
METHODS = ["target", "rag-only", "view", "recent"]
# Fixed, and without copies: what is drafted does not depend on what the server has measured so far.
PLAIN_DRAFTS = ["--draft-length=4", "--rapid-copy=off"]
TINY_VIEW = ["--rapid-budget=192", "--rapid-recent=64", "--rapid-head=16", *PLAIN_DRAFTS]


def run_bench(*arguments):
    return subprocess.run(
        [RAPID_SGL, "bench", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def bench(*arguments):
    done = run_bench(*arguments)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def plots(tmp_path_factory):
    return tmp_path_factory.mktemp("plots")


@pytest.fixture(scope="module")
def smoke(rapid_server, plots):
    """What `make bench-quick` does, small: batch 2 alone over 600 tokens, to keep it short."""
    charts = [f"--plots={plots}"] if importlib.util.find_spec("matplotlib") else []
    return bench(
        f"--server={rapid_server.url}", "--contexts=300,600", "--batch=1,2", "--new-tokens=12",
        f"--methods={','.join(METHODS)}", "--repeats=1", *TINY_VIEW, *charts,
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(smoke):
    return json.loads(smoke.stdout.splitlines()[-1])


def rows_of(report, *methods):
    return [row for row in report["rows"] if row["method"] in methods]


def test_rows_have_the_keys_and_cover_every_cell(report):
    assert set(report) == {"environment", "rows"}
    assert all(set(row) >= ISSUE_KEYS for row in report["rows"])
    cells = [(row["context"], row["batch"], row["method"]) for row in report["rows"]]
    assert cells == [(c, b, m) for c in (300, 600) for b in (1, 2) for m in METHODS]
    assert report["environment"]["server"]["speculative_algorithm"] == "RAPID"
    assert report["environment"]["options"]["budget"] == 192


def test_views_drafted_and_the_target_did_not(report):
    for row in report["rows"]:
        assert row["accept_length"] >= 1 and row["ms_per_token"] > 0 and row["decode_ms"] > 0
        assert row["cached_share"] > 0.9  # the warm-up left the prompts in the prefix cache
        if row["method"] in ("view", "recent"):
            assert row["draft_ms"] > 0 and 0 <= row["accept_rate"] <= 1
            # the first step of an answer is not drafted on a CPU
            assert 1 < row["accept_length"] <= 1 + 4 * row["accept_rate"] + 0.01
            assert row["predicted_speedup"] > 0 and len(row["accept_by_position"]) <= 4
        else:
            assert row["accept_length"] == 1 and row["draft_ms"] == 0 and row["accept_rate"] is None
            assert row["method"] == "rag-only" or row["speedup_vs_target"] == 1


def test_what_comes_before_the_answer_is_in_the_end_to_end_time(report):
    for row in report["rows"]:
        assert row["inter_token_p99_ms"] >= row["inter_token_p50_ms"] > 0
        # so short are these prompts that the chat template may be most of one: then no cold time is claimed
        if row["cold_ttft_ms"] is None:
            assert row["end_to_end_ms"] is None
            continue
        assert row["end_to_end_ms"] > row["cold_ttft_ms"] + 11 * row["ms_per_token"] * 0.99 > 0
        assert (row["retrieval_ms"] is None) == (row["method"] in ("target", "recent"))
    assert any(row["cold_ttft_ms"] for row in rows_of(report, "target"))
    for target, short in zip(rows_of(report, "target"), rows_of(report, "rag-only"), strict=True):
        assert short["kv_mb"] < target["kv_mb"]


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
    assert "view, 1 of 1" in smoke.stderr


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the optional extra plot")
def test_charts_of_a_real_report(smoke, plots, report):
    names = {"speedup.png", "speedup.svg", "cost.png", "cost.svg", "accept_by_position.png", "table.md"}
    assert names <= {path.name for path in plots.iterdir()}
    assert json.loads((plots / "report.json").read_text())["rows"] == report["rows"]


def test_json_alone_and_prompts_that_fit_the_budget(rapid_server):
    """Where the prompt fits the budget nothing is drafted, and the row says so."""
    done = bench(
        f"--server={rapid_server.url}", "--contexts=120", "--batch=1", "--methods=view", "--new-tokens=4",
        "--repeats=1", "--json", *PLAIN_DRAFTS,
    )  # fmt: skip
    (line,) = done.stdout.splitlines()
    (row,) = json.loads(line)["rows"]
    assert row["accept_length"] == 1 and row["draft_ms"] == 0 and row["accept_rate"] is None
    assert row["speedup_vs_target"] is None  # no target was measured


def test_a_copying_answer_with_oracle_spans_and_copies_alone(rapid_server):
    """The axes that vary a method, on the workload whose answer is a copy of its source."""
    before = rapid_stats(rapid_server)
    done = bench(
        f"--server={rapid_server.url}", "--contexts=1400", "--batch=1", "--methods=view,copy", "--repeats=1",
        "--new-tokens=16", "--workload=quote", "--retrieval=oracle", "--vary=copy=on,off", "--json",
        "--draft-length=4",
    )  # fmt: skip
    rows = json.loads(done.stdout)["rows"]
    forms = [(row["method"], row["retrieval"], row["varied"]) for row in rows]
    assert forms == [
        ("view", "oracle", {"copy": "on"}),
        ("view", "oracle", {"copy": "off"}),
        ("copy", None, {}),
    ]
    both, drafts, copies = rows
    assert drafts["draft_ms"] > 0 and drafts["copied_share"] == 0
    assert copies["copied_share"] == 1 and copies["accept_length"] > 2
    assert both["copied_share"] > 0
    copied = rapid_stats(rapid_server)["drafted"]["copied"] - before["drafted"]["copied"]
    assert copied > 0


def test_cells_that_keep_the_cache_have_no_cold_prefill(rapid_server):
    bench_once = (
        f"--server={rapid_server.url}",
        "--contexts=500",
        "--methods=target",
        "--new-tokens=4",
        "--json",
    )
    rows = [
        json.loads(bench(*bench_once, "--batch=2,1", "--repeats=1", *keep).stdout)["rows"]
        for keep in ((), ("--keep-cache",))
    ]
    cold = [[row["cold_ttft_ms"] is not None for row in report] for report in rows]
    assert cold == [[True, True], [False, False]]


@pytest.fixture(scope="module")
def steps():
    """`bench steps` of a size that fits and of one that does not, at once: most of it is loading SGLang."""
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda sizes: run_bench("steps", *sizes, "--", "--max-total-tokens=2048"),
                [("--contexts=64,200", "--repeats=2"), ("--contexts=9000",)],
            )
        )


def test_steps_measure_every_pass(steps):
    done, _ = steps
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    for name in ("decode_ms", "extend1_ms", "verify1_ms", "verify5_ms"):
        assert set(report[name]) == {"64", "200"} and min(report[name].values()) > 0
    assert set(report["linears_ms"]) == {"1", "5"} and min(report["linears_ms"].values()) > 0
    assert report["environment"]["threads"] >= 1
    assert any(line.split()[1:2] == ["verify5"] for line in done.stdout.splitlines()[:-1])


def test_steps_refuse_what_does_not_fit(steps):
    _, done = steps
    assert done.returncode == 1 and done.stdout == ""
    assert "9000" in done.stderr.splitlines()[-1] and "--max-total-tokens" in done.stderr.splitlines()[-1]
