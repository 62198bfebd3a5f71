"""From a function's types to the bounded JSON schema of a tool's arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import pydantic
from pydantic import BaseModel, ConfigDict, Field

# Arguments that a schema leaves unbounded are bounded here: under a grammar without an end to a string or
# a number, a greedy model may never close it.
MAX_STRING_CHARS = 200
MAX_ARRAY_ITEMS = 8
MAX_NUMBER = 10**9
COMBINING = ("anyOf", "oneOf", "allOf", "prefixItems")


class ToolError(ValueError):
    """A function cannot be a tool, or tools do not fit together; the text says why and what to do."""


def arguments_model(label: str, function: Callable[..., Any]) -> type[BaseModel]:
    """A pydantic model with one field per parameter; keys that the function does not have are refused.

    Raises:
        ToolError: the parameter that has no type, no name of its own, or one that JSON cannot express.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ToolError(f"tool {label}: its annotations cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolError(f"tool {label}: parameter {name} is {parameter.kind.description}; name each one")
        if name not in hints:
            raise ToolError(f"tool {label}: parameter {name} has no type; annotate it, as in {name}: str")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], Field(default))
    try:
        config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        model = pydantic.create_model(f"{label}_arguments", __config__=config, **fields)
        model.model_json_schema()
    except (pydantic.errors.PydanticUserError, NameError) as error:
        reason = str(error).split("\n")[0]
        raise ToolError(f"tool {label}: JSON cannot express its signature: {reason}") from error
    return model


def bounded(schema: Mapping[str, Any], label: str) -> dict[str, Any]:
    """``schema`` with references put in place and an upper bound on every string, list and number.

    Raises:
        ToolError: something in it has no bound.
    """
    definitions = schema.get("$defs", {})

    def walk(part: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        if "$ref" in part:
            name = part["$ref"].rsplit("/", 1)[-1]
            if name in path:
                raise ToolError(f"tool {label}: type {name} contains itself; use types of bounded depth")
            rest = {key: value for key, value in part.items() if key != "$ref"}
            return walk({**definitions[name], **rest}, (*path, name))
        out = {key: value for key, value in part.items() if key not in ("$defs", "title")}
        if not {"type", "enum", "const", *COMBINING} & out.keys():
            raise ToolError(f"tool {label}: an argument of any type has no bound; say what it may be")
        for key in COMBINING:
            if key in out:
                out[key] = [walk(item, path) for item in out[key]]
        if out.get("type") == "object":
            if out.get("additionalProperties", not out.get("properties") and path):
                raise ToolError(f"tool {label}: an object of any keys has no bound; name its keys in a model")
            out["properties"] = {key: walk(item, path) for key, item in out.get("properties", {}).items()}
            out["additionalProperties"] = False
        if not {"enum", "const"} & out.keys():
            out = _with_bounds(out)
        if "items" in out:
            out["items"] = walk(out["items"], path)
        return out

    return walk(schema, ())


def _with_bounds(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "string" and not {"pattern", "format"} & part.keys():
        return {"maxLength": MAX_STRING_CHARS, **part}
    if kind == "array" and "prefixItems" not in part:
        return {"maxItems": MAX_ARRAY_ITEMS, **part}
    if kind in ("integer", "number"):
        low = {} if "exclusiveMinimum" in part else {"minimum": -MAX_NUMBER}
        high = {} if "exclusiveMaximum" in part else {"maximum": MAX_NUMBER}
        return {**low, **high, **part}
    return part


def kind_of(part: Mapping[str, Any]) -> str:
    """A schema in a few words, for a prompt."""
    if "enum" in part:
        return " | ".join(json.dumps(value) for value in part["enum"])
    if "anyOf" in part:
        return " | ".join(kind_of(item) for item in part["anyOf"])
    if part.get("type") == "array" and "items" in part:
        return f"list of {kind_of(part['items'])}"
    return str(part.get("type", "value"))
