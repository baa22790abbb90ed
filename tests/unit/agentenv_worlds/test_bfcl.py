"""The Berkeley Function-Calling Leaderboard, driven through its own package where that is installed."""

import json
import subprocess
import sys

import pytest

from agentenv.cli import main
from agentenv.core import Action, Context, DependencyMissing, UnknownEnvironment
from agentenv.envs import spec
from agentenv.runs import evaluate
from agentenv.testing import check_env, oracle_of, play, tool_call_message
from agentenv_worlds.bfcl.answers import answer_calls, ground_truth_calls
from agentenv_worlds.bfcl.data import CATEGORIES, MULTI_TURN, entry_of, schema_of

IMPOSSIBLE = {
    "live_simple_106-63-0",  # a required argument has no allowed value
    "live_simple_112-68-0",
    "live_multiple_862-181-3",  # the answer has an argument that the function does not have
    "live_multiple_964-207-0",
    "simple_java_36",  # the checker reads numbers in a list of `any` as texts
    "simple_java_65",
}
"""Tasks whose own ground truth the leaderboard's checker refuses, however it is written."""


def needs_bfcl():
    pytest.importorskip("bfcl_eval", reason="UNTESTED: bfcl-eval is not installed")
    pytest.importorskip("mpmath", reason="UNTESTED: mpmath is not installed")


def test_the_error_for_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("agentenv_worlds.bfcl.data.find_spec", lambda name: None)

    with pytest.raises(DependencyMissing, match="pip install --no-deps bfcl-eval"):
        spec("bfcl:multi_turn_base")


def test_an_unknown_category_is_told_with_the_nearest_one():
    with pytest.raises(UnknownEnvironment, match="did you mean 'multi_turn_base'"):
        spec("bfcl:multi_turn_bas")


def test_ground_truth_is_read_with_and_without_names_of_arguments():
    function = {"name": "mv", "parameters": {"properties": {"source": {}, "destination": {}}}}
    entry = {
        "function": [function],
        "missed_function": {},
        "ground_truth": [["mv('a', destination='b')", "mv(source='c', destination=[1, -2])"]],
    }

    assert ground_truth_calls(entry, 0) == [
        ("mv", {"source": "a", "destination": "b"}),
        ("mv", {"source": "c", "destination": [1, -2]}),
    ]


