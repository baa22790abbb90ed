"""The leaderboard's ground truth as tool calls, which the oracles of BFCL make."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["answer_calls", "ground_truth_calls"]

Call = tuple[str, dict[str, Any]]


def ground_truth_calls(entry: Mapping[str, Any], turn: int) -> list[Call]:
    """Return the calls of a user turn, which the leaderboard writes as Python text."""
    functions = [*entry["function"], *(late for added in entry["missed_function"].values() for late in added)]
    parameters = {function["name"]: list(function["parameters"]["properties"]) for function in functions}
    calls: list[Call] = []
    for text in entry["ground_truth"][turn]:
        node = ast.parse(text, mode="eval").body
        assert isinstance(node, ast.Call)
        name = ast.unparse(node.func)
        values = {
            parameter: ast.literal_eval(value)
            for parameter, value in zip(parameters[name], node.args, strict=False)
        }
        values |= {str(part.arg): ast.literal_eval(part.value) for part in node.keywords}
        calls.append((name, values))
    return calls


def answer_calls(entry: Mapping[str, Any], language: str) -> list[Call]:
    """Return one of the possible answers of a single-turn task."""
    functions = {function["name"]: function for function in entry["function"]}
    calls: list[Call] = []
    for answer in entry["ground_truth"]:
        ((name, options),) = answer.items()
        types = functions[name]["parameters"]["properties"]
        required = functions[name]["parameters"]["required"]
        values: dict[str, Any] = {}
        for parameter, allowed in options.items():
            value = _chosen(allowed)
            if value is _LEFT_OUT and parameter in required:
                value = ""
            if value is _LEFT_OUT or parameter not in types:
                continue
            values[parameter] = value if language == "Python" else _source(value, types[parameter], language)
        calls.append((str(name).replace(".", "_"), values))
    return calls


_LEFT_OUT = object()
"""Stands for an optional argument that is not given."""


def _chosen(allowed: Sequence[Any]) -> Any:
    """Return the first allowed value; an empty text stands for an argument that may be left out."""
    first = next((value for value in allowed if value != ""), _LEFT_OUT)
    if isinstance(first, list):
        return [_fields(part) for part in first]
    return _fields(first)


def _fields(value: Any) -> Any:
    """Choose inside a dictionary, whose values are lists of allowed values; what is deeper is plain."""
    if not isinstance(value, dict):
        return value
    chosen = {
        name: next((part for part in allowed if part != ""), _LEFT_OUT) for name, allowed in value.items()
    }
    return {name: part for name, part in chosen.items() if part is not _LEFT_OUT}


def _source(value: Any, entry: Mapping[str, Any], language: str) -> str:
    """Write a value as text of Java or JavaScript."""
    kind = entry["type"]
    if isinstance(value, str) and kind != "char":
        return value
    if language == "JavaScript":
        return json.dumps(value)
    return _java(value, kind, entry.get("items", {}).get("type"))


def _java(value: Any, kind: str, of: str | None) -> str:
    if kind in {"Array", "ArrayList"}:
        # The checker removes the quotes of texts only in an ArrayList that is declared to hold String.
        quoted = kind == "ArrayList" and of == "String"
        parts = ", ".join(
            part if isinstance(part, str) and not quoted else _java(part, of or "any", None) for part in value
        )
        return (
            f"new ArrayList<>(Arrays.asList({parts}))" if kind == "ArrayList" else f"new Object[]{{{parts}}}"
        )
    if isinstance(value, dict):
        puts = " ".join(f"put({json.dumps(name)}, {json.dumps(part)});" for name, part in value.items())
        return f"new HashMap<>() {{{{ {puts} }}}}"
    if kind == "char":
        return f"'{value}'"
    return json.dumps(value) + {"long": "L", "float": "f"}.get(kind, "")
