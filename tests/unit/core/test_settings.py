"""One grammar of settings: the same words set the same things wherever they are written."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.cli.eval_ import eval_config
from agentenv.core import RunLimits, UsageError
from agentenv.core.fields import tables
from agentenv.core.settings import Section, build, options_of, parse_pairs, read_settings, read_toml
from agentenv.engine import Sampling
from agentenv.runner import RunnerOptions
from agentenv.runs import EvalConfig
from agentenv.runs.sections import EVAL_SECTIONS
from agentenv.training.config import GRPOConfig
from agentenv.training.options import LossOptions
from agentenv.training.sections import TRAIN_SECTIONS

positive = st.integers(1, 10_000)
seconds = st.floats(0.001, 1e6)
words = st.text("abcXYZ 0123_-./:=", max_size=12)
VALUES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "env": {"digits": positive, "name": words, "hard": st.booleans(), "sizes": st.lists(positive)},
    "runner": {
        "concurrency": positive,
        "retries": st.integers(0, 9),
        "history": st.sampled_from(["verbatim", "rewrite"]),
        "warn_after_s": st.none() | seconds,
    },
    "limits": {
        "max_turns": st.none() | positive,
        "max_parse_errors": st.none() | st.integers(0, 9),
        "tool_output_keep": st.sampled_from(["middle", "head", "tail"]),
        "tool_timeout_s": st.none() | seconds | positive,
    },
    "sampling": {
        "temperature": st.floats(0, 9) | st.integers(0, 3),
        "top_p": st.floats(0.01, 1),
        "adapter": words,
    },
    "engine": {"dtype": words, "max_batch": positive},
    "eval": {"num_tasks": st.none() | positive, "success_at": st.floats(-1, 1), "split": words},
}


@st.composite
def some_settings(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Draw any settings of any sections."""
    return {
        section: {name: draw(values) for name, values in fields.items() if draw(st.booleans())}
        for section, fields in VALUES.items()
    }


def toml(value: object) -> str:
    return '"none"' if value is None else json.dumps(value)


@given(some_settings())
def test_settings_are_the_same_as_pairs_in_toml_and_in_python(tmp_path_factory, settings):
    base = {"envs": ("a/B-v0",)}
    whole = [(section, name, value) for section, table in settings.items() for name, value in table.items()]
    pairs = [f"{section}.{name}={'none' if value is None else toml(value)}" for section, name, value in whole]
    lines = [f"{section}.{name} = {toml(value)}" for section, name, value in whole]
    tables = [
        f"[{section}]\n" + "\n".join(f"{name} = {toml(value)}" for name, value in table.items())
        for section, table in settings.items()
    ]

    own = settings.pop("eval")
    wanted = EvalConfig.of(**base, **own, **settings)

    assert eval_config(base, [parse_pairs(pairs)]) == wanted
    assert eval_config(base, [tomllib.loads("\n".join(lines))]) == wanted
    assert eval_config(base, [tomllib.loads("\n".join(tables))]) == wanted


@given(st.sampled_from([(home, name) for home, one in EVAL_SECTIONS.items() for name in one.names]))
def test_a_bare_name_means_the_one_section_that_has_it(setting):
    home, name = setting

    assert read_settings([{name: 1}], EVAL_SECTIONS)[home] == {name: 1}
    assert read_settings([{home: {name: 1}}], EVAL_SECTIONS)[home] == {name: 1}


def test_each_bare_name_of_training_is_in_one_section_and_one_table():
    names = [
        name
        for section in TRAIN_SECTIONS.values()
        if section.kind is not GRPOConfig
        for name in section.names
    ]
    names += [field.name for kind in (GRPOConfig, *tables(GRPOConfig).values()) for field in fields(kind)]

    assert len(names) == len(set(names))
    assert set(TRAIN_SECTIONS["train"].names) <= set(names)


