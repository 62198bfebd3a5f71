"""`RapidEndpoint` and servers: addresses, keys, options on the wire."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import sglang as sgl

from rapid_sgl.http_client import ServerError
from rapid_sgl.lang import RapidEndpoint


@sgl.function
def one(s, word):
    s += f"{word} " + sgl.gen("x")


def test_an_address_without_a_server_says_so():
    with pytest.raises(ServerError, match="rapid-sgl serve"):
        RapidEndpoint("http://127.0.0.1:9")


class Guarded(BaseHTTPRequestHandler):
    """The four paths that a program uses, for whoever brings the key."""

    protocol_version = "HTTP/1.1"
    info: ClassVar = {"model_path": "m", "max_req_input_len": 100}
    reply: ClassVar = {"text": "ok", "meta_info": {"completion_tokens": 1, "spec_accept_length": 3.0}}

    def answer(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.headers.get("Authorization") != "Bearer secret":
            return self.write(401, json.dumps({"error": "Unauthorized"}))
        if self.path != "/generate":
            return self.write(200, json.dumps(self.info))
        self.server.options.append(body["sampling_params"].get("custom_params"))
        reply = json.dumps(self.reply)
        return self.write(200, f"data: {reply}\n\ndata: [DONE]\n\n" if body.get("stream") else reply)

    do_GET = do_POST = answer

    def write(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        return


@pytest.fixture
def guarded():
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        server.options = []
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.url = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()


def test_the_key_goes_with_every_request_and_so_do_options(guarded):
    backend = RapidEndpoint(guarded.url, "secret", rapid_head=3)
    for stream in (False, True):
        state = one.run("w", backend=backend, stream=stream)
        assert "".join(state.text_iter()) == "w ok"
        assert state.get_meta_info("x")["spec_accept_length"] == 3.0
    assert guarded.options == [{"rapid_head": 3}] * 2


def test_a_wrong_key_says_so_at_once(guarded):
    with pytest.raises(ServerError, match=r"401.*Unauthorized"):
        RapidEndpoint(guarded.url, "guess")
