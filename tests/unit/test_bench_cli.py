"""Command lines of `rapid-sgl bench`: what is wrong is refused in one line, before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

RAPID_SGL = Path(sys.executable).with_name("rapid-sgl")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--methods", "target,magic"], "'magic'"),
        (["--methods", "view,view"], "twice"),
        (["--contexts", "1000,x"], "'x' is not an integer"),
        (["--batch", "0"], "0 is too small"),
        (["--contexts", "10,10"], "twice"),
        (["--new-tokens", "1"], "use 2 or more"),
        (["--temperature", "-1"], "--temperature -1"),
        (["--temperature", "0,x"], "'0,x'"),
        (["--workload", "quote,spam"], "'spam'"),
        (["--retrieval", "oracle"], "--workload quote"),
        (["--vary", "drafter=off,view"], "'drafter=off,view'"),
        (["--vary", "budget=many"], "'many'"),
        (["--vary", "budget=1024,20"], "rapid_budget=20"),
        (["--draft-length", "some"], "'some'"),
        (["--rapid-budgt", "9"], "--rapid-budget"),
        (["--rapid-drafter", "off"], "--methods"),
        (["--draft-length", "99"], "--rapid-draft-length 99"),
        (["--spam"], "--spam"),
        (["--server", "http://127.0.0.1:1", "--", "--dtype", "bfloat16"], "behind `--`"),
        (["steps", "--contexts", "-3"], "-3"),
        (["steps", "--spam"], "--spam"),
        (["steps", "--", "--rapid-budgt", "9"], "--rapid-budget"),
    ],
)
def test_wrong_command_lines_are_one_line(arguments, text):
    result = subprocess.run([RAPID_SGL, "bench", *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and text in result.stderr, result.stderr


def test_an_unreachable_server_is_one_line():
    result = subprocess.run(
        [RAPID_SGL, "bench", "--server", "http://127.0.0.1:9"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1 and result.stdout == ""
    assert "cannot reach a server" in result.stderr.splitlines()[-1]