@pytest.mark.parametrize(
    "written",
    [
        "train.loss.epsilon = 0.1\ntrain.stream.max_ahead = 2",
        "loss.epsilon = 0.1\nstream.max_ahead = 2",
        "[loss]\nepsilon = 0.1\n[stream]\nmax_ahead = 2",
        "[train]\nmax_ahead = 2\n[train.loss]\nepsilon = 0.1",
        "[train]\nepsilon = 0.1\nmax_ahead = 2",
        "epsilon = 0.1\nmax_ahead = 2",
    ],
)
def test_options_of_a_table_have_a_nested_and_a_flat_name_everywhere(written):
    wanted = GRPOConfig(epsilon=0.1, max_ahead=2)
    pairs = [line.replace(" ", "") for line in written.splitlines() if "[" not in line]
    sources = [tomllib.loads(written)] if "[" in written else [parse_pairs(pairs), tomllib.loads(written)]

    assert GRPOConfig(loss=LossOptions(epsilon=0.1), stream={"max_ahead": 2}) == wanted
    for source in sources:
        assert build(GRPOConfig, read_settings([source], TRAIN_SECTIONS)["train"]) == wanted


def test_the_later_spelling_wins_whichever_it_is():
    nested, flat = parse_pairs(["loss.epsilon=0.1", "loss.beta=0.3"]), parse_pairs(["epsilon=0.2"])
    for sources, wanted in (([nested, flat], 0.2), ([flat, nested], 0.1)):
        read = read_settings(sources, TRAIN_SECTIONS)["train"]
        assert build(GRPOConfig, read).loss == LossOptions(epsilon=wanted, beta=0.3)

    config = replace(GRPOConfig(loss=LossOptions(epsilon=0.1, beta=0.3)), epsilon=0.2)
    assert config.loss == LossOptions(epsilon=0.2, beta=0.3)
    assert build(GRPOConfig, asdict(config)) == config


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("epsilom=1", r"'epsilom'; did you mean 'train.epsilon' \(Lower clip is 1 - this\)"),
        ("loss.epsilom=1", r"'epsilom'; did you mean 'epsilon'"),
        ("los.epsilon=1", r"did you mean 'train.epsilon'"),
        ("loss=3", "setting loss = 3"),
        ("loss.kl_in=los", "unknown kl_in 'los'; did you mean 'loss'"),
        ("train.optimizer.learning_rate=0", "learning_rate must be more than 0, not 0"),
    ],
)
def test_a_wrong_option_of_a_table_is_refused_with_the_nearest_and_what_it_means(pair, says):
    with pytest.raises(UsageError, match=says):
        build(GRPOConfig, read_settings([parse_pairs([pair])], TRAIN_SECTIONS)["train"])
    with pytest.raises(UsageError, match="loss must be LossOptions or a mapping of its options, not 3"):
        GRPOConfig(loss=3)  # pyright: ignore[reportArgumentType]


def test_a_later_source_wins_name_by_name():
    first = {"limits": {"max_turns": 3, "max_tool_calls": 2}, "env": {"size": {"x": 1, "y": 2}}}
    found = read_settings([first, parse_pairs(["max_turns=5", "env.size.y=4"])], EVAL_SECTIONS)
    assert found["limits"] == {"max_turns": 5, "max_tool_calls": 2}
    assert found["env"] == {"size": {"x": 1, "y": 4}}

    found = read_settings([parse_pairs(["lora.r=8", "train.lora.alpha=4"])], TRAIN_SECTIONS)
    config = build(GRPOConfig, {"model": "x"}, found["train"])
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha) == (8, 4)

    twice = {"limits": Section(RunLimits), "again": Section(RunLimits)}
    with pytest.raises(UsageError, match="in the sections limits and again; write limits"):
        read_settings([{"max_turns": 3}], twice)


