"""The scripts in ``examples/`` run as their own first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import openai

from rapid_sgl.http_client import Client

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


def test_rag_over_several_files(rapid_server, tmp_path):
    asked = (rapid_server.url, str(tmp_path / "store"), QUESTION, "README.md", "docs/benchmark.md")
    first = run("rag.py", *asked)
    answer, *spans, accepted = first.splitlines()
    assert answer and any("make demo" in span for span in spans), first
    assert float(accepted.split()[0]) > 1.2
    again = run("rag.py", *asked).splitlines()
    assert [answer, *spans] == again[:-1], "the store answers as the embedder did"


def test_behind_sglangs_router(rapid_server):
    from rapid_sgl.client import free_port

    port = free_port()
    script = [sys.executable, ROOT / "examples" / "router.py", str(port), rapid_server.url]
    with subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as router:
        try:
            client = Client(f"http://127.0.0.1:{port}")
            deadline = time.monotonic() + 120
            while not client.healthy():
                assert router.poll() is None and time.monotonic() < deadline, "the router is not ready"
                time.sleep(0.5)
            routed = run("openai_client.py", client.url, "README.md", QUESTION)
        finally:
            router.terminate()
    assert routed == run("openai_client.py", rapid_server.url, "README.md", QUESTION) != ""


def test_offline_engine():
    shown = run("offline_engine.py", "README.md", "What is a view?", QUESTION)
    assert shown.count("tokens per target pass]") == 2 and QUESTION in shown
    assert max(map(float, re.findall(r"\[([\d.]+) tokens", shown))) > 1.2


def test_each_script_says_how_it_is_used():
    for script in (ROOT / "examples").glob("*.py"):
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and f"python examples/{script.name}" in done.stderr
