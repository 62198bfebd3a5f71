"""Around the requests: methods, the folder of a run, statistics, the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rapid_sgl.cli import main
from rapid_sgl.config import RapidConfig
from rapid_sgl.eval import SUITES, EvalError
from rapid_sgl.eval.methods import parse_method, parse_methods
from rapid_sgl.eval.report import bootstrap, interval, make_report, wilson
from rapid_sgl.eval.samples import Sample
from rapid_sgl.eval.session import SUITE_TYPES, choose_tasks
from rapid_sgl.eval.store import PREDICTIONS, SETTINGS, RunFolder

RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")


def record(sample, method, score=1.0, text="x", **more):
    timing = {"decode_s": 1.0, "decode_tokens": 10, "prompt_tokens": 100, "completion_tokens": 11}
    base = {"sample": sample, "method": method, "score": score, "prediction": text, "prompt_digest": "d"}
    return {**base, **timing, "accept_length": None, "e2e_s": 2.0, **more}


def test_methods_say_what_the_request_asks_for():
    base = RapidConfig(budget=2048)
    assert parse_method("target").custom_params(base, []) == {"rapid_drafter": "off"}
    assert parse_method("rag-only").custom_params(base, []) == {"rapid_drafter": "off"}
    wire = parse_method("rag:distill:20").custom_params(base, [(3, 5)])
    assert (wire["rapid_drafter"], wire["rapid_transfer"], wire["rapid_eta"]) == ("rag", "distill", 20.0)
    assert wire["rapid_budget"] == 2048 and wire["rapid_spans"] == [3, 5]
    # how much of an answer is transferred must not depend on what a server has measured
    assert wire["rapid_draft_length"] == 4
    assert parse_method("rag:distill:20").config(RapidConfig(draft_length=6)).draft_length == 6
    wire = parse_method("view:mixture:0.25").custom_params(base, [])
    assert (wire["rapid_drafter"], wire["rapid_transfer"], wire["rapid_lambda"]) == ("view", "mixture", 0.25)
    names = ["target", "rag-only", "view", "rag", "rag:logits:0.1"]
    assert [method.name for method in parse_methods(",".join(names)) if method.lossless] == [
        "target",
        "view",
        "rag",
    ]


@pytest.mark.parametrize(
    "text", ["fast", "rag:", "view:none:1", "rag:distil:1", "rag:distill:", "rag:mixture:2", "rag:distill:x", "target:distill:1"]
)  # fmt: skip
def test_wrong_methods_are_refused(text):
    if text == "rag:":
        assert parse_method(text).transfer == "none"
        return
    with pytest.raises(EvalError, match="rag:distill:10"):
        parse_method(text)


def test_a_method_twice_is_refused():
    with pytest.raises(EvalError, match="twice"):
        parse_methods("view,target,view")


def test_tasks_are_chosen_by_name():
    assert set(SUITE_TYPES) == set(SUITES)
    suite = SUITE_TYPES["ruler"]()
    assert choose_tasks(suite, ()) == suite.default_tasks and choose_tasks(suite, ("vt",)) == ("vt",)
    with pytest.raises(EvalError, match=r"'vtt'.*known: niah_single_1, .*qa_2"):
        choose_tasks(suite, ("vtt",))


def test_a_run_is_taken_up_behind_its_last_whole_line(tmp_path):
    with RunFolder(tmp_path, {"seed": 1}) as folder:
        folder.add(record("a", "target"))
        folder.add(record("b", "target", text="\u2028"))
    path = tmp_path / PREDICTIONS
    path.write_bytes(path.read_bytes() + '{"sample": "c", "prediction": "é'.encode()[:-1])
    with RunFolder(tmp_path, {"seed": 1}) as folder:
        assert set(folder.predictions) == {("a", "target"), ("b", "target")}
        folder.add(record("c", "view"))
    with RunFolder(tmp_path, {"seed": 1}) as folder:
        assert len(folder.predictions) == 3 and folder.predictions["b", "target"]["prediction"] == "\u2028"


def test_a_run_with_other_settings_is_refused(tmp_path):
    settings = {"seed": 1, "tasks": ("a", "b"), "model": "m"}
    with RunFolder(tmp_path, settings), pytest.raises(EvalError, match="another run is writing"):
        RunFolder(tmp_path, settings)
    with RunFolder(tmp_path, {"seed": 1, "tasks": ("a", "b"), "model": "m"}):
        pass  # tuples are what they were
    with pytest.raises(EvalError, match=r"seed: 1 there, 2 now\); use another --output"):
        RunFolder(tmp_path, {"seed": 2, "tasks": ("a", "b"), "model": "m"})


def test_a_spoilt_line_is_named(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        folder.add(record("a", "target"))
    path = tmp_path / PREDICTIONS
    path.write_text(path.read_text() + "{}\n" + json.dumps(record("b", "target")) + "\n")
    with pytest.raises(EvalError, match=r"line 2: no field 'sample'"):
        RunFolder(tmp_path, {})
    path.write_text("{\n")
    with pytest.raises(EvalError, match="line 1: not a prediction"):
        RunFolder(tmp_path, {})
    (tmp_path / SETTINGS).unlink()
    with pytest.raises(EvalError, match="without settings"):
        RunFolder(tmp_path, {})


def test_intervals():
    # Wilson's interval of 8 in 10, and of none in 10, from the closed form
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert interval([1.0] * 8 + [0.0] * 2) == wilson(8, 10)
    low, high = bootstrap([0.0, 0.5] * 200)
    # the normal approximation: sd 0.25, 400 samples
    assert (low, high) == pytest.approx((0.25 - 1.96 * 0.0125, 0.25 + 1.96 * 0.0125), abs=2e-3)
    assert interval([0.0, 0.5] * 200) == (low, high) == bootstrap([0.0, 0.5] * 200)
    assert bootstrap([0.3] * 5) == pytest.approx((0.3, 0.3))


def test_the_report_compares_with_long_context_sample_by_sample():
    samples = [Sample(name, "vt", "1024", "", "", "", "", [], 1) for name in "abcd"]
    methods = parse_methods("target,view,rag:distill:5")
    target, view, rag = [1, 0, 1, 0], [1, 0, 1, 1], [1, 1, 1, 0]
    records = [
        record(sample.id, method, float(scores[place]), f"{scores[place]}", decode_s=seconds, accept_length=accept)
        for method, scores, seconds, accept in (
            ("target", target, 2.0, None), ("view", view, 1.0, 3.0), ("rag:distill:5", rag, 4.0, 2.0)
        )
        for place, sample in enumerate(samples)
    ]  # fmt: skip
    predictions = {(item["sample"], item["method"]): item for item in records}
    report = make_report([("vt", "1024", samples)], methods, predictions, greedy=True)
    first, second, third = report["rows"]
    assert (first["score"], first["difference"], first["changed"], first["speedup"]) == (50, 0, 0, 1)
    assert (second["score"], second["difference"], second["changed"], second["speedup"]) == (75, 25, 1, 2)
    assert (second["ms_per_token"], second["accept_length"]) == (100, 3)
    assert (third["better"], third["worse"], third["speedup"]) == (1, 0, 0.5)
    assert third["difference_interval"][0] == 0 and third["difference_interval"][1] > 25
    assert report["lossless"] == {
        "comparable": True, "answers": 4, "texts_differ": 1, "scores_differ": 1, "samples": ["d"]
    }  # fmt: skip
    assert [average["score"] for average in report["averages"]] == [50, 75, 75]


def test_without_long_context_there_is_nothing_to_compare():
    samples = [Sample("a", "vt", "1024", "", "", "", "", [], 1)]
    predictions = {("a", "view"): record("a", "view", decode_tokens=0)}
    report = make_report([("vt", "1024", samples)], parse_methods("view"), predictions, greedy=True)
    assert report["lossless"] is None
    assert all(report["rows"][0][name] is None for name in ("difference", "speedup", "ms_per_token"))


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--suite", "rular"], ["rular"]),
        (["--suite", "ruler", "--rapid-eta", "3"], ["--rapid-eta", "--methods"]),
        (["--suite", "ruler", "--rapid-lambda", "0.3"], ["--rapid-lambda", "--methods"]),
        (["--suite", "longbench", "--data", "nowhere"], ["nowhere", "does not exist"]),
        (["--suite", "ruler", "--lengths", "0"], ["too small"]),
        (["--suite", "ruler", "--temperature", "-1"], ["negative"]),
    ],
)
def test_wrong_command_lines_are_refused_in_one_line(arguments, texts, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["eval", *arguments])
    shown = capsys.readouterr()
    assert ended.value.code == 2 and shown.out == ""
    assert len(shown.err.splitlines()) == 1 and all(text in shown.err for text in texts)


def test_unknown_tasks_are_refused_before_a_server_starts():
    done = subprocess.run(
        [RAPID_SGL, "eval", "--suite", "ruler", "--tasks", "vtt"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "'vtt'" in line and "niah_single_1" in line


def test_scorers_are_those_of_retrieval():
    from rapid_sgl.cli.eval import SCORERS
    from rapid_sgl.retrieval import pipeline

    assert SCORERS == pipeline.SCORERS
