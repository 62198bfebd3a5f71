"""An agent with the official OpenAI client: SGLang constrains the calls, RAPID drafts them.

rapid-sgl serve --port 30000 --tool-call-parser hermes &
python examples/openai_tools.py http://localhost:30000 README.md "What does make demo do?"

A small model cannot be trusted to call tools of its own accord: a named `tool_choice`, or "required", makes
SGLang write every call under the tool's schema. The parser has to be one that fits the model; hermes
suits SmolLM2 and Qwen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
from rapid_sgl.programs.tools import Call, Toolbox
from rapid_sgl.programs.tools_builtin import document_tools

from rapid_sgl.cli.asking import load_builder
from rapid_sgl.models import embedded_model_path
from rapid_sgl.retrieval.chunking import tokenize

DRAFTS = {"custom_params": {"rapid_drafter": "view", "rapid_budget": 512, "rapid_recent": 256}}


def main(server: str, document: str, question: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    text = Path(document).read_text()
    toolbox = Toolbox(document_tools(tokenize(text, load_builder(str(embedded_model_path())).tokenizer)))
    messages: list[Any] = [{"role": "user", "content": f"{text}\n\n{question}"}]
    ask: dict[str, Any] = {"model": "default", "temperature": 0, "extra_body": DRAFTS}

    reply = client.chat.completions.create(
        messages=messages,
        tools=[made.openai() for made in toolbox.tools.values()],
        tool_choice={"type": "function", "function": {"name": "search_document"}},
        parallel_tool_calls=False,
        max_tokens=256,  # the longest call that the schema allows
        **ask,
    )
    message = reply.choices[0].message
    messages.append(message)
    for wanted in message.tool_calls or ():
        call = Call(wanted.function.name, json.loads(wanted.function.arguments))
        (observation,) = toolbox.run([call])
        print(f"{call.tool}({call.arguments}):\n{observation.text}\n")
        messages.append({"role": "tool", "tool_call_id": wanted.id, "content": observation.text})

    answer = client.chat.completions.create(messages=messages, max_tokens=64, **ask)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
