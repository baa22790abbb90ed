"""The calculator: real arithmetic, and an answer at once to everything else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import ToolError, ToolErrorKind
from agentenv_tools.arithmetic import MAX_CHARS, calculator, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17*23", 391),
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("-3 ** 2", -9),
        ("2 ^ 10", 1024),
        ("6 / 3", 2),
        ("7 / 2", 3.5),
        ("7 // 2", 3),
        ("7 % 3", 1),
        ("6 × 7 − 2 ÷ 2", 41),  # noqa: RUF001 - signs that models write
        ("sqrt(16)", 4.0),
        ("hypot(3, 4)", 5.0),
        ("min(3, 1, 2) + max(1, 2)", 3),
        ("round(2.567, 2)", 2.57),
        ("round(2.6)", 3),
        ("factorial(20)", math.factorial(20)),
        ("gcd(12, 18)", 6),
        ("10 ** 30 + 1", 10**30 + 1),
        ("2 ** -1", 0.5),
        ("log(e)", 1.0),
        ("cos(pi)", -1.0),
        ("1_000 + 1", 1001),
        ("+".join(["1"] * 500), 500),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    result = evaluate(expression)

    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("9**9**9**9", "too large"),
        ("2**99999999999", "too large"),
        ("factorial(99999999)", "factorial takes"),
        ("*".join(["9" * 90] * 10) + "*9**999", "too large"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression|nested"),
        ("-" * 900 + "1", "nested"),
        ("abs(" * 150 + "1" + ")" * 150, "nested"),
        ("1" * (MAX_CHARS + 1), "at most 1000"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("sqrt(-1)", "cannot evaluate"),
        ("(-8)**0.5", "not a real number"),
        ("1e308*10", "too large"),
        ("10**400/3", "too large"),
        ("round(1, 10**30)", ""),
        ("", "not an arithmetic expression"),
        ("2 +", "not an arithmetic expression"),
        ("1,000 + 2", "only numbers"),
        ("x + 1", "'x' is not known"),
        ("__import__('os').system('id')", "only numbers"),
        ("open('/etc/passwd')", "'open' is not known"),
        ("(1).__class__", "only numbers"),
        ("[1 for _ in range(10**9)]", "only numbers"),
        ("'a' * 10**9", "only numbers"),
        ("True + 1", "only numbers"),
        ("lambda: 1", "only numbers"),
        ("abs(x=1)", "'abs'|only numbers"),
        ("abs(1, 2)", "cannot evaluate"),
        ("\x00", "not an arithmetic expression"),
        ("\ud800", ""),
    ],
    ids=lambda text: ascii(text)[:30],
)
def test_everything_else_is_refused(expression: str, says: str) -> None:
    if says:
        with pytest.raises(ToolError, match=says) as caught:
            evaluate(expression)
        assert len(str(caught.value)) < 400
    else:
        _evaluate_or_refuse(expression)


def _evaluate_or_refuse(expression: str) -> float | None:
    try:
        return evaluate(expression)
    except ToolError:
        return None


@given(st.text(alphabet="0123456789.+-*/%^() episqrtfacol,_'[]{}=<>!&|~:;", max_size=40))
def test_any_text_gives_a_finite_number_or_a_refusal(expression: str) -> None:
    value = _evaluate_or_refuse(expression)

    assert value is None or math.isfinite(value)


@given(
    st.recursive(
        st.integers(-99, 99), lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner), max_leaves=12
    )
)
def test_whole_number_arithmetic_agrees_with_python(tree: object) -> None:
    def text(node: object) -> str:
        return f"({text(node[0])}{node[1]}{text(node[2])})" if isinstance(node, tuple) else f"({node})"

    assert evaluate(text(tree)) == eval(text(tree))


async def test_the_tool_answers_with_json_and_twelve_digits() -> None:
    assert (await calculator.call('{"expression": "0.1+0.2"}')).content == "0.3"
    assert (await calculator.call('{"expression": "17*23"}')).content == "391"
    refused = await calculator.call('{"expression": "9**9**9**9"}')
    assert (refused.error_kind, refused.content) == (ToolErrorKind.TOOL_ERROR, "the result is too large")
    assert calculator.notes == ()
    assert calculator.schema("strict")["function"]["name"] == "calculator"
