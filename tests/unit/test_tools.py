"""Tools of an agent: what a function must be, what calls give back, and that nothing they do ends the caller."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from rapid_sgl.programs.tool_schema import ToolError
from rapid_sgl.programs.tools import Call, Observation, Toolbox, parse_calls, tool
from rapid_sgl.programs.tools_builtin import calculator


class Size(BaseModel):
    width: int
    unit: Literal["mm", "cm"] = "mm"


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Tree(BaseModel):
    children: list[Tree]


@tool(timeout_s=5)
def paint(name: str, size: Size, colours: list[Colour], coats: int = 2, note: str | None = None) -> str:
    """Paint a thing.

    Not told to the model.
    """
    return f"{name} {size.width}{size.unit} {[colour.value for colour in colours]} {coats} {note}"


def run_one(made, **arguments) -> Observation:
    (observation,) = Toolbox([made]).run([Call(made.name, arguments)])
    return observation


def test_typed_function_becomes_a_tool():
    assert (paint.name, paint.description, paint.timeout_s) == ("paint", "Paint a thing.", 5)
    observation = run_one(paint, name="door", size={"width": 3}, colours=["red", "blue"], coats="4")
    assert observation.ok and observation.text == "door 3mm ['red', 'blue'] 4 None"
    assert paint.signature().startswith("paint(name: string, size: object, colours: list of")
    assert "coats: integer = 2, note: string | null = null): Paint a thing." in paint.signature()


def grammar(schema: dict[str, Any]) -> Callable[[Any], bool]:
    """Whether a value may be written under ``schema``, by the library that constrains SGLang's output."""
    import xgrammar

    end = 128  # a vocabulary of ASCII characters and one end of text
    vocabulary = xgrammar.TokenizerInfo([chr(code) for code in range(end)] + ["</s>"], stop_token_ids=[end])
    compiled = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(json.dumps(schema))

    def takes(value: Any) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_string(json.dumps(value)) and matcher.accept_token(end)

    return takes


def test_a_step_under_the_schema_is_a_list_of_calls():
    schema = Toolbox([paint, calculator], max_calls=2).schema()
    takes = grammar(schema)
    sum_of_two: dict[str, Any] = {"tool": "calculator", "arguments": {"expression": "1 + 1"}}
    door: dict[str, Any] = {
        "tool": "paint",
        "arguments": {"name": "door", "size": {"width": 3}, "colours": ["red"]},
    }
    for steps, taken in [
        ([sum_of_two], True),
        ([door, sum_of_two], True),
        ([], False),
        ([sum_of_two] * 3, False),
        ([{"tool": "eval", "arguments": {}}], False),
        ([{"tool": "calculator", "arguments": {}}], False),
        ([{"tool": "calculator", "arguments": {"expression": "1", "more": 2}}], False),
        ([{"tool": "calculator", "arguments": {"expression": "1" * 201}}], False),
        ([{**door, "arguments": {**door["arguments"], "name": "d" * 201}}], False),
        ([{**door, "arguments": {**door["arguments"], "coats": 10**12}}], False),
        ([{**door, "arguments": {**door["arguments"], "colours": ["red"] * 9}}], False),
        ([{**door, "arguments": {**door["arguments"], "colours": ["green"]}}], False),
    ]:
        assert takes(steps) == taken, steps
    only = grammar(Toolbox([paint, calculator]).schema(["calculator"]))
    assert only([sum_of_two]) and not only([door])
    assert "$ref" not in json.dumps(schema)


def no_type(word):
    """Say."""


def many(*words: str):
    """Say."""


def keywords(**words: str):
    """Say."""


def undescribed(word: str): ...


def anything(word: Any):
    """Say."""


def any_keys(words: dict[str, int]):
    """Say."""


def recursive(tree: Tree):
    """Say."""


def not_json(lock: threading.Thread):
    """Say."""


async def later(word: str):
    """Say."""


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (no_type, "word has no type"),
        (many, "words is variadic positional"),
        (keywords, "words is variadic keyword"),
        (undescribed, "no description"),
        (anything, "any type"),
        (any_keys, "any keys"),
        (recursive, "Tree contains itself"),
        (not_json, "JSON cannot express"),
        (later, "asyncio.run"),
        (lambda word: word, "not an identifier"),
    ],
)
def test_unsupported_functions_are_refused(function, complaint):
    with pytest.raises(ToolError, match=complaint):
        tool(function)


