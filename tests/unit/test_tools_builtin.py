"""The tools that come with the agent: a calculator without eval, and reading a document."""

from __future__ import annotations

import pytest
from rapid_sgl.programs.tools import Call, Observation, Toolbox
from rapid_sgl.programs.tools_builtin import CalculatorError, calculator, document_tools, evaluate

from rapid_sgl.cli.asking import load_builder
from rapid_sgl.models import embedded_model_path
from rapid_sgl.retrieval.chunking import tokenize


def run_one(made, **arguments) -> Observation:
    (observation,) = Toolbox([made]).run([Call(made.name, arguments)])
    return observation


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("214 * 36", "7704"),
        (" 2 ** 10 - (3 + 4) % 5", "1022"),
        ("7 // 2 + 7 / 2", "6.5"),
        ("-3 ** 2", "-9"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** -1", "0.5"),
        ("1e3", "1000"),
    ],
)
def test_calculator(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("2 ** 1000 * 2 ** 1000", "too large"),
        ("10.0 ** 400", "too large"),
        ("1e999", "finite"),
        ("(-8) ** 0.5", "finite real"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("x + 1", "'x' is not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("'a' * 9", "not arithmetic"),
        ("1,000 + 1", "1000 for 1,000"),
        ("1 +", "not an expression"),
        ("", "not an expression"),
        ("(" * 300, "300 characters"),
    ],
)
def test_calculator_refuses(expression, complaint):
    with pytest.raises(CalculatorError, match=complaint):
        evaluate(expression)


def test_calculator_division_by_zero_is_told():
    assert (
        run_one(calculator, expression="1 / 0").text
        == "error: calculator failed: ZeroDivisionError: division by zero"
    )


def test_document_tools():
    tokenizer = load_builder(str(embedded_model_path())).tokenizer
    filler = [
        f"Paragraph {number} speaks of the weather in the year {1800 + number}." for number in range(60)
    ]
    filler[41] = "The lighthouse keeper hid the brass key under the third stair."
    document = tokenize("\n\n".join(filler), tokenizer)
    search, read = document_tools(document, passages=1, chunk_tokens=64)
    found = run_one(search, query="Where is the brass key of the lighthouse keeper?")
    assert found.ok and "under the third stair" in found.text
    start, end = map(int, found.text[1 : found.text.index("]")].split(":"))
    assert 0 < end - start <= 64
    assert run_one(read, start=start, end=end).text == found.text
    assert "under the third stair" in document.slice(start, end)
    assert "no passage matches" in run_one(search, query="zebra").text
    length = len(document.ids)
    assert "less than or equal to" in run_one(read, start=0, end=length + 1).text
    assert "must be above start" in run_one(read, start=9, end=9).text
    assert "too many at once" in run_one(read, start=0, end=length).text
