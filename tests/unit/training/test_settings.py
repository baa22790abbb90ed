"""What checkers of types know of a call's settings is what the configurations have."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import pytest

from agentenv.core.fields import by_flat_name, tables
from agentenv.core.settings import field_docs
from agentenv.runs.eval_config import EvalConfig, EvalSettings, RolloutSettings
from agentenv.runs.evaluate import evaluate, rollout
from agentenv.training.config import GRPOConfig
from agentenv.training.options.lora import LoraOptions
from agentenv.training.run import train
from agentenv.training.settings import TrainSettings

ALSO = {
    tuple[str, ...]: Sequence[str],
    float | tuple[float, ...]: float | Sequence[float],
    tuple[str, ...] | str: Sequence[str] | str,
    LoraOptions | None: LoraOptions | Mapping[str, Any] | None,
    **{kind: kind | Mapping[str, Any] for kind in tables(GRPOConfig).values()},
}
"""Calls take a list where a configuration has a tuple, and a table for its parts."""


def unnamed(config, function):
    """The fields of a configuration that are not named arguments of a function, with their types."""
    named = inspect.signature(function).parameters
    hints = {
        name: hint for kind in (config, *tables(config).values()) for name, hint in fields_of(kind).items()
    }
    return {name: ALSO.get(hint, hint) for name, hint in hints.items() if name not in named}


def fields_of(kind):
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("config", "function", "settings"),
    [(EvalConfig, evaluate, EvalSettings), (GRPOConfig, train, TrainSettings)],
)
def test_the_settings_that_checkers_see_are_the_fields_of_the_configuration(config, function, settings):
    assert get_type_hints(settings) == unnamed(config, function)


def options() -> dict[str, str]:
    """What each option of a training says of itself."""
    kinds = (GRPOConfig, *tables(GRPOConfig).values())
    return {
        name: text for kind in kinds for name, text in field_docs(kind).items() if name not in tables(kind)
    }


def test_every_option_of_a_training_says_what_it_is_for():
    assert set(options()) == set(by_flat_name(GRPOConfig()))
    assert [name for name, text in options().items() if len(text.split()) < 4] == []


def test_a_training_has_at_most_75_options():
    assert len(options()) <= 75


def test_rollout_takes_the_arguments_of_evaluate():
    given = {
        name: parameter.annotation
        for name, parameter in inspect.signature(evaluate, eval_str=True).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in inspect.signature(rollout).parameters
    }

    assert get_type_hints(RolloutSettings) == {**get_type_hints(EvalSettings), **given}
