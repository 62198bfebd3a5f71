"""Needles are where their labels say, recall counts them, and the retrieval commands report and refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rapid_sgl.cli import recall as recall_command
from rapid_sgl.cli import retrieval_options
from rapid_sgl.cli.asking import load_builder
from rapid_sgl.cli.recall_report import save_plot
from rapid_sgl.models import embedded_model_path
from rapid_sgl.retrieval.bm25 import query_terms, terms
from rapid_sgl.retrieval.chunking import CHUNK_TOKENS, tokenize
from rapid_sgl.retrieval.documents import DocumentError
from rapid_sgl.retrieval.needles import FACTS, KEYED_FACT, KEYS, NeedleError, planted_document
from rapid_sgl.retrieval.pipeline import SCORERS, RetrievalOptions
from rapid_sgl.retrieval.recall import Measurement, QuestionsError, load_questions, measure, summarised

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is first imported
RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")


@pytest.fixture(scope="module")
def tokenizer():
    return load_builder(str(embedded_model_path())).tokenizer


def test_paraphrases_share_no_content_word_with_their_fact():
    for fact, verbatim, paraphrased in FACTS:
        assert not set(query_terms(paraphrased)) & set(terms(fact)), paraphrased
        shared = set(query_terms(verbatim)) & set(terms(fact))
        assert len(shared) >= len(set(query_terms(verbatim))) / 2, verbatim


@pytest.mark.parametrize(("tokens", "members"), [(4000, 3), (8000, 1), (150_000, 2)])
def test_planted_facts_stand_where_they_are_labelled(tokenizer, tokens, members):
    documents = [planted_document(tokenizer, tokens, member, members) for member in range(members)]
    asked = [probe for document in documents for probe in document.probes if probe.kind == "verbatim"]
    assert sorted(probe.question for probe in asked) == sorted(verbatim for _, verbatim, _ in FACTS)
    for document in documents:
        assert abs(len(tokenize(document.text, tokenizer).ids) - tokens) < 0.02 * tokens
        for probe in document.probes:
            ((start, end),) = probe.answers
            fact = document.text[start:end]
            assert document.text.count(fact) == 1
            if probe.kind == "multi-key":
                key = next(key for key in KEYS if key in probe.question)
                assert fact.startswith(KEYED_FACT.split("{code}")[0].format(key=key))
            else:
                assert next(one for one in FACTS if probe.question in one)[0] == fact
        depths = [probe.answers[0][0] / len(document.text) for probe in document.probes]
        assert min(depths) < 0.25 and max(depths) > 0.75
    assert documents[0] == planted_document(tokenizer, tokens, 0, members), "the same at every call"
    assert len({document.text[:1000] for document in documents}) == members


def test_impossible_contexts_are_refused(tokenizer):
    with pytest.raises(NeedleError, match=r"100 tokens are too few for 40 facts .*use \d+ or more"):
        planted_document(tokenizer, 100)


def test_recall_counts_hits(tokenizer):
    document = planted_document(tokenizer, 8000, 0, 3)
    scorers = {"bm25": RetrievalOptions("bm25")}
    (result,) = measure(document, tokenizer, scorers, budget=1024, context=8000)
    (row,) = summarised([result])
    assert row["recall"]["verbatim"] == row["recall"]["multi-key"] == 1
    assert row["recall"]["paraphrased"] < 0.5, "no words in common, so words cannot find them"
    assert row["questions"] == {"verbatim": 8, "paraphrased": 8, "multi-key": 16}
    assert (row["context"], row["scorer"], row["documents"], row["embed_s"]) == (8000, "bm25", 1, None)
    assert 0 < row["next_ms"] <= row["next_ms_max"]
    (tight,) = summarised(measure(document, tokenizer, scorers, budget=8))
    assert set(tight["recall"].values()) == {0}, "a fact cut short is not found"
    (whole,) = summarised(measure(document, tokenizer, scorers, budget=10_000))
    assert set(whole["recall"].values()) == {1}, "a prompt within the budget is read whole"


def test_summary_over_documents():
    one = Measurement("bm25", 100, 90, [("a", True), ("b", False)], None, 0.5, [0.001, 0.002])
    two = Measurement("bm25", 100, 110, [("a", False)], None, 1.5, [0.004])
    assert summarised([one, two]) == [
        {
            "context": 100,
            "scorer": "bm25",
            "documents": 2,
            "tokens": 100,
            "tokens_max": 110,
            "questions": {"a": 2, "b": 1},
            "recall": {"a": 0.5, "b": 0.0},
            "embed_s": None,
            "first_ms": 1000.0,
            "next_ms": 2.0,
            "next_ms_max": 4.0,
        }
    ]


GOOD = {"document": "text.txt", "question": "What colour is the vault?", "answer": "blue"}


def write_questions(folder, *lines):
    (folder / "text.txt").write_text("The vault is blue.\n\nThe sea is blue too, say the sailors.\n")
    path = folder / "questions.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_users_questions_are_grouped_by_document(tmp_path):
    (tmp_path / "other.md").write_text("Nothing is blue here.")
    rows = [GOOD, GOOD | {"document": "other.md"}, "", GOOD | {"question": "And the sea?"}]
    one, two = load_questions(write_questions(tmp_path, *rows))
    assert [probe.question for probe in one.probes] == [GOOD["question"], "And the sea?"]
    assert [one.text[start:end] for start, end in one.probes[0].answers] == ["blue", "blue"]
    assert (two.name, len(two.probes)) == ("other.md", 1)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", r"questions.jsonl:2: no JSON"),
        ("[1]", r":2: not a question; write \{"),
        (GOOD | {"more": "x"}, ":2: not a question"),
        (GOOD | {"answer": 3}, ":2: not a question"),
        (GOOD | {"answer": " "}, ":2: not a question"),
        (GOOD | {"answer": "green"}, r":2: text.txt does not contain the answer 'green'"),
    ],
)
def test_bad_questions_name_file_and_line(tmp_path, line, reason):
    with pytest.raises(QuestionsError, match=reason) as caught:
        load_questions(write_questions(tmp_path, GOOD, line))
    assert "\n" not in str(caught.value)


def test_missing_documents_are_named(tmp_path):
    with pytest.raises(DocumentError, match=r"missing\.txt: no such file"):
        load_questions(write_questions(tmp_path, GOOD | {"document": "missing.txt"}))


# The commands


def run(*arguments, **env):
    return subprocess.run(
        [RAPID_SGL, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
    )


def test_flags_agree_with_the_library():
    assert recall_command.SCORERS == SCORERS
    assert retrieval_options.CHUNK_TOKENS == CHUNK_TOKENS


def test_recall_reports_a_table_and_one_json_line(tmp_path):
    questions = write_questions(tmp_path, GOOD)
    (tmp_path / "text.txt").write_text(
        "".join(
            ["It rained all day.\n\n"] * 300 + ["The vault is blue.\n\n"] + ["The sun came out.\n\n"] * 300
        )
    )
    chart, saved = tmp_path / "chart.png", tmp_path / "store" / "recall.json"
    arguments = ["--budget", "200", "--scorers", "bm25", "--chunk-tokens", "64", "--plot", chart, "--save"]
    result = run("recall", "--questions", questions, *arguments, RAPID_STORE=str(saved.parent))
    assert result.returncode == 0, result.stderr
    *table, last = result.stdout.splitlines()
    report = json.loads(last)
    assert report["rows"][0]["recall"] == {"user": 1.0} and report["budget"] == 200
    assert any("bm25" in line and "1.00" in line for line in table)
    assert json.loads(saved.read_text()) == report, "kept where a server with this store looks for it"
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_the_chart_shows_every_row_and_kind(tmp_path):
    pytest.importorskip("matplotlib")
    one = Measurement("bm25", 100, 90, [("a", True), ("b", False)], None, 0.5, [0.001, 0.002])
    two = Measurement(
        "dense", 100, 90, [("a", True)], 1.0, 1.5, []
    )  # kinds may differ, and no later question
    report = {"budget": 1024, "rows": summarised([one, two])}
    save_plot(report, tmp_path / "chart.svg")
    drawing = (tmp_path / "chart.svg").read_text()
    for label in (
        "bm25",
        "dense",
        "recall within 1,024 tokens",
        "first question",
        "<!-- a -->",
        "<!-- b -->",
    ):
        assert label in drawing
    with pytest.raises(OSError, match="txt"):
        save_plot(report, tmp_path / "chart.txt")
    with pytest.raises(OSError, match="No such file"):
        save_plot(report, tmp_path / "missing" / "chart.png")


@pytest.mark.parametrize(
    ("arguments", "texts", "status"),
    [
        (["recall", "--scorers", "bm25,magic"], ["'magic'", "hybrid"], 2),
        (["recall", "--threshold", "2"], ["--threshold", "0 to 1"], 2),
        (["recall", "--contexts", "0"], ["--contexts", "1 or more"], 2),
        (["recall", "--overlap", "64"], ["--overlap 64", "0 to 63"], 2),
        (["recall", "--questions", "missing.jsonl"], ["missing.jsonl", "no such file"], 1),
        (["recall", "--scorers", "bm25", "--contexts", "99"], ["99 tokens are too few"], 1),
        (["index"], ["FILE"], 2),
        (["index", "x.txt", "--chunk-tokens", "0"], ["--chunk-tokens", "1 or more"], 2),
        (["index", "missing.txt"], ["missing.txt", "no such file"], 1),
        (["index", __file__, "--embedder", "/nowhere/model"], ["/nowhere/model", "no such folder"], 1),
        (["index", sys.executable], ["binary file"], 1),
        (["search", "  "], ["question is empty"], 2),
        (["search", "x", "-n", "0"], ["-n/--count", "1 or more"], 2),
        (["search", "x", "--store", "ftp://host"], ["'ftp://host'", "http://HOST:PORT"], 1),
    ],
)
def test_commands_refuse_with_one_line(arguments, texts, status, tmp_path):
    result = run(*arguments, RAPID_STORE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    *progress, error = result.stderr.splitlines()
    assert all(line.endswith(" ...") for line in progress)
    assert error.startswith(f"rapid-sgl {arguments[0]}: ")
    for text in texts:
        assert text in error


def test_a_report_has_no_place_in_a_chroma_server():
    result = run("recall", "--save", RAPID_STORE="http://127.0.0.1:9")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--save: the store http://127.0.0.1:9 is no folder; name a FILE" in result.stderr
