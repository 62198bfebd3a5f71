"""A bound on measured recall: which prompts lose their spans, and which reports are refused."""

import asyncio
import json
from array import array

import pytest

from rapid_sgl.auto import AutoSpans, check_auto
from rapid_sgl.cli.recall import main as recall_command
from rapid_sgl.config import RapidConfig, RapidOptionError
from rapid_sgl.retrieval.recall_guard import LOW_RECALL, UNMEASURED

pytest_plugins = ("retrieval_fixtures",)

BOUND = {"auto_spans": "bm25", "min_recall": 0.7}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A report that the command has made: BM25, which finds no paraphrased fact."""
    path = tmp_path_factory.mktemp("recall") / "new" / "recall.json"
    arguments = ["--scorers", "bm25", "--contexts", "4000,5000", "--documents", "2", "--budget", "448"]
    assert recall_command([*arguments, "--json", "--save", str(path)]) == 0
    return path


def guard(path, **options):
    return check_auto(RapidConfig(**{**BOUND, "recall_report": str(path), **options}))


def changed(folder, measured, rows=None, **keys):
    """A copy of the report with other values; ``rows``: recall of verbatim questions by length."""
    report = json.loads(measured.read_text()) | keys
    if rows is not None:
        template = report["rows"][0]
        report["rows"] = [template | {"context": at, "recall": {"verbatim": x}} for at, x in rows.items()]
    path = folder / "changed.json"
    path.write_text(json.dumps(report))
    return path


def test_a_measured_report_decides(measured):
    report = json.loads(measured.read_text())
    means = [sum(row["recall"].values()) / 3 for row in report["rows"]]
    found = guard(measured)
    assert [one.up_to for one in found.classes] == [4000, 5000]
    assert [one.recall for one in found.classes] == pytest.approx(means)
    assert all(0.6 < mean < 0.7 for mean in means), "two of three kinds are found by their words"
    assert found.refusal(3000, 448) == found.refusal(5000, 448) == LOW_RECALL
    assert "up to 4000 tokens 0.67 (too low)" in str(found)
    assert guard(measured, min_recall=0.6).refusal(5000, 448) == ""
    assert guard(measured, min_recall=0.6).refusal(5001, 448) == UNMEASURED
    assert guard(measured, min_recall=0.6).refusal(5000, 447) == UNMEASURED


def test_the_next_longer_measurement_judges(tmp_path, measured):
    found = guard(changed(tmp_path, measured, {32000: 0.9, 8000: 0.5}))
    verdicts = {length: found.refusal(length, 448) for length in (100, 8000, 8001, 32000, 32001)}
    assert verdicts == {100: LOW_RECALL, 8000: LOW_RECALL, 8001: "", 32000: "", 32001: UNMEASURED}


def test_requests_below_the_bound_go_on_without_spans(tmp_path, measured, tokenizer):
    path = changed(tmp_path, measured, {2500: 0.9, 8000: 0.5})
    auto = AutoSpans(
        tokenizer, RapidConfig(**BOUND, auto_deadline=60.0, auto_threshold=0, recall_report=str(path))
    )
    ids = array(
        "q",
        tokenizer("The vault is blue. " + "It rained for days. " * 900 + "Which vault is blue?")["input_ids"],
    )
    outcomes = [asyncio.run(auto.choose(prompt, auto.config, None)) for prompt in (ids[-2400:], ids, ids * 3)]
    assert [outcome.missed for outcome in outcomes] == ["", LOW_RECALL, UNMEASURED]
    assert (auto.stats.missed[LOW_RECALL], auto.stats.missed[UNMEASURED]) == (1, 1)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"format": 2}, "it has format 2, this version of rapid-sgl has 1"),
        ({"budget": 1024}, "measured with 1024 retrieved tokens, this server retrieves 448"),
        ({"chunk_tokens": 64}, "measured with chunk_tokens 64, this server has 128"),
        ({"rows": {}}, "says nothing about scorer bm25"),
        ({"rows": {8000: "much"}}, "none of this version"),
    ],
)
def test_reports_about_something_else_are_refused(tmp_path, measured, keys, reason):
    with pytest.raises(RapidOptionError, match=reason) as caught:
        guard(changed(tmp_path, measured, **keys))
    assert "`rapid-sgl recall --scorers bm25 --budget 448 --save " in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"recall_report": "/nowhere/recall.json"}, "/nowhere/recall.json: no such file"),
        ({"recall_report": ""}, "--rapid-min-recall needs a recall report"),
        ({"recall_report": __file__}, "none of this version"),
        ({"auto_spans": "dense"}, "measured with embedder None, this server has all-MiniLM-L6-v2"),
        ({"auto_spans": "off"}, "--rapid-min-recall has no effect without --rapid-auto-spans"),
        ({"min_recall": 0.0}, "--rapid-recall-report has no effect without --rapid-min-recall"),
        ({"store": "chunks"}, "--rapid-store is for vectors"),
        ({"auto_spans": "hybrid", "store": "ftp://host"}, "use http://HOST:PORT, or a folder"),
        ({"auto_spans": "hybrid", "embedder": "/no/model"}, "/no/model: no such folder"),
    ],
)
def test_options_that_cannot_work_are_refused_at_the_start(measured, options, reason):
    with pytest.raises(RapidOptionError, match=reason) as caught:
        guard(measured, **options)
    assert "\n" not in str(caught.value)


def test_the_report_in_the_stores_folder_is_found(tmp_path, measured):
    report = json.loads(measured.read_text()) | {"embedder": "all-MiniLM-L6-v2"}
    report["rows"] = [row | {"scorer": "hybrid"} for row in report["rows"]]
    (tmp_path / "recall.json").write_text(json.dumps(report))
    found = guard("", auto_spans="hybrid", store=str(tmp_path))
    assert [one.up_to for one in found.classes] == [4000, 5000]
