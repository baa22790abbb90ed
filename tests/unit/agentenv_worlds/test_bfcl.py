"""The Berkeley Function-Calling Leaderboard, driven through its own package where that is installed."""

import subprocess
import sys

import pytest

from agentenv.core import Action
from agentenv.testing import oracle_of, play, tool_call_message
from agentenv_worlds.bfcl.answers import answer_calls, ground_truth_calls
from agentenv_worlds.bfcl.data import CATEGORIES, MULTI_TURN
from helpers.worlds import begun, told, world

IMPOSSIBLE = {
    "live_simple_106-63-0",  # a required argument has no allowed value
    "live_simple_112-68-0",
    "live_multiple_862-181-3",  # the answer has an argument that the function does not have
    "live_multiple_964-207-0",
    "simple_java_36",  # the checker reads numbers in a list of `any` as texts
    "simple_java_65",
}
"""Tasks whose own ground truth the leaderboard's checker refuses, however it is written."""


def test_ground_truth_is_read_with_and_without_names_of_arguments():
    function = {"name": "mv", "parameters": {"properties": {"source": {}, "destination": {}}}}
    calls = ["mv('a', destination='b')", "mv(source='c', destination=[1, -2])"]
    entry = {"function": [function], "missed_function": {}, "ground_truth": [calls]}

    assert ground_truth_calls(entry, 0) == [
        ("mv", {"source": "a", "destination": "b"}),
        ("mv", {"source": "c", "destination": [1, -2]}),
    ]


LISTS = {"type": "ArrayList", "items": {"type": "long"}}
TEXTS = {"type": "Array", "items": {"type": "String"}}


@pytest.mark.parametrize(
    ("kind", "allowed", "written"),
    [
        ({"type": "long"}, [5], "5L"),
        ({"type": "float"}, [1.5], "1.5f"),
        ({"type": "boolean"}, [True], "true"),
        ({"type": "char"}, ["x"], "'x'"),
        ({"type": "any"}, ["", "mapArea"], "mapArea"),
        (TEXTS, [["a", "b"]], "new Object[]{a, b}"),
        (LISTS, [[1, 2]], "new ArrayList<>(Arrays.asList(1L, 2L))"),
        ({"type": "HashMap"}, [{"k": ["", 3]}], 'new HashMap<>() {{ put("k", 3); }}'),
    ],
)
def test_an_answer_is_written_in_java(kind, allowed, written):
    function = {"name": "a.f", "parameters": {"properties": {"x": kind}, "required": []}}
    entry = {"function": [function], "ground_truth": [{"a.f": {"x": allowed}}]}

    assert answer_calls(entry, "Java") == [("a_f", {"x": written})]


def test_an_optional_argument_is_left_out_and_a_required_one_is_not():
    function = {"name": "f", "parameters": {"properties": {"x": {}, "y": {}}, "required": ["y"]}}
    entry = {"function": [function], "ground_truth": [{"f": {"x": [""], "y": [""], "z": [1]}}]}

    assert answer_calls(entry, "Python") == [("f", {"y": ""})]


@pytest.mark.engine
@pytest.mark.parametrize("category", CATEGORIES)
async def test_the_leaderboard_accepts_its_ground_truth_on_every_task(category):
    entry = world(f"bfcl:{category}")
    full_marks = entry.make().full_marks

    refused = {
        task.id
        for task in entry.task_set()
        if (await play(entry, oracle_of(entry), task)).reward != full_marks
    }

    known = {id for id in IMPOSSIBLE if id.startswith(f"{category}_") and id[len(category) + 1].isdigit()}
    assert refused == known


def written(name, arguments):
    """Return a call whose arguments are this text."""
    message = tool_call_message(name)
    message["tool_calls"][0]["function"]["arguments"] = arguments
    return message


@pytest.mark.engine
async def test_names_and_values_of_arguments_never_become_code():
    entry = world("bfcl:multi_turn_base")
    env, _ = await begun(entry, entry.task_set()[0].data)

    for arguments in ('{"a=1) or exit(": 1}', '{"folder": "x", "b,*[print()]": 2}', "[1]", "{", '"text"'):
        assert (await told(env, written("cd", arguments))).startswith("Error during execution: ")
    assert env._bench.turns == [[[]] * 5]
    said = tool_call_message("echo", content="'+str(__import__('os').getpid())+'")
    assert "__import__" in await told(env, said)


@pytest.mark.engine
async def test_a_function_that_is_added_is_described_and_called_by_its_tool():
    entry = world("bfcl:multi_turn_miss_func")
    env, _ = await begun(entry, entry.task_set()[0].data)
    assert "sort" not in [tool["function"]["name"] for tool in env.tool_schemas]

    added = [await told(env, "I cannot.") for _ in range(3)][-1]
    call = tool_call_message("call_added_function", name="sort", arguments={"file_name": "nothing.txt"})

    assert '"name": "sort"' in added
    assert "I have updated some more functions you can choose from" in added
    assert "nothing.txt" in await told(env, call)


@pytest.mark.engine
async def test_more_than_twenty_steps_in_a_turn_end_the_episode_with_nothing_but_in_the_last_one():
    entry = world("bfcl:multi_turn_base")
    tasks = entry.task_set()
    played = await play(entry, lambda *_: tool_call_message("pwd"), tasks[0])
    oracle, rewards = oracle_of(entry), set()
    for task in tasks.take(8):
        env = entry.make()

        def stubborn(messages, task, rng, env=env):
            message = oracle(messages, task, rng)
            if len(env._bench.turns) < len(env._entry["question"]) or message.get("tool_calls"):
                return message
            return tool_call_message(env.tool_schemas[0]["function"]["name"])  # without its arguments

        rewards.add((await play(entry, stubborn, task, env=env)).reward)

    assert (len(played.turn_rewards), played.stop_reason, played.reward) == (21, "env_terminated", 0.0)
    assert 1.0 in rewards


@pytest.mark.engine
async def test_a_snapshot_goes_back_to_the_state_of_the_objects():
    entry = world("bfcl:multi_turn_base")
    env, _ = await begun(entry, entry.task_set()[0].data)
    make = tool_call_message("mkdir", dir_name="new")
    await told(env, make)
    before = env.snapshot()
    await told(env, tool_call_message("rmdir", dir_name="new"))
    env.restore(before)

    assert "exists" in await told(env, make)


@pytest.mark.engine
def test_the_package_of_clients_stays_unimported():
    world("bfcl:multi_turn_long_context")
    code = (
        "import sys; from agentenv.envs import spec\n"
        "print(len(spec('bfcl:multi_turn_long_context').task_set()), 'anthropic' in sys.modules)"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.split() == ["200", "False"]
    assert set(MULTI_TURN) <= set(CATEGORIES)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("category", "reward"), [("irrelevance", 1.0), ("live_relevance", 0.0), ("simple_python", 0.0)]
)
async def test_a_call_that_cannot_be_read_is_no_call_and_is_not_written_again(category, reward):
    entry = world(f"bfcl:{category}")
    broken = 'I call it. <tool_call>{"name": "f", "arguments": {</tool_call>'
    played = await play(entry, lambda *_: broken, entry.task_set()[0])
    assert (played.reward, len(played.turn_rewards)) == (reward, 1)

    if category != "live_relevance":
        for arguments in ("null", "5", "[1]", '"x"', "{"):
            env, _ = await begun(entry, entry.task_set()[0].data)
            name = env.tool_schemas[0]["function"]["name"]
            await env.advance(Action.of(written(name, arguments)))
            assert (await env.end("env_terminated")).reward == reward
