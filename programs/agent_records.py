"""What an agent is given and what it leaves behind: options, worked examples, transcript, result."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rapid_sgl.programs.tools import MAX_OUTPUT_CHARS, Call, Observation

FINISH = "finish"  # the tool that ends an agent
FINISHED = "finished"
OUT_OF_STEPS = "out of steps"
OUT_OF_TOKENS = "out of tokens"
CONTEXT_FULL = "context full"
EXPLAINED = {
    FINISHED: "the agent gave an answer",
    OUT_OF_STEPS: "max_steps steps were taken without an answer",
    OUT_OF_TOKENS: "max_new_tokens tokens were generated without an answer",
    CONTEXT_FULL: "prompt and next step no longer fit into the model's context or the server's KV pool",
}


@dataclass(frozen=True)
class Step:
    """One step of a worked example."""

    thought: str
    tool: str
    arguments: Mapping[str, Any]
    result: str = ""  # of ``finish``: none


@dataclass(frozen=True)
class Example:
    """A worked example for the prompt. Small models follow the form of two far better than any instruction."""

    question: str
    steps: Sequence[Step]


def _stock_example(place: str, thing: str, crates: int, each: int, before: str, after: str = "") -> Example:
    # what surrounds the fact shows that a passage has more in it than the answer
    found = f"{before}{place} stores crates = {crates}, {thing} in each = {each}.{after}"
    question, product = f"How many {thing} does {place} store?", str(crates * each)
    return Example(
        question,
        (
            Step("I look the question up.", "search_document", {"query": question}, found),
            Step("I calculate.", "calculator", {"expression": f"{crates} * {each}"}, product),
            Step("I know the answer.", FINISH, {"answer": product}),
        ),
    )


# Numbers differ in every place, so that copying one from an example is never what continues the pattern.
BUILTIN_EXAMPLES = (
    _stock_example("Oak library", "pages", 15, 120, "[410:440] It opens at 8. ", " 4. The"),
    _stock_example("Elm theatre", "seats", 31, 18, "[73:101] ", " 1. The play"),
    _stock_example("Fir park", "trees", 77, 46, "[612:655] It is closed on day 3. "),
)


@dataclass(frozen=True)
class AgentOptions:
    """Limits and habits of an agent.

    Raises:
        ValueError: a limit that leaves no room for a step.
    """

    max_steps: int = 8
    max_new_tokens: int = 1024  # of all steps together
    step_tokens: int = 160  # of one list of calls
    thought_tokens: int = 32  # of the thought before it; 0: no thoughts
    # Tools of the first steps, one per step, ``finish`` included; then the model chooses. Small models need it.
    plan: tuple[str, ...] = ()
    examples: tuple[Example, ...] = BUILTIN_EXAMPLES
    max_calls: int = 4  # side by side in one step
    max_output_chars: int = MAX_OUTPUT_CHARS  # of one observation
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if min(self.max_steps, self.max_new_tokens) < 1 or self.step_tokens < MIN_STEP_TOKENS:
            raise ValueError(
                f"max_steps={self.max_steps}, max_new_tokens={self.max_new_tokens}, step_tokens={self.step_tokens} "
                f"leave no room for a step; use 1 or more, and step_tokens of {MIN_STEP_TOKENS} or more"
            )
        if self.thought_tokens < 0 or self.temperature < 0:
            raise ValueError(
                f"thought_tokens={self.thought_tokens} and temperature={self.temperature:g} must not be negative"
            )


# The shortest call, {"tool": "finish", "arguments": {"answer": "x"}} in a list, takes about 20 tokens.
MIN_STEP_TOKENS = 24


@dataclass(frozen=True)
class Thought:
    """Free text before the calls of a step."""

    text: str


@dataclass(frozen=True)
class Unreadable:
    """A step that was no list of calls; ``text`` is what the model was told about it."""

    output: str
    text: str


Record: TypeAlias = Thought | Call | Observation | Unreadable


@dataclass(frozen=True)
class Turn:
    """What the server reports of one generation."""

    kind: str  # thought or calls
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in SGLang's radix cache
    completion_tokens: int
    accept_length: float | None  # tokens committed per target pass; None without speculation
    spans: tuple[tuple[int, int], ...]  # token ranges of the prompt that the drafter looked at


@dataclass(frozen=True)
class AgentResult:
    """How an agent ended. ``answer`` is None unless ``status`` is ``finished``."""

    status: str
    answer: str | None
    transcript: tuple[Record, ...]
    turns: tuple[Turn, ...]

    @property
    def completion_tokens(self) -> int:
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Sum over the turns; without a prefix cache each of these would have been prefilled."""
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def cached_tokens(self) -> int:
        return sum(turn.cached_tokens for turn in self.turns)

    @property
    def explanation(self) -> str:
        return EXPLAINED[self.status]

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values; each transcript entry has a ``kind``."""
        return {
            "status": self.status,
            "explanation": self.explanation,
            "answer": self.answer,
            "transcript": [
                {"kind": type(record).__name__.lower(), **dataclasses.asdict(record)}
                for record in self.transcript
            ],
            "turns": [dataclasses.asdict(turn) for turn in self.turns],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def lines(self) -> list[str]:
        """The transcript for people, then one line per turn."""
        return [*map(_line, self.transcript), *self.turn_lines()]

    def turn_lines(self) -> list[str]:
        lines = [f"{'turn':>4}  {'kind':<7}  {'prompt':>6}  {'cached':>6}  {'new':>4}  accept length"]
        for index, turn in enumerate(self.turns, 1):
            accept = "-" if turn.accept_length is None else f"{turn.accept_length:.2f}"
            lines.append(
                f"{index:>4}  {turn.kind:<7}  {turn.prompt_tokens:>6}  {turn.cached_tokens:>6}  "
                f"{turn.completion_tokens:>4}  {accept}"
            )
        share = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0
        lines.append(f"{share:.0%} of {self.prompt_tokens:,} prompt tokens came from the prefix cache")
        return lines


def _line(record: Record) -> str:
    if isinstance(record, Thought):
        return f"thought: {record.text}"
    if isinstance(record, Call):
        return f"call: {record.tool}({json.dumps(dict(record.arguments), ensure_ascii=False)})"
    return f"-> {record.text}"
