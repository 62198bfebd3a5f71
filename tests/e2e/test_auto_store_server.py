"""A server that keeps its vectors in a Chroma server, which is killed under a request, and that minds recall."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from conftest import chat_ids, generate, serve
from test_auto_server import PROMPT, QUESTION, covers_needle, haystack

from rapid_sgl.client import free_port

BIN = Path(sys.executable).parent
MEASURED = 4000  # tokens that the recall report speaks for


class Chroma:
    """A Chroma server in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [BIN / "chroma", "run", "--path", self.folder, "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                assert requests.get(f"{self.url}/api/v2/heartbeat", timeout=60).ok
                return
            except requests.ConnectionError:
                assert self.process.poll() is None, "the Chroma server ended"
                time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def chroma(tmp_path_factory):
    server = Chroma(tmp_path_factory.mktemp("chroma"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def store_server(chroma, tmp_path_factory):
    report = tmp_path_factory.mktemp("recall") / "recall.json"
    options = ["--scorers=hybrid", f"--contexts={MEASURED}", "--documents=1", "--budget=448"]
    subprocess.run(
        [BIN / "rapid-sgl", "recall", *options, "--save", report], check=True, stdout=subprocess.DEVNULL
    )
    yield from serve(
        tmp_path_factory.mktemp("auto-store"),
        "--rapid-auto-spans=hybrid",
        f"--rapid-store={chroma.url}",
        "--rapid-auto-deadline=120",
        "--rapid-min-recall=0.7",
        f"--rapid-recall-report={report}",
        "--max-total-tokens=12000",
    )


def info(server, ids):
    return generate(server, ids, 8)["meta_info"]


def test_spans_and_the_bound_on_recall(store_server):
    found = info(store_server, PROMPT)
    assert found["rapid_spans_source"] == "auto" and found["rapid_reason"] == "requested"
    assert covers_needle(PROMPT, found["rapid_auto_spans"])
    longer = info(store_server, chat_ids(haystack(MEASURED + 200), QUESTION))
    assert (longer["rapid_spans_source"], longer["rapid_auto_missed"]) == ("none", "unmeasured")
    assert (longer["rapid_drafter"], longer["rapid_reason"]) == ("view", "requested, unmeasured")


def test_a_killed_store_costs_spans_but_no_answer(store_server, chroma):
    fresh = [chat_ids(f"Document {number}.\n\n{haystack(2200)}", QUESTION) for number in range(3)]
    chroma.process.send_signal(
        signal.SIGSTOP
    )  # so that the request is waiting for the store when it is killed
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(info, store_server, fresh[0])
        time.sleep(1)
        assert not answer.done()
        chroma.kill()
        lost = answer.result()
    assert (lost["rapid_spans_source"], lost["rapid_auto_missed"]) == ("none", "store")
    assert lost["completion_tokens"] == 8 and lost["rapid_drafter"] == "view"
    assert info(store_server, fresh[1])["rapid_auto_missed"] == "store"
    chroma.start()
    while (back := info(store_server, fresh[2])).get("rapid_auto_missed") == "store":
        time.sleep(0.5)
    assert covers_needle(fresh[2], back["rapid_auto_spans"])
    log = store_server.log_path.read_text(errors="replace")
    assert log.count("without spans until it answers") == log.count("the store answers again") == 1
