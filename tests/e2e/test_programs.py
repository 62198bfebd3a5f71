"""Every program finds facts that only its document has, and cites where they stand.

Documents are Python's language reference with planted sentences; drafts look at small views.
"""

from __future__ import annotations

import importlib
import re
import sys

import psutil
import pytest
from conftest import DRAFTED, reference_text, tokenizer
from rapid_sgl.programs.chat import Chat
from rapid_sgl.programs.compare_documents import VERDICTS, compare_documents
from rapid_sgl.programs.long_qa import long_qa
from rapid_sgl.programs.map_reduce import map_reduce, split
from rapid_sgl.programs.multi_hop import multi_hop

from rapid_sgl.http_client import ServerError
from rapid_sgl.lang import RapidEndpoint, rapid_options

LEADER = "The Larkspur project is led by Mira Tellwell."
HOME = "Mira Tellwell lives in the city of Antwerp."
BRUSH = "Otto Brandt paints the harbour every Sunday with a brush of badger hair."
CODE = "The access code of the {} vault is {}."


def planted(tokens, *facts, start=0):
    """About ``tokens`` tokens of the reference, the facts as paragraphs at even distances."""
    text = tokenizer().decode(tokenizer()(reference_text(4000)[start:], verbose=False)["input_ids"][:tokens])
    paragraphs = text.split("\n\n")
    step = len(paragraphs) // (len(facts) + 1)
    for number in range(len(facts), 0, -1):
        paragraphs.insert(number * step, facts[number - 1])
    return "\n\n".join(paragraphs)


DOCUMENT = planted(1700, LEADER, HOME)


@pytest.fixture(scope="module")
def backend(rapid_server):
    return RapidEndpoint(rapid_server.url, rapid_budget=512, rapid_head=32, rapid_recent=128, **DRAFTED)


def text_at(state, span):
    """What the prompt's tokens say, as the server tokenised it: as one text, special tokens included."""
    ids = tokenizer()(state.text(), verbose=False)["input_ids"]
    return tokenizer().decode(ids[span[0] : span[1]])


def assert_cited(state, answer, fact):
    """The cited span holds the fact, drafts looked at it, and there were drafts."""
    start, end = answer.citation.span
    assert fact in text_at(state, answer.citation.span) and fact in answer.citation.text
    assert end - start <= 64
    assert any(fact in text_at(state, span) for span in answer.spans)
    assert answer.meta_info["spec_accept_length"] > 1
    assert f"[{start:,}-{end:,}]" in str(answer)


def test_long_qa(backend):
    state, answer = long_qa(backend, DOCUMENT, "Who leads the Larkspur project?", max_tokens=24)
    assert "Mira Tellwell" in answer.text == state["answer"].strip()
    assert_cited(state, answer, LEADER)
    _, target = long_qa(
        backend.with_options(rapid_drafter="off"), DOCUMENT, "Who leads the Larkspur project?", max_tokens=24
    )
    assert target.text == answer.text and target.spans == []


def test_multi_hop_asks_on_with_what_it_found(backend):
    hops = [
        "Who leads the Larkspur project? => The Larkspur project is led by",
        "In which city does {answer} live? => {answer} lives in the city of",
    ]
    state, (leader, home) = multi_hop(backend, DOCUMENT, hops)
    assert (leader.text, home.text) == ("Mira Tellwell", "Antwerp") == (state["answer_0"].strip(), "Antwerp")
    assert home.question == "In which city does Mira Tellwell live?"
    assert_cited(state, leader, LEADER)
    assert_cited(state, home, HOME)
    assert leader.spans != home.spans
    assert home.meta_info["cached_tokens"] > 1700


def test_map_reduce(backend):
    codes = {"crimson": 4821, "emerald": 9035, "violet": 2764}
    sections = [
        planted(640, CODE.format(*item), start=3000 * number) for number, item in enumerate(codes.items())
    ]
    state, notes = map_reduce(backend, sections, "What is the access code of the vault?", max_tokens=20)
    for branch, note, item in zip(state.ret_value, notes, codes.items(), strict=True):
        assert str(item[1]) in note.text
        assert_cited(branch, note, CODE.format(*item))
    assert re.findall(r"\d{4}", state["answer"])[:3] == [str(code) for code in codes.values()]
    assert "".join(split(backend, DOCUMENT, 600)) == DOCUMENT and len(split(backend, DOCUMENT, 600)) == 3 + 1


