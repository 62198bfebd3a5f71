"""`rapid-sgl eval` on a real server: two tasks, two samples, two methods; and a run that is taken up again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")
# vt answers in 30 tokens, fwe in 50; a view of 512 tokens drafts both.
TASKS = ["--suite=ruler", "--tasks=vt,fwe", "--lengths=1500", "--samples=2"]
SMALL = ["--rapid-budget=512", "--rapid-recent=192", "--rapid-head=32", "--rapid-draft-length=4"]


def run_eval(server, output, *arguments):
    return subprocess.run(
        [RAPID_SGL, "eval", *TASKS, *SMALL, f"--server={server.url}", f"--output={output}", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def first(rapid_server, folder):
    done = run_eval(rapid_server, folder, "--methods=target,view", "--concurrency=2")
    assert done.returncode == 0, done.stderr
    return done


def test_lossless_answers_are_long_contexts(first, folder):
    report = json.loads(first.stdout.splitlines()[-1])
    assert report == json.loads((folder / "report.json").read_text())
    rows = report["rows"]
    expected = [(task, "1500", method, 2) for task in ("vt", "fwe") for method in ("target", "view")]
    assert [(row["task"], row["length"], row["method"], row["samples"]) for row in rows] == expected
    for target, view in zip(rows[::2], rows[1::2], strict=True):
        assert view["accept_length"] > 1 and view["speedup"] > 0 and target["speedup"] == 1
        assert (view["score"], view["changed"]) == (target["score"], 0)
        assert target["interval"][0] <= target["score"] <= target["interval"][1]
    assert report["lossless"] == {
        "comparable": True, "answers": 4, "texts_differ": 0, "scores_differ": 0, "samples": []
    }  # fmt: skip
    assert "0 of 4 answers differ" in first.stdout


def test_a_run_that_was_cut_off_ends_with_the_same_table(first, rapid_server, folder):
    path = folder / "predictions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 8
    path.write_bytes(b"".join(lines[:5]) + lines[5][:40])
    done = run_eval(rapid_server, folder, "--methods=target,view", "--concurrency=2", "--json")
    assert done.returncode == 0, done.stderr
    assert "5 of 8 answers are there" in done.stderr
    timed = ("ms_per_token", "speedup", "e2e_s")  # measured anew for what is asked again
    before, after = (
        [
            {name: value for name, value in row.items() if name not in timed}
            for row in json.loads(text)["rows"]
        ]
        for text in (first.stdout.splitlines()[-1], done.stdout)
    )
    assert after == before
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(kept) == 8 and [json.loads(line) for line in lines[:5]] == kept[:5]


def test_other_methods_are_added_and_other_settings_refused(first, rapid_server, folder):
    done = run_eval(rapid_server, folder, "--methods=rag-only,rag:mixture:1", "--concurrency=2", "--json")
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout)["rows"]:
        assert (row["prompt_tokens"] <= 512) == (row["method"] == "rag-only")
    refused = run_eval(rapid_server, folder, "--methods=target", "--seed=7")
    assert refused.returncode == 1 and refused.stdout == ""
    assert "seed: 42 there, 7 now" in refused.stderr.splitlines()[-1]
    assert "concurrency: 2 there, 1 now" in refused.stderr.splitlines()[-1]