def test_tools_that_do_not_fit_together_are_refused():
    with pytest.raises(ToolError, match="different names"):
        Toolbox([calculator, calculator])
    with pytest.raises(ToolError, match="one or more"):
        Toolbox([])
    with pytest.raises(ToolError, match="there are: calculator"):
        Toolbox([calculator]).schema(["search"])


@tool
def fail(how: str) -> Any:
    """Fail."""
    if how == "exit":
        sys.exit(3)
    if how == "mute":
        raise Mute
    if how == "surrogate":
        return "\ud800"
    raise KeyError(how)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("cannot even say so")


def test_a_tool_that_raises_is_told():
    assert run_one(fail, how="x").text == "error: fail failed: KeyError: 'x'"
    assert run_one(fail, how="exit").text == "error: fail failed: SystemExit: 3"
    assert run_one(fail, how="mute").text == "error: fail failed: Mute: no message"
    assert not run_one(fail, how="x").ok
    assert run_one(fail, how="surrogate").text == "?"


def test_wrong_arguments_and_unknown_tools_are_told():
    missing = run_one(calculator)
    assert not missing.ok and "expression: field required" in missing.text
    assert "calculator(expression: string)" in missing.text
    extra = run_one(calculator, expression="1", more=2)
    assert not extra.ok and "more: extra inputs are not permitted" in extra.text
    nested = run_one(paint, name="door", size={"width": "wide"}, colours=[])
    assert not nested.ok and "size.width: input should be a valid integer" in nested.text
    (unknown,) = Toolbox([calculator]).run([Call("eval", {})])
    assert not unknown.ok and "there is no tool 'eval'; there are: calculator" in unknown.text


def test_long_output_is_cut_and_says_so():
    @tool
    def flood() -> str:
        """Say a lot."""
        return "é" * 1_000_000

    (observation,) = Toolbox([flood], max_output_chars=1000).run([Call("flood", {})])
    assert observation.ok and len(observation.text) < 1100
    assert observation.text.endswith("[cut off: the first 1,000 of 1,000,000 characters are shown]")


def test_a_hanging_tool_is_left_behind_and_not_started_without_end():
    gate, begun = threading.Event(), []

    @tool(timeout_s=0.05)
    def hang() -> str:
        """Wait."""
        begun.append(1)
        gate.wait()
        return "done"

    toolbox = Toolbox([hang, calculator])
    call, sum_of_two = Call("hang", {}), Call("calculator", {"expression": "1+1"})
    for _ in range(2):
        hung, added = toolbox.run([call, sum_of_two])
        assert not hung.ok and "no answer within 0.05 s" in hung.text
        assert added.ok and added.text == "2"
    (refused,) = toolbox.run([call])
    assert "not started again" in refused.text and len(begun) == 2
    gate.set()
    while any(not future.done() for future in toolbox._stuck["hang"]):
        time.sleep(0.01)
    (again,) = toolbox.run([call])
    assert again.ok and again.text == "done"


def test_a_hanging_tool_does_not_keep_the_interpreter():
    script = (
        "import threading\n"
        "from rapid_sgl.programs.tools import Call, Toolbox, tool\n"
        "hang = tool(lambda: threading.Event().wait(), name='hang', description='Wait.', timeout_s=0.05)\n"
        "print(Toolbox([hang]).run([Call('hang', {})])[0].text)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "no answer within" in done.stdout


def test_calls_of_one_step_run_side_by_side():
    meeting = threading.Barrier(3)  # passes only when three calls are in it at once

    @tool(timeout_s=60)
    def meet(name: str) -> str:
        """Meet the others."""
        meeting.wait()
        return name

    names = ["a", "b", "c"]
    observations = Toolbox([meet]).run([Call("meet", {"name": name}) for name in names])
    assert [one.text for one in observations] == names


def test_parse_calls():
    text = '[{"tool": "calculator", "arguments": {"expression": "1"}}, {"tool": "hang"}]'
    assert parse_calls(text) == [Call("calculator", {"expression": "1"}), Call("hang", {})]
    for wrong, complaint in [
        ('[{"tool": "calc', "not complete JSON"),
        ("[]", "no call"),
        ("[3]", "3 is not a call"),
        ('[{"tool": 3}]', "is not a call"),
        ('[{"tool": "x", "arguments": [1]}]', "is not a call"),
    ]:
        with pytest.raises(ToolError, match=complaint):
            parse_calls(wrong)