def test_compare_documents(backend):
    documents = {
        "Alpha": planted(640, CODE.format("crimson", 4821)),
        "Beta": planted(640, CODE.format("crimson", 9035), start=3000),
    }
    question = "What is the access code of the crimson vault?"
    state, answers = compare_documents(backend, documents, question, max_tokens=20)
    assert "4821" in answers["Alpha"].text and "9035" in answers["Beta"].text
    for branch, answer, code in zip(state.ret_value, answers.values(), (4821, 9035), strict=True):
        assert_cited(branch, answer, CODE.format("crimson", code))
    assert state["verdict"] in VERDICTS and state.text().rstrip().endswith(f"{state['verdict']}.<|im_end|>")
    assert "Alpha: " in state.text() and "9035" in state.text()
    with pytest.raises(ValueError, match="two or more"):
        compare_documents(backend, {"Alpha": "text"}, question)


def test_chat_reuses_what_it_has_read_and_looks_elsewhere_each_turn(backend):
    chat = Chat(backend, DOCUMENT)
    state, first = chat.ask("Who leads the Larkspur project?", max_tokens=20)
    assert "Mira Tellwell" in first.text
    assert_cited(state, first, LEADER)

    state, second = chat.ask("In which city does Mira Tellwell live?", max_tokens=20)
    assert "Antwerp" in second.text
    assert_cited(state, second, HOME)
    assert second.meta_info["cached_tokens"] > first.meta_info["prompt_tokens"] - 8
    assert f"{second.meta_info['cached_tokens']:,} from cache" in str(second)

    chat.add(planted(400, BRUSH, start=4000))
    state, third = chat.ask("With what does Otto Brandt paint the harbour?", max_tokens=20)
    assert "badger hair" in third.text
    assert_cited(state, third, BRUSH)
    assert third.meta_info["cached_tokens"] > second.meta_info["prompt_tokens"] - 8
    assert len({tuple(turn.spans) for turn in (first, second, third)}) == 3

    before = chat.text
    with rapid_options(rapid_draft_length=32), pytest.warns(UserWarning), pytest.raises(ServerError):
        chat.ask("And now?")
    assert chat.text == before


def run(monkeypatch, module, *arguments):
    """What ``python -m rapid_sgl.programs.MODULE ARGUMENTS`` does, without importing SGLang once more."""
    monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
    importlib.import_module(f"rapid_sgl.programs.{module}").main()


def test_command_line(rapid_server, tmp_path, monkeypatch, capsys):
    (tmp_path / "report.txt").write_text(DOCUMENT)
    ask = [tmp_path / "report.txt", "--server", rapid_server.url, "-q", "Who leads the Larkspur project?"]
    run(monkeypatch, "long_qa", *ask, "--max-tokens", 20, "--rapid-budget", 640)
    shown = capsys.readouterr().out
    assert "A: The Larkspur project is led by Mira Tellwell." in shown and "per target pass" in shown
    assert re.search(r"cited \[\d[\d,]*-\d[\d,]*\] .*" + re.escape(LEADER), shown)
    with pytest.raises(SystemExit, match=r"long_qa: .*rapid_recent=700 exceeds rapid_budget=640"):
        run(monkeypatch, "long_qa", *ask, "--rapid-budget", 640, "--rapid-recent", 700)


def test_command_line_with_a_server_of_its_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "report.txt").write_text(planted(600, LEADER))
    monkeypatch.setenv("RAPID_SGL_DRAFT_LENGTH", "4")
    begun = {child.pid for child in psutil.Process().children(recursive=True)}
    ask = [tmp_path / "report.txt", "-q", "Who leads the Larkspur project?", "--max-tokens", 20]
    run(monkeypatch, "long_qa", *ask, "--rapid-budget", 256, "--rapid-recent", 96)
    shown = capsys.readouterr()
    answer = shown.out.partition("\nA: ")[2].partition("\n   cited")[0]
    assert "Mira Tellwell" in answer, shown.out
    assert float(re.search(r"([\d.]+) per target pass", shown.out)[1]) > 1.2
    assert "starting the server" in shown.err
    left = {child.pid for child in psutil.Process().children(recursive=True)} - begun
    assert not left, "its server has to end with it"


@pytest.mark.parametrize("module", ["long_qa", "multi_hop", "map_reduce", "compare_documents", "chat"])
def test_help_shows_a_command_that_the_program_takes(module, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, module, "--help")
    shown = capsys.readouterr().out
    assert (
        ended.value.code == 0
        and f"python -m rapid_sgl.programs.{module} " in shown
        and "--server URL" in shown
    )
