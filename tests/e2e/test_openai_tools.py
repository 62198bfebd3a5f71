"""Tool calls by the OpenAI API: constrained calls with drafting on, and the example script."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from conftest import rapid_stats
from rapid_sgl.programs.tools import Call, Toolbox
from rapid_sgl.programs.tools_builtin import calculator
from test_examples import run

TOOLS = [calculator.openai()]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calculator"}}])
def test_constrained_calls_are_the_same_with_and_without_drafts(rapid_server, choice):
    client = openai.OpenAI(base_url=f"{rapid_server.url}/v1", api_key="none")
    filler = "The crates are counted once a year. " * 40
    messages: list[Any] = [
        {"role": "user", "content": f"{filler}\nWhat is 12 * 34? Call calculator with 12 * 34."}
    ]

    def call(drafter: str) -> tuple[str, str, str]:
        reply: Any = client.chat.completions.create(
            model="default",
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=160,
            extra_body={"custom_params": {"rapid_drafter": drafter, "rapid_budget": 128, "rapid_recent": 64}},
        )
        (found,) = reply.choices[0].message.tool_calls
        return found.function.name, found.function.arguments, reply.choices[0].finish_reason

    before = rapid_stats(rapid_server)["drafted"]["accepted"]
    drafted = call("view")
    assert rapid_stats(rapid_server)["drafted"]["accepted"] > before
    assert drafted == call("off")
    name, arguments, reason = drafted
    assert (name, reason) == ("calculator", "tool_calls") and isinstance(
        json.loads(arguments)["expression"], str
    )
    (observation,) = Toolbox([calculator]).run([Call(name, json.loads(arguments))])
    assert observation.text


def test_example(rapid_server):
    shown = run("openai_tools.py", rapid_server.url, "README.md", "What does make demo do?")
    assert shown.startswith("search_document({'query': ") and len(shown.split("\n\n")[-1].strip()) > 0
