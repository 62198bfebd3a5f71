"""The text of an agent's prompt.

The document comes first, so that all questions and agents share the long prefix; tools, examples and
question follow, and each step adds an assistant's and a user's turn behind them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rapid_sgl.programs.agent_records import Example
from rapid_sgl.programs.tools import Tool

# Stand-ins while the chat template is rendered; private-use characters do not occur in templates.
_TASK, _STEP, _RESULT = "\ue000task\ue000", "\ue000step\ue000", "\ue000result\ue000"
_PLAIN = f"{_TASK}\n\nAssistant: {_STEP}\n\nUser: {_RESULT}\n\nAssistant: "
THOUGHT = "Thought:"  # no space: tokens of words begin with theirs
RESULT = "Result: "


class Frames:
    """What a model's chat template puts around the task, the steps and their results.

    Args:
        tokenizer: a fast Hugging Face tokenizer, with or without a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        text = _PLAIN
        if tokenizer.chat_template is not None:
            messages = [
                {"role": "user", "content": _TASK},
                {"role": "assistant", "content": _STEP},
                {"role": "user", "content": _RESULT},
            ]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if tokenizer.bos_token and tokenizer.bos_token_id in tokenizer("")["input_ids"]:
            text = text.removeprefix(tokenizer.bos_token)  # the server adds it
        self._before, rest = text.split(_TASK)
        _, rest = rest.split(_STEP)
        self._after_step, self._after_result = rest.split(_RESULT)
        self._special = sorted(set(tokenizer.all_special_tokens), key=len, reverse=True)

    def task(self, text: str) -> str:
        """The start of the prompt, up to where the model's first step begins."""
        return f"{self._before}{self.harmless(text)}{self._after_result}"

    def result(self, text: str) -> str:
        """What follows a step: its results, up to where the next step begins."""
        return f"{self._after_step}{self.harmless(text)}{self._after_result}"

    def harmless(self, text: str) -> str:
        """``text`` in which no special token is spelt out: a document must not end the user's turn."""
        for special in self._special:
            text = text.replace(special, f"{special[:1]} {special[1:]}")
        return text


def task_text(
    document: str, question: str, tools: Sequence[Tool], examples: Sequence[Example], thoughts: bool
) -> str:
    """Document, tools, worked examples and question."""
    parts = [
        document,
        "You answer the question below with these tools:",
        "\n".join(made.signature() for made in tools),
        'Reply with a JSON list of calls: [{"tool": NAME, "arguments": {...}}]. Call finish with the answer.',
    ]
    known = {made.name for made in tools}
    # an example with a tool that is not offered would teach calls that cannot be made
    fitting = [example for example in examples if known >= {step.tool for step in example.steps}]
    parts += [f"Example\n{example_text(example, thoughts)}" for example in fitting]
    return "\n\n".join([*parts, f"Question: {question}"])


def example_text(example: Example, thoughts: bool) -> str:
    lines = [f"Question: {example.question}"]
    for step in example.steps:
        call = json.dumps([{"tool": step.tool, "arguments": dict(step.arguments)}], ensure_ascii=False)
        lines += [f"{THOUGHT} {step.thought}"] if thoughts else []
        lines += [call, *([f"{RESULT}{step.result}"] if step.result else [])]
    return "\n".join(lines)
