"""What `ask` would send for a question, and how it reports an answer; no server."""

import pytest

from rapid_sgl.cli.asking import AskError, Question, load_builder, make_plan, read_documents
from rapid_sgl.cli.report import Report
from rapid_sgl.config import RapidConfig
from rapid_sgl.http_client import Completion, ServerInfo
from rapid_sgl.models import embedded_model_path
from rapid_sgl.request import Limits, parse_options
from rapid_sgl.retrieval.documents import DocumentError

TEXT = "".join(f"In week {number} the harvest of farm {number} was counted.\n\n" for number in range(200))
DOCUMENT = f"{TEXT}The blue vault opens with 7391.\n\n{TEXT}"


@pytest.fixture(scope="module")
def builder():
    return load_builder(str(embedded_model_path()))


def info(algorithm="RAPID", longest=20_000):
    return ServerInfo("model", "model", longest, algorithm, False, {})


def question(method="rapid", document=DOCUMENT, text="How does the blue vault open?", **rapid):
    return Question(document, text, method, 16, False, RapidConfig(**rapid), rapid)


def completion(**meta):
    return Completion("Well.", 100, 0, 16, 1.0, 2.0, 15, {"finish_reason": {"type": "length"}, **meta})


def test_rapid_sends_options_that_the_server_accepts(builder):
    asked = question(budget=700, head=32, recent=256, transfer="mixture", lam=0.3)
    plan = make_plan(asked, builder, info())
    options = parse_options(
        plan.custom_params, RapidConfig(), Limits(len(plan.ids), RapidConfig.draft_length)
    )
    assert options.config == asked.config
    assert list(options.spans) == plan.spans
    assert any("7391" in plan.whole.document_text(span) for span in plan.spans)


def test_only_what_was_chosen_overrides_the_servers_defaults(builder):
    """The view's size is always sent, since the spans were chosen for it; all else is the server's own."""
    sent = make_plan(question(), builder, info()).custom_params
    assert set(sent) == {"rapid_drafter", "rapid_budget", "rapid_head", "rapid_recent", "rapid_spans"}


def test_target_sends_the_same_prompt_without_drafts(builder):
    target, rapid = (make_plan(question(method), builder, info()) for method in ("target", "rapid"))
    assert target.ids == rapid.ids and target.custom_params == {"rapid_drafter": "off"}


def test_rag_without_a_match_says_so(builder):
    with pytest.raises(AskError, match="matches the question"):
        make_plan(question("rag", text="Zebras?"), builder, info())


def test_rag_sends_a_short_document_whole(builder):
    plan = make_plan(question("rag", document="The vault is blue."), builder, info())
    assert plan.ids is plan.whole.ids
    assert [part.kind for part in Report(question("rag"), plan, info(), completion()).parts] == ["document"]


def test_report_of_a_drafted_answer(builder):
    plan = make_plan(question(), builder, info())
    report = Report(question(), plan, info(), completion(spec_accept_length=3.2, spec_verify_ct=5))
    lines = report.as_text().splitlines()
    assert "7.5 tokens/s decoding; first token after 1.0 s" in lines[2]
    assert lines[3] == "method   rapid: 3.20 tokens per target pass (5 passes)"
    used = sum(part.end - part.start for part in report.parts)
    assert f"drafts read {used:,} of {len(plan.ids):,} tokens" in lines[4]
    assert len(lines) == 5 + len(report.parts) and report.notes == []
    vault = next(part for part in report.parts if "vault" in plan.whole.document_text((part.start, part.end)))
    assert 0 < vault.document_share < 0.1 and vault.text


@pytest.mark.parametrize(
    ("asked", "server", "note"),
    [
        (question(), info(None), "does not run RAPID"),
        (question(), info("NGRAM"), "NGRAM"),
        (question(document="The vault is blue."), info(), "draft budget of 1,024"),
        (question(text="Zebras?"), info(), "matches the question"),
        (question("target"), info(), None),
    ],
)
def test_report_says_why_nothing_was_drafted_from_the_document(builder, asked, server, note):
    report = Report(asked, make_plan(asked, builder, server), server, completion(spec_accept_length=1.0))
    assert len(report.notes) == (note is not None)
    assert all(note in line for line in report.notes)
    assert report.as_text().splitlines()[3] == f"method   {asked.method}: no drafts"
    if note != "matches the question":  # there, head and recent are still read
        assert "drafts read" not in report.as_text()


def test_the_flag_names_the_scorers_that_exist():
    from rapid_sgl.cli.ask import SCORERS
    from rapid_sgl.retrieval import pipeline

    assert SCORERS == pipeline.SCORERS


def test_several_documents_are_headed_by_their_names(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    assert read_documents(paths) == "# a.txt\n\ntext of a.txt\n\n# b.txt\n\ntext of b.txt"
    assert read_documents(paths[:1]) == "text of a.txt"
    assert read_documents([], ["with"]).startswith('The "with" statement')


def test_unknown_topic_and_unloadable_tokenizer_are_named(tmp_path):
    with pytest.raises(DocumentError, match="no topic 'lions'"):
        read_documents([], ["lions"])
    with pytest.raises(AskError, match=r"cannot load the server's tokenizer from .*--model-path"):
        load_builder(str(tmp_path))
