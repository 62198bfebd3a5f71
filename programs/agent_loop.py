"""The agent as a program of SGLang's language: thought, schema-constrained calls, observation, and again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sglang as sgl
from rapid_sgl.programs.agent_prompt import RESULT, THOUGHT, Frames, task_text
from rapid_sgl.programs.agent_records import (
    CONTEXT_FULL,
    FINISH,
    FINISHED,
    MIN_STEP_TOKENS,
    OUT_OF_STEPS,
    OUT_OF_TOKENS,
    AgentOptions,
    AgentResult,
    Record,
    Thought,
    Turn,
    Unreadable,
)
from rapid_sgl.programs.common import check
from rapid_sgl.programs.tools import Toolbox, ToolError, parse_calls

from rapid_sgl.lang import RapidBackend, RapidEndpoint, rapid_options
from rapid_sgl.request import SPANS_KEY


@dataclass(frozen=True)
class World:
    """What an agent works with, apart from the question."""

    document: str
    toolbox: Toolbox  # ``finish`` included
    options: AgentOptions
    frames: Frames
    backend: RapidBackend


@sgl.function
def agent_program(s: Any, question: str, world: World) -> AgentResult:
    """The loop. Its ``AgentResult`` is the program's return value (``state.ret_value``)."""
    run = _Run(s, question, world)
    options, toolbox = world.options, world.toolbox
    tools = list(toolbox.tools.values())
    thoughts = options.thought_tokens > 0
    s += world.frames.task(task_text(world.document, question, tools, options.examples, thoughts))
    for step in range(options.max_steps):
        room = run.room()
        if isinstance(room, str):
            return run.result(room)
        if thoughts and room > options.thought_tokens + MIN_STEP_TOKENS:
            s += THOUGHT
            thought = run.generate("thought", max_tokens=options.thought_tokens, stop="\n")
            run.transcript.append(Thought(thought.strip()))
            s += "\n"
            room -= run.turns[-1].completion_tokens
        names = [options.plan[step]] if step < len(options.plan) else None
        schema = json.dumps(toolbox.schema(names))
        text = run.generate("calls", max_tokens=min(room, options.step_tokens), json_schema=schema)
        answer, told = run.act(text)
        if answer is not None:
            return run.result(FINISHED, answer)
        s += world.frames.result(f"{RESULT}{told}")
    return run.result(OUT_OF_STEPS)


class _Run:
    """One agent under way."""

    def __init__(self, s: Any, question: str, world: World) -> None:
        self._s = s
        self._world = world
        self._question = question
        self._max_prompt_tokens = max_prompt_tokens(world.backend)
        self._query = question  # what spans are chosen by: the question and the last calls' arguments
        self.transcript: list[Record] = []
        self.turns: list[Turn] = []

    def room(self) -> int | str:
        """Tokens that the next step may generate, or the status that ends the agent."""
        left = self._world.options.max_new_tokens - sum(turn.completion_tokens for turn in self.turns)
        if left < MIN_STEP_TOKENS:
            return OUT_OF_TOKENS
        # one more for the line break behind a thought
        used = len(self._world.backend.passages.tokenizer(self._s.text(), verbose=False)["input_ids"])
        fits = self._max_prompt_tokens - used - 1
        return CONTEXT_FULL if fits < MIN_STEP_TOKENS else min(left, fits)

    def generate(self, kind: str, **params: Any) -> str:
        """One generation, drafted from spans that are chosen for this turn.

        Raises:
            ServerError: the server refused the request or is gone.
        """
        name = f"{kind}_{len(self.turns)}"
        with rapid_options(rapid_query=self._query):
            self._s += sgl.gen(name, temperature=self._world.options.temperature, **params)
        check(self._s)
        meta = self._s.get_meta_info(name)
        flat = meta.get(SPANS_KEY, ())
        self.turns.append(
            Turn(
                kind,
                int(meta["prompt_tokens"]),
                int(meta.get("cached_tokens", 0)),
                int(meta["completion_tokens"]),
                meta.get("spec_accept_length"),
                tuple(zip(flat[::2], flat[1::2], strict=True)),
            )
        )
        return self._s[name]

    def act(self, text: str) -> tuple[str | None, str]:
        """Run the calls of a step.

        Returns:
            The answer, if the agent finished, and what the model is told otherwise.
        """
        try:
            calls = parse_calls(text)
        except ToolError as error:
            self.transcript.append(Unreadable(text, f"error: {error}"))
            return None, f"error: {error}"
        self.transcript += calls
        observations = self._world.toolbox.run(calls)
        self.transcript += observations
        arguments = (str(value) for call in calls for value in call.arguments.values())
        self._query = " ".join([self._question, *arguments])
        for one in observations:
            if one.call.tool == FINISH and one.ok:
                return one.text, ""
        return None, "\n".join(one.text for one in observations)

    def result(self, status: str, answer: str | None = None) -> AgentResult:
        return AgentResult(status, answer, tuple(self.transcript), tuple(self.turns))


def max_prompt_tokens(backend: RapidBackend) -> int:
    """Tokens that prompt and answer may have together: the model's context, or the KV pool if that is less."""
    if isinstance(backend, RapidEndpoint):
        return backend.info.max_prompt_tokens(0)
    return backend.engine.tokenizer_manager.max_req_input_len - 1
