"""The pytest plugin and what comes with it."""

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.envs import spec
from agentenv.testing import random_arguments

pytest_plugins = ["pytester"]


async def test_an_episode_is_played_without_a_model(play_episode):
    task = spec("agentenv/Calculator-v0").task_set("test")[0]
    want = {"+": task.data["a"] + task.data["b"]}.get(task.data["op"])

    right = await play_episode("agentenv/Calculator-v0", [str(want)], task.data)
    wrong = await play_episode("agentenv/Calculator-v0", lambda messages, task, rng: "0", task.data)

    assert right.reward == float(task.data["op"] == "+")
    assert (wrong.reward, wrong.stop_reason) == (0.0, "final_answer")


async def test_a_scripted_runner_plays_the_whole_path(scripted_runner):
    entry = spec("agentenv/Calculator-v0")
    runner = scripted_runner(["The answer is 3."], max_turns=2)
    one = await runner.run_episode(entry.make(), {"a": 1, "op": "+", "b": 2})

    assert one.reward == 1.0
    assert one.stop_reason == "final_answer"
    assert sum(one.sequences[0].loss_mask) == one.num_sampled_tokens


async def test_an_environment_is_asserted_to_be_right(assert_env_ok):
    await assert_env_ok("agentenv/Calculator-v0", tasks=5, fuzz_calls=30, only=("schema", "oracle"))


def test_a_failing_environment_fails_with_the_report(pytester):
    pytester.makepyfile(
        """
        from agentenv.envs import EnvSpec, ToolEnv

        class Generous(ToolEnv):
            def start(self): return "go"
            def reward(self): return 1.0

        async def test_it(assert_env_ok):
            await assert_env_ok(EnvSpec.of("a/Generous-v0", Generous), only=("trivial",))
        """
    )
    options = ("asyncio_mode=auto", "asyncio_default_fixture_loop_scope=function")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *(f"-o{option}" for option in options))

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*trivial*trivial policies score too high*"])


EXAMPLE = re.search(
    r"```python\n(?P<code>[^`]*def test_my_environment.*?)```",
    (Path(__file__).parents[3] / "docs" / "check.md").read_text(),
    re.DOTALL,
)


@pytest.mark.parametrize("options", [("-p", "no:asyncio"), ()])
def test_the_documented_tests_run_as_printed(pytester, options):
    pytester.makepyfile(test_echo=EXAMPLE["code"])

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)

    result.assert_outcomes(passed=EXAMPLE["code"].count("def test_"))


def test_an_asynchronous_test_of_others_is_not_touched(pytester):
    pytester.makepyfile("async def test_it(): raise RuntimeError('this ran')")

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:asyncio")

    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*this ran*")


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": 0, "maximum": 5},
            {"type": "string", "maxLength": 3},
            {"type": "boolean"},
            {"enum": ["a", 1, None]},
            {"type": ["string", "null"]},
        ]
    ),
    lambda inner: st.one_of(
        inner.map(lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": 2}),
        inner.map(lambda one: {"anyOf": [one, {"type": "null"}]}),
        inner.map(lambda one: {"type": "object", "properties": {"p": one}, "required": ["p"]}),
    ),
    max_leaves=4,
)


KINDS = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list, "null": type(None)}


def allows(schema, value):
    """A small validator of the schemas drawn here."""
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(allows(one, value) for one in schema["anyOf"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(type(value) is KINDS[kind] for kind in kinds):
        return False
    if isinstance(value, dict):
        properties = schema["properties"]
        return set(schema["required"]) <= set(value) and all(
            allows(properties[k], v) for k, v in value.items()
        )
    if isinstance(value, list):
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
            allows(schema["items"], one) for one in value
        )
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", len(value))
    return type(value) is not int or schema["minimum"] <= value <= schema["maximum"]


@given(SCHEMAS, st.integers())
def test_random_arguments_are_valid_for_their_schema(schema, seed):
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"]}

    assert allows(whole, random_arguments(whole, random.Random(seed)))


def test_recursive_schemas_come_to_an_end():
    ref = {"$ref": "#/$defs/Node"}
    fields = {"next": {"anyOf": [ref, {"type": "null"}]}}
    node = {"type": "object", "properties": fields, "required": ["next"]}
    schema = {"type": "object", "properties": {"n": ref}, "required": ["n"], "$defs": {"Node": node}}

    for seed in range(50):
        assert "next" in random_arguments(schema, random.Random(seed))["n"]