@pytest.mark.parametrize(
    ("kind", "allowed", "written"),
    [
        ({"type": "long"}, [5], "5L"),
        ({"type": "float"}, [1.5], "1.5f"),
        ({"type": "boolean"}, [True], "true"),
        ({"type": "char"}, ["x"], "'x'"),
        ({"type": "any"}, ["", "mapArea"], "mapArea"),
        ({"type": "Array", "items": {"type": "String"}}, [["a", "b"]], "new Object[]{a, b}"),
        (
            {"type": "ArrayList", "items": {"type": "long"}},
            [[1, 2]],
            "new ArrayList<>(Arrays.asList(1L, 2L))",
        ),
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
    needs_bfcl()
    entry = spec(f"bfcl:{category}")

    refused = {
        task.id
        for task in entry.task_set()
        if (await play(entry, oracle_of(entry), task)).reward != entry.make().full_marks
    }

    assert refused == {
        id for id in IMPOSSIBLE if id.startswith(f"{category}_") and id[len(category) + 1].isdigit()
    }


@pytest.mark.engine
@pytest.mark.parametrize("category", ["multi_turn_base", "multi_turn_miss_func", "parallel", "irrelevance"])
async def test_the_checker_passes_on_bfcl(category):
    needs_bfcl()
    # Silence is the right answer where no function fits.
    report = await check_env(
        f"bfcl:{category}", tasks=4, trivial_limit=1.0 if category == "irrelevance" else 0.2
    )

    assert report.ok, str(report)


async def begun(category, number):
    entry = spec(f"bfcl:{category}")
    task = entry.task_set()[number]
    env = entry.make()
    first = await env.begin(task.data, seed=0, context=Context())
    return env, task, first


@pytest.mark.engine
async def test_a_wrong_call_is_refused_by_the_checker():
    needs_bfcl()
    entry = spec("bfcl:multi_turn_base")
    task = entry.task_set()[0]
    oracle = oracle_of(entry)

    def wrong(messages, task, rng):
        message = oracle(messages, task, rng)
        for call in message.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict.fromkeys(arguments, "nowhere"))
        return message

    env = entry.make()
    played = await play(entry, wrong, task, env=env)

    assert played.reward == 0.0
    assert env.verdict["error_type"].startswith("multi_turn:")


@pytest.mark.engine
@pytest.mark.parametrize(
    "arguments",
    ['{"a=1) or exit(": 1}', '{"folder": "x", "b,*[print()]": 2}', "[1]", "{", '"text"'],
)
async def test_names_of_arguments_never_become_code(arguments):
    needs_bfcl()
    env, _, _ = await begun("multi_turn_base", 0)
    message = tool_call_message("cd")
    message["tool_calls"][0]["function"]["arguments"] = arguments

    step = await env.advance(Action.of(message))

    assert step.tool_results[0].content.startswith("Error during execution: ")
    assert env._bench.turns == [[[]]]


@pytest.mark.engine
async def test_values_are_passed_on_as_texts_and_not_as_code():
    needs_bfcl()
    env, _, _ = await begun("multi_turn_base", 0)

    step = await env.advance(
        Action.of(tool_call_message("echo", content="'+str(__import__('os').getpid())+'"))
    )

    assert "__import__" in step.tool_results[0].content


@pytest.mark.engine
async def test_a_function_that_is_added_is_described_and_called_by_its_tool():
    needs_bfcl()
    env, task, _ = await begun("multi_turn_miss_func", 0)
    assert "sort" not in [tool["function"]["name"] for tool in env.tool_schemas]

    for _ in range(3):
        step = await env.advance(Action.of("I cannot."))
    added = step.messages[-1]["content"]
    called = await env.advance(
        Action.of(
            tool_call_message("call_added_function", name="sort", arguments={"file_name": "nothing.txt"})
        )
    )

    assert '"name": "sort"' in added
    assert "I have updated some more functions you can choose from" in added
    assert "nothing.txt" in called.tool_results[0].content
    assert task.id == "multi_turn_miss_func_0"


@pytest.mark.engine
async def test_more_than_twenty_steps_in_a_turn_end_the_episode_with_nothing():
    needs_bfcl()
    entry = spec("bfcl:multi_turn_base")
    task = entry.task_set()[0]

    played = await play(entry, lambda messages, task, rng: tool_call_message("pwd"), task)

    assert (len(played.turn_rewards), played.stop_reason, played.reward) == (21, "env_terminated", 0.0)


@pytest.mark.engine
async def test_a_snapshot_goes_back_to_the_state_of_the_objects():
    needs_bfcl()
    env, _, _ = await begun("multi_turn_base", 0)
    make = Action.of(tool_call_message("mkdir", dir_name="new"))
    await env.advance(make)
    before = env.snapshot()
    await env.advance(Action.of(tool_call_message("rmdir", dir_name="new")))
    env.restore(before)

    again = await env.advance(make)

    assert "already exists" in again.tool_results[0].content or "exists" in again.tool_results[0].content


@pytest.mark.engine
def test_a_specification_of_bfcl_survives_json_and_the_package_stays_unimported():
    needs_bfcl()
    code = (
        "import sys; from agentenv.envs import EnvSpec, spec\n"
        "entry = spec('bfcl:multi_turn_long_context')\n"
        "print(len(EnvSpec.from_json(entry.to_json()).task_set()), 'anthropic' in sys.modules)"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.split() == ["200", "False"]
    assert set(MULTI_TURN) <= set(CATEGORIES)


def test_the_list_of_libraries_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("agentenv.envs.worlds.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="0"):
        main(["list", "bfcl", "--json"])
    (peer,) = json.loads(capsys.readouterr().out)["libraries"]

    assert (peer["name"], peer["needs"]) == (
        "bfcl:CATEGORY",
        "pip install mpmath && pip install --no-deps bfcl-eval",
    )
    with pytest.raises(SystemExit, match="0"):
        main(["list", "bfcl"])
    assert "(needs pip install mpmath" in capsys.readouterr().out


@pytest.mark.engine
@pytest.mark.parametrize(
    ("category", "reward"), [("irrelevance", 1.0), ("live_relevance", 0.0), ("simple_python", 0.0)]
)
def test_a_message_whose_call_cannot_be_read_has_no_call_and_is_not_written_again(category, reward):
    needs_bfcl()
    broken = 'I call it. <tool_call>{"name": "f", "arguments": {</tool_call>'

    result = evaluate(f"bfcl:{category}", f"scripted:{broken}", num_tasks=3)

    assert [row.reward for row in result.summaries] == [reward] * 3
    assert {row.num_turns for row in result.summaries} == {1}


@pytest.mark.engine
@pytest.mark.parametrize("arguments", ["null", "5", "[1]", '"x"', "{"])
async def test_arguments_that_are_no_object_are_a_call_that_cannot_be_read(arguments):
    needs_bfcl()
    for category, reward in (("irrelevance", 1.0), ("simple_python", 0.0)):
        env, _, _ = await begun(category, 0)
        message = tool_call_message(env.tool_schemas[0]["function"]["name"])
        message["tool_calls"][0]["function"]["arguments"] = arguments
        await env.advance(Action.of(message))

        assert (await env.end("env_terminated")).reward == reward


@pytest.mark.engine
async def test_too_many_steps_are_scored_in_the_last_turn_of_the_user_alone():
    needs_bfcl()
    entry = spec("bfcl:multi_turn_base")
    oracle = oracle_of(entry)

    async def scores(in_the_last: bool) -> set[float]:
        found = set()
        for task in entry.task_set().take(8):
            env = entry.make()

            def stubborn(messages, task, rng, env=env):
                message = oracle(messages, task, rng)
                is_last = len(env._bench.turns) == len(env._entry["question"])
                if is_last is not in_the_last or message.get("tool_calls"):
                    return message
                return tool_call_message(env.tool_schemas[0]["function"]["name"])  # without its arguments

            played = await play(entry, stubborn, task, env=env)
            assert env._forced
            found.add(played.reward)
        return found

    assert 1.0 in await scores(in_the_last=True)
    assert await scores(in_the_last=False) == {0.0}


@pytest.mark.engine
def test_items_of_lists_are_no_floats_and_results_are_described():
    needs_bfcl()

    def parts(schema):
        yield schema
        for part in [*schema.get("properties", {}).values(), schema.get("items", {})]:
            if part:
                yield from parts(part)

    schemas = [schema for category in CATEGORIES for schema in offered(category)]
    items = [part["items"] for schema in schemas for part in parts(schema["parameters"]) if "items" in part]

    assert any(item["type"] == "number" for item in items)
    assert not [item for item in items if "format" in item]
    assert all("response" in schema for schema in offered("multi_turn_base"))


def offered(category):
    for task in spec(f"bfcl:{category}").task_set().take(60):
        for function in entry_of(category, task.id)["function"]:
            yield schema_of(function, category)["function"]
