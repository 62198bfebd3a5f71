"""A server process of our own, and the client that talks to it.

Used by ``rapid-sgl ask``, ``rapid-sgl bench`` and the end-to-end tests, so all of them
start, watch and stop a server the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from rapid_sgl.http_client import Chunk, Client, Completion, ServerError, ServerInfo

__all__ = ["Chunk", "Client", "Completion", "Server", "ServerError", "ServerInfo", "free_port"]

# SGLang drains running requests on SIGTERM; after this long its process group is killed.
STOP_GRACE_S = 20.0
LOG_TAIL_LINES = 25
PORTS = range(20000, 30000)
# After a crash SGLang waits a minute for CUDA core dumps; whoever waits for the start wants to know now.
NO_COREDUMP_WAIT = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0"}
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class Server:
    """A server process of our own, in its own process group; use as a context manager.

    ``stop`` ends the whole group, so scheduler and detokenizer processes never outlive it.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_path: Path, log: IO[bytes]) -> None:
        self.process = process
        self.port = port
        self.log_path = log_path
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        self.client = Client(self.url)

    @classmethod
    def start(
        cls,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: str | os.PathLike[str] = os.devnull,
        *,
        timeout_s: float = 900.0,
        on_wait: Callable[[float], None] | None = None,
        command: Sequence[str] = ("-m", "rapid_sgl.cli", "serve"),
    ) -> Server:
        """Start ``rapid-sgl serve`` on a free port and return once it answers.

        On Linux the server also ends when the calling thread does, even by ``kill -9``.

        Args:
            args: flags of ``rapid-sgl serve``, without ``--port`` and ``--host``.
            env: environment variables on top of this process's own.
            log_path: file that takes stdout and stderr of the server.
            timeout_s: seconds to wait for the first healthy answer.
            on_wait: called about every half second with the seconds waited so far.
            command: the interpreter's arguments before ``args``; for example
                ``("-m", "sglang.launch_server")``.

        Raises:
            ServerError: the server died (with the end of its log) or was not ready in time.
        """
        port = free_port()
        path = Path(log_path)
        log = path.open("wb")
        process = subprocess.Popen(
            [sys.executable, *command, *args, "--host", "127.0.0.1", "--port", str(port)],
            env={**NO_COREDUMP_WAIT, **os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        server = cls(process, port, path, log)
        try:
            server._wait_ready(timeout_s, on_wait)
        except BaseException:
            server.stop()
            raise
        return server

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """End the server and every process of its group; safe to call twice."""
        try:
            if self.alive:
                self.process.terminate()  # the parent alone: it shuts its children down in order
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_GRACE_S)
        finally:  # also when a second Ctrl-C ends the wait
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._log.close()

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the server's log."""
        if not self.log_path.is_file():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _wait_ready(self, timeout_s: float, on_wait: Callable[[float], None] | None) -> None:
        began = time.monotonic()
        while not self.client.healthy():
            waited = time.monotonic() - began
            if not self.alive:
                raise ServerError(
                    f"the server ended with status {self.process.returncode} before it was ready; "
                    f"its last lines:\n{self.log_tail()}"
                )
            if waited > timeout_s:
                raise ServerError(
                    f"the server was not ready after {timeout_s:.0f} s; its last lines:\n{self.log_tail()}"
                )
            if on_wait:
                on_wait(waited)
            time.sleep(0.5)


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on right now.

    Below the range from which the kernel takes ports of outgoing connections: one of those
    could claim the port during the half minute that a server takes to start.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"no free port between {PORTS.start} and {PORTS.stop}; stop some servers")


def _end_with_parent() -> None:
    """In the child, before exec: ask Linux to terminate it when its parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