MAX_TURNS = r"did you mean 'limits.max_turns' \(Largest number of assistant turns\)"


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("max_trns=3", rf"unknown setting 'max_trns'; {MAX_TURNS}"),
        ("limit.max_turns=3", rf"'limit.max_turns'; {MAX_TURNS}"),
        ("max_assistant_turns=3", MAX_TURNS),
        ("limits.max_new_tokens=9", r"did you mean 'limits.max_tokens_per_turn'"),
        ("limits.temperature=0", "did you mean 'sampling.temperature'"),
        ("sampling.seed=3", "did you mean 'eval.seed'"),
        ("group_siz=3", "did you mean 'eval.group_size'"),
        ("xqz=1", "known: eval.envs, .*; env.NAME and engine.NAME take any name"),
        ("env=3", "'env' is a section, not a setting; write env.NAME=VALUE"),
        ("limits.max_turns=0", "max_turns must be at least 1, not 0"),
        ("limits.max_turns=few", "max_turns must be a whole number, not 'few'"),
        ("tool_output_keep=heads", "unknown tool_output_keep 'heads'; did you mean 'head'"),
        ("top_p=2", "top_p must be more than 0 and at most 1, not 2"),
        ("num_tasks=0", "num_tasks must be at least 1, not 0"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_nearest_and_what_it_means(pair, says):
    with pytest.raises(UsageError, match=says):
        eval_config({"envs": ("a/B-v0",)}, [parse_pairs([pair])])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"limits": {"max_turn": 3}}, "did you mean 'max_turns'"),
        ({"group_siz": 3}, "did you mean 'group_size'"),
    ],
)
def test_a_wrong_name_in_python_is_refused_with_the_nearest(given, says):
    with pytest.raises(UsageError, match=says):
        EvalConfig.of(envs=("a/B-v0",), **given)
    with pytest.raises(UsageError, match=r"did you mean .train\.num_generations"):
        read_settings([parse_pairs(["group_size=8"])], TRAIN_SECTIONS)


def test_none_is_none_only_where_it_can_be():
    pairs = parse_pairs(["scale_rewards=none", "max_completion_length=none", "lora=none"])
    config = build(GRPOConfig, read_settings([pairs], TRAIN_SECTIONS)["train"])

    assert (config.loss.scale_rewards, config.loss.max_completion_length, config.lora) == ("none", None, None)
    assert build(Sampling, {"adapter": "none"}).adapter == "none"


def test_options_are_taken_as_they_are_or_as_a_mapping():
    limits = RunLimits(max_turns=3)

    assert options_of(RunLimits, limits) is limits
    assert options_of(RunLimits, {"max_turns": 3}) == limits
    assert options_of(RunnerOptions, None) == RunnerOptions()
    assert options_of(RunLimits, {"max_turns": 3}, {"max_turns": 9, "max_tool_calls": 2}).max_tool_calls == 2
    with pytest.raises(UsageError, match="expected RunLimits or a mapping of its fields, not 5"):
        options_of(RunLimits, 5)  # pyright: ignore[reportArgumentType]


def test_pairs_are_read_as_toml_else_as_text():
    assert parse_pairs(["a=3", "b=0.5", "c=true", "d=none", "e=cosine", "f=[1, 2]", "g.h.i=x=y"]) == {
        "a": 3, "b": 0.5, "c": True, "d": None, "e": "cosine", "f": [1, 2], "g": {"h": {"i": "x=y"}},
    }  # fmt: skip
    for wrong in ("temperature", "=3", "limits.=3", ".x=3"):
        with pytest.raises(UsageError, match="name=value"):
            parse_pairs([wrong])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *[
            (content, "is not TOML")
            for content in (b"\xff\xfe", b"a=" + b"[" * 100_000, b"a=1" + b"0" * 10_000)
        ],
        (b"a = ", "not TOML"),
        (None, "cannot read"),
    ],
)
def test_a_settings_file_that_cannot_be_read_is_refused_in_words(tmp_path: Path, content, says: str):
    if content is not None:
        (tmp_path / "odd.toml").write_bytes(content)

    with pytest.raises(UsageError, match=says):
        read_toml(tmp_path / "odd.toml")
