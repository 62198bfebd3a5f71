"""Stream an answer about a long document from a running server with the official OpenAI client.

rapid-sgl serve --port 30000 &
python examples/openai_client.py http://localhost:30000 README.md "What does make demo do?"
"""

from __future__ import annotations

import sys
from pathlib import Path

import openai


def main(server: str, document: str, question: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": f"{Path(document).read_text()}\n\n{question}"}],
        max_tokens=64,
        temperature=0,
        extra_body={"custom_params": {"rapid_drafter": "view", "rapid_budget": 512, "rapid_recent": 256}},
        stream=True,
    )
    for event in stream:
        print(event.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
