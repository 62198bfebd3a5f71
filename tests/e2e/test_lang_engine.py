"""Programs on an engine in process: the same forms of call as on a server, from many threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import reference_text

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import sglang as sgl
from rapid_sgl.lang import RapidEngine, rapid_options
from rapid_sgl.models import embedded_model_path

@sgl.function
def forms(s, text, question):
    s += sgl.user(text + "\\n\\n" + question)
    with s.assistant():
        with rapid_options(rapid_query=question):
            s += sgl.gen("free", max_tokens=20, temperature=0)
        s += "\\nIn figures: " + sgl.gen("figure", regex="[0-9]{1,3}", max_tokens=8, temperature=0)
        s += "\\nKind:" + sgl.select("kind", [" a manual", " a poem"])

def values(state):
    return [state.error() and str(state.error()), state["free"], state["figure"], state["kind"]]

if __name__ == "__main__":
    engine = sgl.Engine(
        model_path=str(embedded_model_path()), speculative_algorithm="RAPID", log_level="error", max_total_tokens=4000
    )
    text = sys.stdin.read()
    tasks = [{"text": text, "question": q} for q in ("What is it about?", "Which keyword?", "What is a block?")]
    with RapidEngine(engine, rapid_budget=96, rapid_head=16, rapid_recent=48) as backend:
        assert backend.chat_template.name == "chatml"
        drafted = forms.run_batch(tasks, backend=backend, num_threads=3)
        stream = forms.run(**tasks[0], backend=backend, stream=True)
        shown = "".join(stream.text_iter())
        plain = forms.run_batch(tasks, backend=backend.with_options(rapid_drafter="off"), num_threads=3)
        backend.flush_cache()
        states = backend.get_server_info()["internal_states"]
    after = engine.generate("The", {"temperature": 0, "max_new_tokens": 3})["meta_info"]["completion_tokens"]
    report = {
        "drafted": [values(state) for state in drafted],
        "plain": [values(state) for state in plain],
        "stream": values(stream),
        "shown": shown == stream.text() == drafted[0].text(),
        "meta": drafted[0].get_meta_info("free"),
        "steps": states[0]["rapid"],
        "after": after,
    }
    print("REPORT", json.dumps(report, default=str))
    engine.shutdown()
"""


def test_programs_on_an_engine(tmp_path):
    (tmp_path / "forms.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "forms.py"],
        input=reference_text(220),
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    report = json.loads(line.removeprefix("REPORT "))
    assert all(error is None and figure.isdigit() for error, _, figure, _ in report["drafted"])
    assert (
        report["drafted"] == report["plain"] and report["stream"] == report["drafted"][0] and report["shown"]
    )
    assert report["meta"]["spec_accept_length"] > 1 and report["meta"]["rapid_spans"]
    assert report["steps"]["drafted"]["accepted"] > 0 and report["after"] == 3
