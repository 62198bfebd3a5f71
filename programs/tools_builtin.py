"""Built-in tools: look something up in a document, read a part of it, calculate."""

# Annotations are evaluated here, not postponed: those of read_span name a local bound.

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field
from rapid_sgl.programs.tools import Tool, tool

from rapid_sgl.retrieval.chunking import TokenizedText, chunk
from rapid_sgl.retrieval.scorers import Bm25Scorer, Scorer

# Half of what spans are made of: what is found is read by the model, word by word.
PASSAGE_TOKENS = 64
# A passage of a chunk or two; what an observation of 2,000 characters holds anyway.
MAX_READ_TOKENS = 400
MAX_EXPRESSION_CHARS = 200
# Bits of the largest whole number; about 300 digits, as far as a float reaches.
MAX_BITS = 1024
Number = int | float

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class CalculatorError(ValueError):
    """An expression that is not plain arithmetic, or too large; the text says which part of it."""


def document_tools(
    document: TokenizedText,
    *,
    scorer: Scorer | None = None,
    passages: int = 2,
    chunk_tokens: int = PASSAGE_TOKENS,
) -> list[Tool]:
    """``search_document`` and ``read_span`` over one document. Positions are its tokens, from 0.

    Args:
        scorer: what finds passages; None: words alone (BM25).
        passages: that a search returns at most, the best first, of ``chunk_tokens`` tokens each.
    """
    pieces = chunk(document, size=chunk_tokens)
    finder = scorer or Bm25Scorer()
    length = len(document.ids)

    @tool
    def search_document(query: str) -> str:
        """Find the passages of the document that match a query of a few words."""
        scores = finder.scores([piece.text for piece in pieces], query)
        best = sorted(range(len(pieces)), key=lambda index: (-scores[index], index))[:passages]
        found = [pieces[index] for index in best if scores[index] > 0]
        if not found:
            return f"no passage matches {query!r}; search for other words"
        return "\n".join(_passage(document, piece.start, piece.end) for piece in found)

    @tool
    def read_span(
        start: Annotated[int, Field(ge=0, le=length)], end: Annotated[int, Field(ge=0, le=length)]
    ) -> str:
        """Read the document from token start to token end."""
        if end <= start:
            raise ValueError(f"end {end} must be above start {start}")
        if end - start > MAX_READ_TOKENS:
            raise ValueError(f"{end - start} tokens are too many at once; read up to {MAX_READ_TOKENS}")
        return _passage(document, start, min(end, length))

    return [search_document, read_span]


@tool
def calculator(expression: Annotated[str, Field(max_length=MAX_EXPRESSION_CHARS)]) -> str:
    """Calculate an arithmetic expression with + - * / // % ** and brackets."""
    return evaluate(expression)


def evaluate(expression: str) -> str:
    """The value of an arithmetic expression, without ``eval``.

    Raises:
        CalculatorError: anything but numbers, brackets and operators, a result of more than ``MAX_BITS``
            bits, or one that is not a finite real number.
        ZeroDivisionError: as in Python.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:  # deep nesting could exhaust the parser's stack
        raise CalculatorError(f"{len(expression)} characters are too many; use {MAX_EXPRESSION_CHARS}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise CalculatorError(f"{expression!r} is not an expression; write one like 12 * (3 + 4)") from error
    except OverflowError as error:
        raise CalculatorError(f"the result of {expression!r} is too large") from error
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _checked(_power(left, right))
        if type(node.op) in _BINARY:
            return _checked(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Tuple):
        raise CalculatorError("commas are not read; write 1000 for 1,000")
    raise CalculatorError(f"{ast.unparse(node)!r} is not arithmetic; use numbers, brackets, + - * / // % **")


def _power(base: Number, exponent: Number) -> Number:
    # Checked beforehand: 9**9**9 would take all memory before its size could be seen.
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise CalculatorError(f"{base} ** {exponent} is too large; stay below 2 ** {MAX_BITS}")
    return base**exponent


def _checked(value: Any) -> Number:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise CalculatorError(f"the result {value} is not a finite real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise CalculatorError(
            f"a number of {value.bit_length()} bits is too large; stay below 2 ** {MAX_BITS}"
        )
    return value


def _passage(document: TokenizedText, start: int, end: int) -> str:
    return f"[{start}:{end}] {' '.join(document.slice(start, end).split())}"
