"""The scripts in ``examples/`` run as their own first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import openai

ROOT = Path(__file__).parents[2]
QUESTION = "What does make demo do?"


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / script, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_openai_client(rapid_server):
    shown = run("openai_client.py", rapid_server.url, "README.md", QUESTION)
    client = openai.OpenAI(base_url=f"{rapid_server.url}/v1", api_key="none")
    plain = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": f"{(ROOT / 'README.md').read_text()}\n\n{QUESTION}"}],
        max_tokens=64,
        temperature=0,
        extra_body={"custom_params": {"rapid_drafter": "off"}},
    )
    assert shown.strip() == plain.choices[0].message.content.strip() != ""


def test_offline_engine():
    shown = run("offline_engine.py", "README.md", "What is a view?", QUESTION)
    assert shown.count("tokens per target pass]") == 2 and QUESTION in shown
    assert max(map(float, re.findall(r"\[([\d.]+) tokens", shown))) > 1.2


def test_each_script_says_how_it_is_used():
    for script in (ROOT / "examples").glob("*.py"):
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and f"python examples/{script.name}" in done.stderr
