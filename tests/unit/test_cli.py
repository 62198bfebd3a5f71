"""The command line without a server: help, parsing, one-line errors, and what `serve` would run."""

import subprocess
import sys
from pathlib import Path

import pytest

from rapid_sgl.cli import COMMANDS, serve
from rapid_sgl.config import RapidConfig
from rapid_sgl.models import embedded_checkpoint, embedded_model_path

RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")


def run(*arguments, env=None):
    return subprocess.run(
        [RAPID_SGL, *arguments], capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL
    )


def assert_refused(result, *texts, status=2):
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for text in texts:
        assert text in result.stderr


def test_help_lists_every_command():
    result = run("--help")
    assert result.returncode == 0 and result.stderr == ""
    assert all(f"  {name} " in result.stdout for name in COMMANDS)


def test_no_command_shows_the_help_and_fails():
    result = run()
    assert result.returncode == 2 and "usage: rapid-sgl COMMAND" in result.stdout


def test_unknown_command_is_refused():
    assert_refused(run("asq"), "'asq'", "ask")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_teaches_with_an_example(name):
    result = run(name, "--help")
    assert result.returncode == 0, result.stderr
    assert f"rapid-sgl {name}" in result.stdout.split("options:")[0].split("usage:")[1]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["ask", "--help"], ["model", "--help"]]
)
def test_help_loads_nothing_heavy(arguments):
    script = (
        "import sys\nfrom rapid_sgl.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "print({'torch', 'transformers', 'sglang', 'numpy', 'bm25s', 'rich', 'requests'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--rapid-budgte", "9"], ["--rapid-budgte", "did you mean --rapid-budget?"]),
        (["--rapid-zzz=1"], ["--rapid-zzz", "known: --rapid-drafter"]),
        (["--rapid-budget", "many"], ["--rapid-budget", "'many'"]),
        (["--rapid-draft-length", "0"], ["--rapid-draft-length 0", "between 1 and 32"]),
        (["--rapid-lambda", "1.5"], ["--rapid-lambda 1.5", "between 0 and 1"]),
        (["--rapid-eta", "nan"], ["--rapid-eta nan", "out of range"]),
        (["--rapid-transfer", "magic"], ["--rapid-transfer", "mixture"]),
        (["--rapid-head", "600"], ["--rapid-head 600", "exceeds --rapid-budget 1024"]),
        (["--speculative-algorithm", "NGRAM", "--rapid-eta", "5"], ["--rapid-eta has no effect", "NGRAM"]),
    ],
)
def test_serve_refuses_bad_options_before_it_starts_anything(arguments, texts):
    assert_refused(run("serve", *arguments), *texts)


def test_serve_refuses_bad_environment():
    assert_refused(run("serve", env={"RAPID_SGL_BUDGET": "-3"}), "rapid_budget=-3")


def server_command(*arguments):
    command, env = serve.plan(arguments)
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    return command[3:], env


def test_serve_defaults_to_the_embedded_model_and_rapid():
    command, env = server_command("--port", "30000")
    assert command == [
        *["--model-path", str(embedded_checkpoint()), "--port", "30000"],
        *["--speculative-algorithm", "RAPID", "--speculative-num-draft-tokens", "11"],
    ]
    assert env["HF_HUB_OFFLINE"] == "1"


def test_serve_hands_rapid_options_over_in_the_environment():
    command, env = server_command(
        "--rapid-draft-length=7", "--rapid-lambda", "0.5", "--rapid-transfer", "mixture"
    )
    rapid = {name: value for name, value in env.items() if name.startswith("RAPID_SGL_")}
    assert RapidConfig.from_env(rapid) == RapidConfig(draft_length=7, lam=0.5, transfer="mixture")
    assert command[-2:] == ["--speculative-num-draft-tokens", "8"]
    assert not any(argument.startswith("--rapid") for argument in command)


def test_serve_flags_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("RAPID_SGL_BUDGET", "2000")
    monkeypatch.setenv("RAPID_SGL_HEAD", "10")
    _, env = server_command("--rapid-budget", "3000")
    assert (env["RAPID_SGL_BUDGET"], env["RAPID_SGL_HEAD"]) == ("3000", "10")


@pytest.mark.parametrize(
    "model", [["--model-path", "M"], ["--model-path=M"], ["--model", "M"], ["--config", "f.yaml"]]
)
def test_serve_leaves_a_named_model_alone(model):
    command, env = server_command(*model)
    assert command[: len(model)] == model and str(embedded_checkpoint()) not in command
    assert "HF_HUB_OFFLINE" not in env


def test_serve_keeps_what_was_given_of_sglangs_own_flags():
    command, _ = server_command("--speculative-num-draft-tokens", "9", "--mem-fraction-static=0.5")
    assert command.count("--speculative-num-draft-tokens") == 1 and "--mem-fraction-static=0.5" in command
    command, _ = server_command("--speculative-algorithm", "NGRAM")
    assert "RAPID" not in command and "--speculative-num-draft-tokens" not in command


def test_model_prints_the_path_and_nothing_else():
    result = run("model")
    assert result.returncode == 0
    assert result.stdout == f"{embedded_model_path()}\n"


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ([], ["-q/--question"]),
        (["-q", "What?"], ["at least one FILE"]),
        (["a.txt", "-q", "What?", "--method", "magic"], ["--method", "'magic'", "target"]),
        (["a.txt", "-q", "What?", "--rapid-budget", "0"], ["--rapid-budget 0"]),
        (["a.txt", "-q", "What?", "--rapid-bugdet", "9"], ["did you mean --rapid-budget?"]),
        (["a.txt", "-q", "What?", "--mem-fraction-static", "0.5"], ["--mem-fraction-static", "behind `--`"]),
        (["a.txt", "-q", "What?", "--server", "http://x", "--", "--port", "1"], ["leave out --server"]),
        (["a.txt", "-q", "What?", "--max-new-tokens", "0"], ["--max-new-tokens 0"]),
        (["a.txt", "-q", "What?", "--temperature", "-1"], ["--temperature -1"]),
    ],
)
def test_ask_refuses_a_wrong_command_line(arguments, texts):
    assert_refused(run("ask", *arguments), *texts)


def test_ask_refuses_a_bad_document_before_it_starts_a_server(tmp_path):
    (tmp_path / "data.bin").write_bytes(b"\x00\x01")
    assert_refused(run("ask", "missing.txt", "-q", "What?"), "missing.txt: no such file", status=1)
    assert_refused(run("ask", str(tmp_path / "data.bin"), "-q", "What?"), "binary file", status=1)
    assert_refused(run("ask", "--python-topic", "lions", "-q", "What?"), "no topic 'lions'", status=1)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "127.0.0.1:30000", "ftp://host"])
def test_ask_names_a_server_that_is_not_there(tmp_path, address):
    (tmp_path / "a.txt").write_text("text")
    result = run("ask", str(tmp_path / "a.txt"), "-q", "What?", "--server", address)
    assert result.returncode == 1
    assert address in result.stderr.splitlines()[-1]
