"""A calculator tool: real numbers, common functions, and limits that keep every call fast.

The expression is parsed to Python's syntax tree, whose nodes are evaluated here; `eval` is never used.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

from agentenv.core import ToolError
from agentenv.tools import tool

__all__ = ["MAX_CHARS", "calculator", "evaluate"]

MAX_CHARS = 1000
"""Most characters of an expression."""
_MAX_DEPTH = 100
_MAX_BITS = 4096
"""Most bits of a whole number, which are about 1,200 digits."""
_MAX_FACTORIAL = 500

Number: TypeAlias = int | float

_SIGNS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-", "^": "**"})
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}


def evaluate(expression: str) -> int | float:
    """Return the value of an arithmetic expression.

    Whole numbers stay exact, also in a division without remainder. An expression may have the operators
    `+ - * / // % **` (`^` means a power), parentheses, the constants `pi`, `e` and `tau`, and functions such
    as `sqrt`, `abs`, `round`, `min`, `max`, `log`, `sin`, `factorial`, `gcd`.

    Raises:
        ToolError: The expression is not valid, has no real value, or is too large or too deeply nested.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are allowed")
    try:
        tree = ast.parse(expression.translate(_SIGNS).strip(), mode="eval")
        value = _value(tree.body, 0)
    except SyntaxError as error:
        where = f" near character {error.offset}" if error.offset else ""
        raise ToolError(f"not an arithmetic expression{where}: {_short(expression)}") from None
    except (RecursionError, MemoryError):
        raise ToolError("the expression is nested too deeply") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except (ValueError, TypeError) as error:
        raise ToolError(f"cannot evaluate {_short(expression)}: {error}") from None
    return _checked(value)


@tool
def calculator(expression: str) -> int | float:
    """Evaluate an arithmetic expression exactly, such as 17*23 or sqrt(2)/3.

    Args:
        expression: Numbers with + - * / // % ** and parentheses; sqrt, abs, round, min, max, log,
            exp, sin, cos, tan, floor, ceil, factorial, gcd; pi and e. No commas inside numbers.
    """
    value = evaluate(expression)
    return value if isinstance(value, int) else float(f"{value:.12g}")


def _value(node: ast.expr, depth: int) -> Number:
    if depth > _MAX_DEPTH:
        raise ToolError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.BinOp(op=op) if type(op) in _BINARY:
            return _chain(node, depth)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _checked(_FUNCTIONS[name](*(_value(arg, depth + 1) for arg in args)))
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name):
            known = ", ".join([*_CONSTANTS, *_FUNCTIONS])
            raise ToolError(f"{name!r} is not known; the known names are: {known}")
        case _:
            raise ToolError(
                f"only numbers, + - * / // % ** and functions are allowed, not a {type(node).__name__}"
            )


def _chain(node: ast.expr, depth: int) -> Number:
    """Evaluate a + b + c ...; a chain counts as one level of nesting, however long it is."""
    rest: list[ast.BinOp] = []
    while isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        rest.append(node)
        node = node.left
    value = _value(node, depth + 1)
    for part in reversed(rest):
        value = _checked(_BINARY[type(part.op)](value, _value(part.right, depth + 1)))
    return value


def _checked(value: Any) -> Number:
    """Return the value; raise an error if it is not real, not finite, or too large."""
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise ToolError("the result is too large")
        return int(value)
    if not isinstance(value, float) or math.isnan(value):
        raise ToolError("the result is not a real number")
    if math.isinf(value):
        raise ToolError("the result is too large")
    return value


def _divide(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> Any:
    # The size of the result is estimated first, because computing a huge power would block the process.
    whole = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    if whole and abs(exponent) * (abs(int(base)).bit_length() - 1) > _MAX_BITS:
        if exponent < 0:
            return 0.0
        raise ToolError("the result is too large")
    return base**exponent


def _factorial(number: Number) -> int:
    if number != int(number) or not 0 <= number <= _MAX_FACTORIAL:
        raise ToolError(f"factorial takes whole numbers from 0 to {_MAX_FACTORIAL}")
    return math.factorial(int(number))


def _short(expression: str) -> str:
    return repr(expression if len(expression) <= 60 else expression[:57] + "...")


def _round(number: Number, digits: Number = 0) -> Number:
    places = int(digits)
    if abs(places) > 400:
        return number if places > 0 else 0
    value = round(number, places)
    return int(value) if places <= 0 else value


_BINARY: dict[type[ast.operator], Callable[[Number, Number], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "degrees": math.degrees,
    "radians": math.radians,
    "floor": math.floor,
    "ceil": math.ceil,
    "hypot": math.hypot,
    "factorial": _factorial,
    "gcd": math.gcd,
    "lcm": math.lcm,
}
