"""Serve behind sglang-router: one address, several RAPID servers, requests of one document to the same server.

pip install sglang-router
rapid-sgl serve --port 30001 &
rapid-sgl serve --port 30002 &
python examples/router.py 30000 http://localhost:30001 http://localhost:30002 &
python examples/openai_client.py http://localhost:30000 README.md "What does make demo do?"

The router's cache_aware policy sends a prompt to the server that has most of it in its prefix cache, which is also the
server that holds its draft prompts and its retrieval cache. Rapid options travel in the request, so nothing
else changes.
"""

from __future__ import annotations

import os
import sys


def main(port: str, *servers: str) -> None:
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port]
    policy = ["--policy", "cache_aware", "--cache-threshold", "0.5"]
    os.execv(sys.executable, [*command, "--worker-urls", *servers, *policy])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
