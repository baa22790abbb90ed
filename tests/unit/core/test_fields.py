"""Annotations of fields hold in plain construction, and in our words."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agentenv.core import RunLimits, ToolDefinitionError, UsageError
from agentenv.core.fields import PositiveInt, PositiveSeconds, check_fields, check_values, tables
from agentenv.engine import Sampling
from agentenv.runner import RunnerOptions
from agentenv.runs import EvalConfig
from agentenv.tools.definition import ToolOptions
from agentenv.training.config import GRPOConfig
from agentenv.training.options.lora import LoraOptions

OPTIONS = [
    *(RunLimits, Sampling, RunnerOptions, ToolOptions),
    *(GRPOConfig, *tables(GRPOConfig).values(), LoraOptions),
]


@dataclass(frozen=True, slots=True)
class Some:
    """Every kind of bound."""

    whole: PositiveInt | None = None
    share: Annotated[float, Gt(0), Le(1)] = 1.0
    below: Annotated[int, Ge(-3), Lt(3), "three is a crowd"] = 0
    word: Literal["left", "right"] | None = "left"
    flag: bool = False
    names: tuple[str, ...] = ()
    wait_s: PositiveSeconds = 1.0
    free: float = 0.0
    text: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"whole": 0}, "whole must be at least 1, not 0"),
        ({"whole": 1.0}, "whole must be a whole number, not 1.0"),
        ({"whole": True}, "whole must be a whole number, not True"),
        ({"share": None}, "share must be a number, not None"),
        ({"share": 0}, "share must be more than 0 and at most 1, not 0"),
        ({"share": math.nan}, "share must be finite, not nan"),
        ({"share": "1"}, "share must be a number, not '1'"),
        ({"below": 3}, "below must be at least -3 and below 3, not 3: three is a crowd"),
        ({"word": "lefd"}, r"unknown word 'lefd'; did you mean 'left'\? one of \('left', 'right', None\)"),
        ({"flag": "no"}, "flag must be true or false, not 'no'"),
        ({"names": "ab"}, r"names must be a list, not the text 'ab'; write \['ab'\]"),
        ({"names": 3}, "names must be a list, not 3"),
        ({"names": ("a", 3)}, "names.1 must be a text, not 3"),
        ({"wait_s": 0}, "wait_s must be more than 0 seconds, not 0"),
        ({"free": math.inf}, "free must be finite, not inf"),
    ],
)
def test_a_value_outside_its_bounds_is_refused_with_name_value_and_bound(wrong, says):
    with pytest.raises(UsageError, match=says):
        Some(**wrong)


@pytest.mark.parametrize("name", ["whole", "share", "below", "wait_s"])
@given(value=st.one_of(st.integers(), st.integers(-5, 5), st.floats(), st.floats(-2, 2), st.none()))
def test_construction_takes_a_number_exactly_where_pydantic_does(name, value):
    annotation = _annotation(name)

    ours = _accepts(lambda: Some(**{name: value}), UsageError)
    theirs = _accepts(lambda: annotation.validate_python(value), ValidationError)

    whole_float = isinstance(value, float) and value.is_integer()  # pydantic takes 3.0 for an int
    assert ours == theirs or (theirs and whole_float and name in {"whole", "below"})


@cache
def _annotation(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(Some, include_extras=True)[name])


def _accepts(make: Any, error: type[Exception]) -> bool:
    try:
        make()
    except error:
        return False
    return True


def test_numbers_of_numpy_and_lists_become_plain():
    made = Some(whole=np.int64(3), share=np.float32(0.5), names=["a"])  # pyright: ignore[reportArgumentType]

    assert (type(made.whole), type(made.share)) == (int, float)
    assert made == Some(whole=3, share=0.5, names=("a",))


@pytest.mark.parametrize("kind", OPTIONS)
def test_defaults_pass_and_every_number_is_checked(kind):
    made = kind()
    check_values(kind, {field.name: getattr(made, field.name) for field in fields(kind)})
    for field in fields(kind):
        if isinstance(getattr(made, field.name), int | float):
            with pytest.raises(UsageError, match=field.name):
                replace(made, **{field.name: "many"})
        if isinstance(getattr(made, field.name), float):
            with pytest.raises(UsageError, match=f"{field.name} must be finite"):
                replace(made, **{field.name: math.inf})


@pytest.mark.parametrize("name", [field.name for field in fields(RunLimits)])
def test_a_limit_is_never_negative(name):
    with pytest.raises(UsageError, match=name):
        RunLimits(**{name: -1})
    with pytest.raises(ToolDefinitionError, match="timeout_s must be more than 0 seconds"):
        ToolOptions(timeout_s=-1)
    with pytest.raises(UsageError, match="name at least one environment"):
        EvalConfig(envs=())


def test_options_that_keep_their_defaults_do_not_load_pydantic():
    code = (
        "import sys; from agentenv.core import RunLimits; from agentenv.engine import Sampling\n"
        "RunLimits(), Sampling(); print('pydantic' in sys.modules)"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.strip() == "False"
