"""`rapid-sgl ask` and `doctor` as a user runs them, on a real server with the real model."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import reference_text, tokenizer

RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")
NEEDLE = "The secret code of the blue vault is 7391."
QUESTION = "What is the secret code of the blue vault?"


def run(*arguments, timeout=600, **environment):
    return subprocess.run(
        [RAPID_SGL, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """About 3000 tokens of the Python reference with one sentence that is not about Python."""
    text = reference_text(3000)
    middle = text.index("\n\n", len(text) // 3)
    path = tmp_path_factory.mktemp("ask") / "reference.md"
    path.write_text(f"{text[:middle]}\n\n{NEEDLE}\n\n{text[middle:]}")
    return path


def ask_json(server, document, *arguments):
    result = run("ask", document, "-q", QUESTION, "--server", server.url, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def test_drafting_reads_the_needle_and_does_not_change_the_answer(rapid_server, document):
    rapid = ask_json(rapid_server, document, "--max-new-tokens", "40", "--rapid-draft-length", "4")
    target = ask_json(rapid_server, document, "--max-new-tokens", "40", "--method", "target")
    assert rapid["answer"] == target["answer"] and rapid["new_tokens"] == target["new_tokens"]
    assert rapid["accept_length"] > 1.5 and rapid["target_passes"] < rapid["new_tokens"]
    assert rapid["custom_params"]["rapid_drafter"] == "view" and rapid["custom_params"]["rapid_spans"]
    assert target["custom_params"] == {"rapid_drafter": "off"}

    kinds = [part["kind"] for part in rapid["parts"]]
    assert kinds[0] == "head" and kinds[-1] == "recent" and "retrieved" in kinds
    used = sum(part["end"] - part["start"] for part in rapid["parts"])
    assert used <= 1024 < rapid["prompt_tokens"]
    assert rapid["notes"] == []
    spans = [(part["start"], part["end"]) for part in rapid["parts"] if part["kind"] == "retrieved"]
    assert rapid["custom_params"]["rapid_spans"] == [bound for span in spans for bound in span]
    assert covers_needle(document, spans, rapid)


def covers_needle(document, spans, answer):
    """True when the tokens of the needle lie within the spans (of a prompt that starts with the template)."""
    text = document.read_text()
    before = len(tokenizer()(text[: text.index(NEEDLE)])["input_ids"])
    template = answer["parts"][-1]["end"] - answer["document_tokens"]  # its part after the document included
    place = before + template // 2
    return any(start <= place < end for start, end in spans)


def test_second_question_finds_the_document_cached(rapid_server, document):
    answer = ask_json(rapid_server, document, "--max-new-tokens", "4")
    assert answer["cached_tokens"] > 0.9 * answer["document_tokens"]


def test_rag_sends_only_retrieved_parts(rapid_server, document):
    answer = ask_json(
        rapid_server, document, "--method", "rag", "--rapid-budget", "640", "--max-new-tokens", "24"
    )
    assert answer["prompt_tokens"] <= 640 < answer["document_tokens"]
    assert {part["kind"] for part in answer["parts"]} == {"retrieved"}
    assert "7391" in answer["answer"]


def test_text_output_streams_the_answer_and_then_the_summary(rapid_server, document):
    # a fixed draft length: with auto the clock decides how many tokens a pass commits
    options = ("--max-new-tokens", "24", "--rapid-draft-length", "4")
    expected = ask_json(rapid_server, document, *options)
    result = run("ask", document, "-q", QUESTION, "--server", rapid_server.url, *options)
    assert result.returncode == 0, result.stderr
    answer, summary = result.stdout.rsplit("\n\n", 1)
    assert answer == expected["answer"]
    assert f"{expected['prompt_tokens']:,} tokens" in summary
    assert "tokens/s decoding; first token after" in summary
    assert f"rapid: {expected['accept_length']:.2f} tokens per target pass" in summary
    assert sum(line.startswith("  retrieved ") for line in summary.splitlines()) >= 1
    assert "prefilling" in result.stderr


def test_short_document_is_answered_without_drafts_and_says_so(rapid_server, tmp_path):
    (tmp_path / "short.txt").write_text(NEEDLE)
    answer = ask_json(rapid_server, tmp_path / "short.txt", "--max-new-tokens", "16")
    assert len(answer["notes"]) == 1 and "draft budget of 1,024" in answer["notes"][0]
    assert answer["custom_params"]["rapid_spans"] == []


@pytest.fixture(scope="module")
def long_document(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "long.txt"
    path.write_text(
        "".join(f"Entry {number}: it rained in town {number}.\n" for number in range(900)) + NEEDLE
    )
    return path


def test_too_long_a_prompt_is_refused_with_both_numbers(rapid_server, long_document):
    result = run("ask", long_document, "-q", QUESTION, "--server", rapid_server.url, "--max-new-tokens", "50")
    assert result.returncode == 1 and result.stdout == ""
    limit = rapid_server.client.info().max_prompt_tokens(50)
    line = result.stderr.splitlines()[-1]
    assert f"takes {limit} besides" in line and "--truncate middle" in line
    assert int(line.split(" has ")[1].split()[0]) > limit


def test_truncation_is_announced_and_fits(rapid_server, long_document):
    answer = ask_json(
        rapid_server, long_document, "--truncate", "middle", "--max-new-tokens", "8", "--method", "target"
    )
    limit = rapid_server.client.info().max_prompt_tokens(8)
    assert limit - 16 <= answer["prompt_tokens"] <= limit
    assert answer["truncated_tokens"] > 0
    assert answer["notes"] == [
        f"{answer['truncated_tokens']:,} tokens were cut from the middle of the document to fit the model"
    ]


def test_rag_takes_a_document_beyond_the_models_context(rapid_server, long_document):
    answer = ask_json(rapid_server, long_document, "--method", "rag", "--max-new-tokens", "24")
    assert answer["document_tokens"] > rapid_server.client.info().max_input_tokens
    assert answer["prompt_tokens"] <= 1024 and "7391" in answer["answer"]


def test_refusal_of_the_server_is_one_clear_line(rapid_server, document):
    result = run("ask", document, "-q", QUESTION, "--server", rapid_server.url, "--rapid-draft-length", "32")
    assert result.returncode == 1 and result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "rapid_draft_length=32 exceeds the server's" in result.stderr.splitlines()[-1]


def processes_named(marker):
    found = []
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if "sglang.launch_server" in arguments and marker in arguments:
            found.append(process)
    return found


MARKER = f"ask-{time.monotonic_ns()}"


@pytest.fixture(scope="module")
def commands(document):
    """What these commands say; two at a time, as they spend their time loading SGLang, on one core each."""
    own = ["ask", document, "-q", QUESTION, "--json", "--max-new-tokens", "8", "--rapid-draft-length", "3"]
    own += ["--", "--served-model-name", MARKER, "--max-total-tokens", "9000"]
    with ThreadPoolExecutor(2) as pool:
        results = {
            "own server": pool.submit(run, *own),
            "no such model": pool.submit(
                run, "ask", document, "-q", QUESTION, "--model-path", "/no-such-model"
            ),
            "doctor": pool.submit(run, "doctor", "--json"),
            # a wrong variable and a plugin that SGLang is told to leave out
            "doctor, ill": pool.submit(run, "doctor", "--json", RAPID_SGL_BUDGET="0", SGLANG_PLUGINS="other"),
        }
    return {name: result.result() for name, result in results.items()}


def test_own_server_is_started_used_and_stopped(commands):
    result = commands["own server"]
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["new_tokens"] == 8 and answer["custom_params"]["rapid_draft_length"] == 3
    assert processes_named(MARKER) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_ask_takes_its_server_down(document, number, status):
    marker = f"ask-{time.monotonic_ns()}"
    command = [RAPID_SGL, "ask", document, "-q", QUESTION, "--", "--served-model-name", marker]
    ask = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not processes_named(marker):
        assert ask.poll() is None, ask.communicate()
        time.sleep(0.2)
    ask.send_signal(number)
    _, errors = ask.communicate(timeout=120)
    assert ask.returncode == status, errors
    assert "Traceback" not in errors
    assert processes_named(marker) == []


def test_server_that_cannot_start_shows_the_end_of_its_log(commands):
    result = commands["no such model"]
    assert result.returncode == 1 and result.stdout == ""
    assert "before it was ready; its last lines:" in result.stderr and "no-such-model" in result.stderr


def test_doctor_finds_this_installation_in_order(commands):
    result = commands["doctor"]
    report = json.loads(result.stdout)
    bad = [check for check in report["checks"] if not check["ok"]]
    assert bad == [] and report["ok"] and result.returncode == 0
    names = {check["name"] for check in report["checks"]}
    assert {"sglang", "platform", "algorithm RAPID", "hooks", "embedded model", "entry point rapid"} <= names


def test_doctor_reports_what_is_off_with_its_fix(commands):
    """SGLang itself is loaded for real."""
    result = commands["doctor, ill"]
    assert result.returncode == 1
    report = json.loads(result.stdout)
    bad = {check["name"]: check for check in report["checks"] if not check["ok"]}
    assert not report["ok"] and all(check["fix"] for check in bad.values())
    assert {"RAPID_SGL_*", "entry point rapid", "entry point rapid_cpu", "algorithm RAPID"} <= set(bad)
    assert "rapid_budget=0" in bad["RAPID_SGL_*"]["detail"]
