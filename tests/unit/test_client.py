"""Server processes of our own and the stream parser, with small real processes and sockets.

What a real SGLang server does with the client is tested end to end in ``tests/e2e``.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rapid_sgl.client import Client, Server, ServerError

# A stand-in that starts in milliseconds: healthy at once, with a child that ignores SIGTERM.
TINY_SERVER = """
import http.server, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        return
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def gone(pid):
    """True once no process has this id, zombies not counted; waits up to ten seconds."""
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as handle:
                state = handle.read().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def child_pid(log_path):
    return int(log_path.read_text().split("child ")[1].split()[0])


def test_stop_ends_the_whole_process_group(tmp_path):
    log = tmp_path / "log"
    with Server.start(log_path=log, command=("-c", TINY_SERVER)) as server:
        assert server.alive and server.client.healthy()
        child = child_pid(log)
        os.kill(child, 0)
    assert not server.alive and gone(child)
    server.stop()  # a second time does nothing


def test_interrupt_stops_the_server(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt), Server.start(log_path=log, command=("-c", TINY_SERVER)) as server:
        raise KeyboardInterrupt
    assert gone(server.process.pid) and gone(child_pid(log))


START_AND_HANG = """
import os, sys, time
from rapid_sgl.client import Server
server = Server.start(log_path=sys.argv[1], command=("-c", sys.argv[2]))
print(server.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel to do it")
def test_server_ends_when_its_parent_is_killed(tmp_path):
    command = [sys.executable, "-c", START_AND_HANG, tmp_path / "log", TINY_SERVER]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    server = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert gone(server)
    os.kill(child_pid(tmp_path / "log"), signal.SIGKILL)  # the stand-in's stubborn child is the test's to end


def test_death_at_start_shows_the_end_of_the_log(tmp_path):
    script = "import sys; print('no such model: x'); sys.exit(3)"
    with pytest.raises(ServerError, match=r"(?s)status 3 before it was ready.*no such model: x"):
        Server.start(log_path=tmp_path / "log", command=("-c", script))


def test_server_that_never_gets_ready_is_stopped(tmp_path):
    script = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    waited = []
    with pytest.raises(ServerError, match="not ready after 1 s"):
        Server.start(log_path=tmp_path / "log", command=("-c", script), timeout_s=1.0, on_wait=waited.append)
    assert waited and gone(int((tmp_path / "log").read_text().split()[1]))


def test_environment_and_arguments_reach_the_server(tmp_path):
    script = "import os, sys; print(os.environ['COLOUR'], sys.argv[1:3]); sys.exit(1)"
    with pytest.raises(ServerError, match=r"(?s)blue \['--flag', '7'\]"):
        Server.start(["--flag", "7"], {"COLOUR": "blue"}, tmp_path / "log", command=("-c", script))


@pytest.fixture
def answering():
    """A function that makes a client of a server which gives every request one fixed answer."""
    servers = []

    def start(body, status=200):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *args):
                return

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return Client(f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def events(*items):
    return b"".join(b"data: %s\n\n" % json.dumps(item).encode() for item in items) + b"data: [DONE]\n\n"


def event(text, tokens, finish=None):
    return {
        "text": text,
        "meta_info": {
            "completion_tokens": tokens,
            "prompt_tokens": 9,
            "cached_tokens": 4,
            "finish_reason": finish,
        },
    }


@pytest.mark.parametrize("incremental", [False, True])
def test_stream_joins_to_the_answer(answering, incremental):
    parts = ["", "Bl", "au.", " 蓝"]
    texts = parts if incremental else ["".join(parts[: index + 1]) for index in range(len(parts))]
    stop = {"type": "stop", "matched": 2}
    stream = events(
        *(event(text, 2 * index + 1, stop if index == 3 else None) for index, text in enumerate(texts))
    )
    seen = []
    done = answering(stream).complete(on_text=seen.append, incremental=incremental, input_ids=[1])
    assert seen == ["Bl", "au.", " 蓝"] and done.text == "Blau. 蓝"
    assert (done.prompt_tokens, done.cached_tokens, done.completion_tokens) == (9, 4, 7)
    assert done.decode_tokens == 6 and done.finish_reason == "stop" and done.accept_length is None


def test_one_event_has_no_decode_speed(answering):
    done = answering(events(event("all", 5))).complete(input_ids=[1])
    assert done.decode_tokens_per_s is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "the value is wrong"}}',
        b'{"error": "the value is wrong"}',
        b'{"object": "error", "message": "the value\\n is wrong", "code": 400}',
        b'{"detail": "the value is wrong"}',
        b"the value is wrong",
    ],
)
def test_every_shape_of_refusal_becomes_one_line(answering, body):
    with pytest.raises(ServerError) as caught:
        answering(body, 400).generate(input_ids=[1])
    assert str(caught.value) == "server answered 400 to /generate: the value is wrong"


def test_errors_inside_a_stream_are_raised(answering):
    refusal = {"error": {"message": "rapid_budget=0 is out of range", "code": 400}}
    with pytest.raises(ServerError, match="refused the request: rapid_budget=0 is out of range"):
        answering(events(refusal)).complete(input_ids=[1])
    abort = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(ServerError, match="aborted the request: too long"):
        answering(events(event("x", 1), event("x", 1, abort))).complete(input_ids=[1])
    with pytest.raises(ServerError, match="without an answer"):
        answering(events()).complete(input_ids=[1])


def test_something_else_than_sglang_is_named(answering):
    with pytest.raises(ServerError, match="did not answer with JSON"):
        answering(b"<html>").info()
    with pytest.raises(ServerError, match="does not report model_path"):
        answering(b"{}").info()
