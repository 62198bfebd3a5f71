"""Tools of an agent: typed Python functions, called by a model and run so that none can end or block it.

    @tool(timeout_s=5)
    def population(city: str, year: int = 2020) -> int:
        "People living in a city."
        ...

    toolbox = Toolbox([population])
    toolbox.schema()                 # JSON schema of one step: a list of calls, for constrained decoding
    toolbox.run(parse_calls(text))   # one Observation per call, whatever happens

Needs no server and no model. Tools run in threads of this process: a tool that must not be trusted
belongs behind a process or a service of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from rapid_sgl.programs.tool_schema import ToolError, arguments_model, bounded, kind_of

DEFAULT_TIMEOUT_S = 30.0
MAX_OUTPUT_CHARS = 2000  # of one observation: about 500 tokens of the context
MAX_ERROR_CHARS = 400
# A thread cannot be killed. A tool with so many calls that outlived their timeout is not started again.
MAX_STUCK_CALLS = 2


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    arguments: type[BaseModel]  # checks and converts the call's arguments
    function: Callable[..., Any]
    timeout_s: float = DEFAULT_TIMEOUT_S

    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments, without references and with every size bounded."""
        return bounded(self.arguments.model_json_schema(), self.name)

    def openai(self) -> dict[str, Any]:
        """The entry of this tool in the ``tools`` of an OpenAI chat completion."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters()}
        return {"type": "function", "function": {**function, "strict": True}}

    def signature(self) -> str:
        """One line for a prompt: ``name(city: string, year: integer = 2020): description``."""
        schema = self.parameters()
        parts = []
        for name, part in schema.get("properties", {}).items():
            default = "" if name in schema.get("required", ()) else f" = {json.dumps(part.get('default'))}"
            parts.append(f"{name}: {kind_of(part)}{default}")
        return f"{self.name}({', '.join(parts)}): {self.description}"


@dataclass(frozen=True)
class Call:
    """What the model asked for."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """What came of a call; ``text`` is what the model is told."""

    call: Call
    text: str
    ok: bool
    seconds: float = field(default=0.0, compare=False)


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Any:
    """Make a ``Tool`` of a typed function; as ``@tool`` or ``@tool(timeout_s=5)``.

    Args:
        name: default: the function's own.
        description: what the model is told; default: the first paragraph of the docstring.
        timeout_s: seconds after which a call is given up.

    Raises:
        ToolError: no types, no description, or a signature that JSON cannot express.
    """
    if function is None:
        return lambda named: tool(named, name=name, description=description, timeout_s=timeout_s)
    label = name or str(getattr(function, "__name__", "tool"))
    text = " ".join((description or (inspect.getdoc(function) or "").split("\n\n")[0]).split())
    if not label.isidentifier():
        raise ToolError(f"tool name {label!r} is not an identifier; give one with @tool(name=...)")
    if not text:
        raise ToolError(f"tool {label}: no description; give it a docstring, it is all the model knows of it")
    if timeout_s <= 0:
        raise ToolError(f"tool {label}: timeout_s={timeout_s} is not positive; use seconds above 0")
    if inspect.iscoroutinefunction(function):
        raise ToolError(f"tool {label}: async functions are not run; wrap it: asyncio.run({label}(...))")
    made = Tool(label, text, arguments_model(label, function), function, timeout_s)
    made.parameters()  # refuses now what a schema cannot bound
    return made


class Toolbox:
    """Tools that are offered together.

    Args:
        tools: one or more, of different names.
        max_output_chars: of one observation; the rest is cut off, and the model is told so.
        max_calls: that one step may carry.
    """

    def __init__(
        self, tools: Sequence[Tool], *, max_output_chars: int = MAX_OUTPUT_CHARS, max_calls: int = 4
    ) -> None:
        self.tools = {made.name: made for made in tools}
        if not tools or len(self.tools) != len(tools):
            names = ", ".join(made.name for made in tools)
            raise ToolError(f"tools ({names}) must be one or more, of different names")
        if max_calls < 1 or max_output_chars < 1:
            raise ToolError(f"max_calls={max_calls}, max_output_chars={max_output_chars}: use 1 or more")
        self.max_calls = max_calls
        self._max_output_chars = max_output_chars
        self._stuck: dict[str, list[Future[tuple[bool, str]]]] = {}

    def schema(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """JSON schema of one step: ``[{"tool": NAME, "arguments": {...}}, ...]``.

        Args:
            names: the tools that may be called; None: all.

        Raises:
            ToolError: an unknown name.
        """
        offered = [self.named(name) for name in (self.tools if names is None else names)]
        return {
            "type": "array",
            "minItems": 1,
            "maxItems": self.max_calls,
            "items": {"anyOf": [_call_schema(made) for made in offered]},
        }

    def named(self, name: str) -> Tool:
        if name not in self.tools:
            raise ToolError(f"there is no tool {name!r}; there are: {', '.join(self.tools)}")
        return self.tools[name]

    def run(self, calls: Sequence[Call]) -> list[Observation]:
        """Run calls side by side, each in a thread of its own; one observation per call, in their order.

        Never raises for what a model or a tool does: an unknown tool, wrong arguments, an exception, a
        timeout and an output that is too long are all told in the observation.
        """
        pending = [self._start(call) for call in calls]
        return [one if isinstance(one, Observation) else self._finish(*one) for one in pending]

    def _start(self, call: Call) -> Observation | tuple[Call, Tool, Future[tuple[bool, str]], float]:
        try:
            made = self.named(call.tool)
            arguments = made.arguments.model_validate(call.arguments)
        except ToolError as error:
            return Observation(call, f"error: {error}", False)
        except ValidationError as error:
            wrong = "; ".join(_complaint(item) for item in error.errors(include_url=False))
            return Observation(call, _cut(f"error: wrong arguments: {wrong}. Use {made.signature()}"), False)
        stuck = self._stuck[made.name] = [one for one in self._stuck.get(made.name, ()) if not one.done()]
        if len(stuck) >= MAX_STUCK_CALLS:
            text = f"error: {made.name} still hangs from {len(stuck)} earlier calls and was not started again"
            return Observation(call, text, False)
        values = {name: getattr(arguments, name) for name in type(arguments).model_fields}
        return call, made, _in_thread(made, values), time.monotonic()

    def _finish(self, call: Call, made: Tool, future: Future[tuple[bool, str]], began: float) -> Observation:
        # Counted from the call's own start: waiting for its neighbours gives no tool more time.
        wait([future], max(0.0, began + made.timeout_s - time.monotonic()))
        seconds = time.monotonic() - began
        if not future.done():
            self._stuck[made.name].append(future)
            text = f"error: {made.name} gave no answer within {made.timeout_s:g} s and was left behind"
            return Observation(call, text, False, seconds)
        ok, text = future.result()
        return Observation(call, self._shortened(text) if ok else _cut(text), ok, seconds)

    def _shortened(self, text: str) -> str:
        room = self._max_output_chars
        if len(text) <= room:
            return text
        return f"{text[:room]}\n[cut off: the first {room:,} of {len(text):,} characters are shown]"


def parse_calls(text: str) -> list[Call]:
    """The calls of one step, from the JSON that the model wrote.

    Raises:
        ToolError: not JSON, or not of the form that ``Toolbox.schema`` describes.
    """
    form = 'a list of calls: [{"tool": NAME, "arguments": {...}}]'
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ToolError(f"the step is not complete JSON ({error}); write {form}") from error
    items = parsed if isinstance(parsed, list) else [parsed]
    calls = []
    for item in items:
        arguments = item.get("arguments", {}) if isinstance(item, dict) else None
        if not isinstance(arguments, dict) or not isinstance(item.get("tool"), str):
            raise ToolError(f"{_cut(json.dumps(item))} is not a call; write {form}")
        calls.append(Call(item["tool"], arguments))
    if not calls:
        raise ToolError(f"the step has no call; write {form}")
    return calls


def _in_thread(made: Tool, values: Mapping[str, Any]) -> Future[tuple[bool, str]]:
    """Start the call; its future gives whether it went well, and what the model is told."""
    # Not ThreadPoolExecutor: the interpreter waits for its threads at exit, and a hung tool would keep it.
    future: Future[tuple[bool, str]] = Future()

    def work() -> None:
        try:
            future.set_result((True, _as_text(made.function(**values))))
        except BaseException as error:  # SystemExit too: a tool must not end its thread without an answer
            told = f"error: {made.name} failed: {type(error).__name__}: {_spoken(error)}"
            future.set_result((False, told))

    threading.Thread(target=work, name=f"tool-{made.name}", daemon=True).start()
    return future


def _call_schema(made: Tool) -> dict[str, Any]:
    properties = {"tool": {"const": made.name}, "arguments": made.parameters()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else None
    if text is None:
        with contextlib.suppress(TypeError, ValueError):
            text = json.dumps(value, ensure_ascii=False)
    return _sendable(str(value) if text is None else text)


def _spoken(error: BaseException) -> str:
    try:
        return _sendable(" ".join(str(error).split())) or "no message"
    except Exception:  # whatever its __str__ trips over, the type's name is told
        return "no message"


def _sendable(text: str) -> str:
    # lone surrogates cannot be sent as UTF-8
    return text.encode("utf-8", "replace").decode("utf-8")


def _complaint(item: Mapping[str, Any]) -> str:
    place = ".".join(map(str, item["loc"])) or "arguments"
    return f"{place}: {item['msg'][:1].lower()}{item['msg'][1:]}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[: MAX_ERROR_CHARS - 1]}…"
