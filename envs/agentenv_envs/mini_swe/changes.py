"""The mistakes: one small change of one line, at a place that is named by line, column and kind of change.

`candidates` finds the places where a change is possible, for the script that makes the index. `changed` puts
a change into a file. The index names places and kinds alone, so it holds no text of a library.
"""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from agentenv.core import TaskError

__all__ = ["KINDS", "Change", "candidates", "changed"]

KINDS: dict[str, tuple[str, str]] = {
    # a comparison that is off by one, or the wrong way round
    "lt-le": ("<", "<="),
    "le-lt": ("<=", "<"),
    "gt-ge": (">", ">="),
    "ge-gt": (">=", ">"),
    "eq-ne": ("==", "!="),
    "ne-eq": ("!=", "=="),
    "is-isnot": ("is", "is not"),
    "isnot-is": ("is not", "is"),
    "in-notin": ("in", "not in"),
    "notin-in": ("not in", "in"),
    # a condition
    "and-or": ("and", "or"),
    "or-and": ("or", "and"),
    "not": ("not ", ""),
    "if-ifnot": ("if", "if not"),
    "elif-if": ("elif", "if"),
    "true-false": ("True", "False"),
    "false-true": ("False", "True"),
    "any-all": ("any", "all"),
    "all-any": ("all", "any"),
    # an operator
    "add-sub": ("+", "-"),
    "sub-add": ("-", "+"),
    "mul-add": ("*", "+"),
    "floor-mod": ("//", "%"),
    "mod-floor": ("%", "//"),
    "iadd-isub": ("+=", "-="),
    "isub-iadd": ("-=", "+="),
    "iadd-set": ("+=", "="),
    # the way through a loop
    "break-continue": ("break", "continue"),
    "continue-break": ("continue", "break"),
    # the other end, the other order, the other name
    "min-max": ("min", "max"),
    "max-min": ("max", "min"),
    "append-insert": (".append(", ".insert(0, "),
    "pop-first": (".pop()", ".pop(0)"),
    "start-stop": ("start", "stop"),
    "stop-start": ("stop", "start"),
    "left-right": ("left", "right"),
    "right-left": ("right", "left"),
    "key-value": ("key", "value"),
    "value-key": ("value", "key"),
    "lower": (".lower()", ""),
    "strip": (".strip()", ""),
    "lstrip-rstrip": (".lstrip(", ".rstrip("),
    "rstrip-lstrip": (".rstrip(", ".lstrip("),
    "startswith-endswith": (".startswith(", ".endswith("),
    "endswith-startswith": (".endswith(", ".startswith("),
    "find-rfind": (".find(", ".rfind("),
    "rfind-find": (".rfind(", ".find("),
    "sorted-list": ("sorted(", "list("),
    "reversed-list": ("reversed(", "list("),
}
"""What stands at the place of a change and what is put there, by the name of the kind."""
_NUMBERS = {"plus-one": 1, "minus-one": -1}
"""A whole number that is off by one has no fixed text; these kinds add to it."""
_DIGITS = re.compile(r"\d+\b(?!\.)")


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """A change of one line."""

    line: int
    """Number of the line, counted from 1."""
    column: int
    """Number of characters before the changed text."""
    kind: str


def changed(source: str, change: Change) -> str:
    """Return a file's text with a change.

    Raises:
        TaskError: The text at the place of the change is not what this kind of change replaces.
    """
    lines = source.split("\n")
    line = lines[change.line - 1] if 0 < change.line <= len(lines) else ""
    lines[change.line - 1 : change.line] = [_changed_line(line, change)]
    return "\n".join(lines)


def _changed_line(line: str, change: Change) -> str:
    head, rest = line[: change.column], line[change.column :]
    if change.kind in _NUMBERS:
        if (digits := _DIGITS.match(rest)) is not None:
            return f"{head}{int(digits[0]) + _NUMBERS[change.kind]}{rest[digits.end() :]}"
    else:
        old, new = KINDS[change.kind]
        if rest.startswith(old):
            return f"{head}{new}{rest[len(old) :]}"
    raise TaskError(f"line {change.line} has nothing at column {change.column} that {change.kind} replaces")


def candidates(source: str) -> Iterator[Change]:
    """Yield every change that is possible in the bodies of functions, in the order of the file."""
    tree = ast.parse(source)
    inside = _lines_of_bodies(tree)
    outside = _annotations(tree)
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line, column = token.start
        if line in inside and not any(start <= token.start < end for start, end in outside):
            for kind in _kinds_at(token, before):
                yield Change(line, column - (1 if KINDS.get(kind, ("",))[0].startswith(".") else 0), kind)
        before = token.string


def _kinds_at(token: tokenize.TokenInfo, before: str) -> Iterator[str]:
    """Yield the kinds of change that fit a token; those of a method call begin at the dot before its name."""
    if token.type == tokenize.NUMBER and token.string.isdigit():
        yield "plus-one"
        if int(token.string) > 0:
            yield "minus-one"
    if token.type not in (tokenize.OP, tokenize.NAME):
        return
    called = token.type == tokenize.NAME and before == "."
    start = token.start[1] - called
    rest = token.line[start:]
    for kind, (old, _) in KINDS.items():
        if not rest.startswith(old) or old.startswith(".") != called:
            continue
        whole = re.match(r"\w+", old)
        if token.type == tokenize.OP and token.string != old:
            continue  # `<` stands also at the beginning of `<=`
        if whole is not None and whole[0] != token.string:
            continue
        if kind in ("is-isnot", "in-notin") and (rest.startswith("is not ") or before == "not"):
            continue
        if kind == "if-ifnot" and rest.startswith("if not "):
            continue
        if kind == "not" and (before == "is" or re.match(r"not\s+in\b", rest)):
            continue
        if kind in ("add-sub", "sub-add", "mul-add") and _is_unary(before):
            continue
        yield kind


def _is_unary(before: str) -> bool:
    """Tell whether an operator after this token has no left side."""
    if before in ("", ")", "]", "}"):
        return False
    return keyword.iskeyword(before) or not (before[-1].isalnum() or before[-1] in "_'\"")


def _lines_of_bodies(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that belong to the body of a function and to no docstring."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _annotations(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where annotations stand: a change of one has no effect."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in found
        if node is not None
    ]
