"""Environments of verifiers, played through the package itself where it is installed."""

import runpy
import sys
import types
import warnings
from pathlib import Path

import pytest

from agentenv.core import (
    Action,
    Context,
    DependencyMissing,
    EnvironmentMisuse,
    SandboxCrashed,
    UnknownEnvironment,
    UsageError,
)
from agentenv.envs import make, spec
from agentenv.testing import check_env, play, tool_call_message
from agentenv_worlds.verifiers.env import Verifiers

ROWS = [{"question": f"What is {n} + 20?", "answer": str(n + 20)} for n in range(30, 36)]


def test_a_verifiers_that_is_missing_or_too_new_is_named(monkeypatch):
    for package in (None, types.ModuleType("verifiers")):
        monkeypatch.setitem(sys.modules, "verifiers", package)
        with pytest.raises(DependencyMissing, match=r"pip install 'verifiers>=0.1.14,<0.4'"):
            spec("verifiers:anything")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ValueError("no such package"), "verifiers has no environment 'shop': no such package"),
        (RuntimeError("no key"), "verifiers cannot load the environment 'shop': RuntimeError: no key"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_told_before_any_episode(monkeypatch, raised, told):
    package = types.ModuleType("verifiers")
    package.MultiTurnEnv = object

    def load_environment(name):
        raise raised

    package.load_environment = load_environment
    monkeypatch.setitem(sys.modules, "verifiers", package)

    with pytest.raises(UsageError) as caught:
        spec("verifiers:shop")

    assert caught.value.message == told
    assert caught.value.remedy


def test_verifiers_without_a_name_is_refused():
    with pytest.raises(UsageError, match="names no environment"):
        spec("verifiers:")


@pytest.fixture
def vf():
    package = pytest.importorskip("verifiers", reason="UNTESTED: verifiers is not installed")
    if not hasattr(package, "MultiTurnEnv"):
        pytest.skip("UNTESTED: this verifiers has no environments that can be stepped")
    return package


@pytest.fixture
def rows(vf):
    import datasets

    return datasets.Dataset.from_list(ROWS)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return int(a) + int(b)


async def right(completion, answer, **kwargs):
    return float(bool(completion) and answer in completion[-1]["content"].rstrip(".").split()[-1:])


@pytest.fixture
def sums(vf, rows):
    return vf.ToolEnv(
        dataset=rows.select(range(4)),
        eval_dataset=rows.select(range(4, 6)),
        tools=[add],
        rubric=vf.Rubric(funcs=[right]),
        system_prompt="Use the tool.",
        max_turns=4,
    )


def calling(*pairs):
    messages = [tool_call_message(name, **arguments) for name, arguments in pairs]
    calls = [message["tool_calls"][0] | {"id": f"c{n}"} for n, message in enumerate(messages)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def says(text):
    return {"role": "assistant", "content": text}


async def begun(env, row):
    first = await env.begin({"example_id": 0, **row}, seed=0, context=Context())
    return [message["content"] for message in first.messages]


@pytest.fixture
def installed(monkeypatch, sums):
    """The sums as an installed environment, named as verifiers names one."""
    module = types.ModuleType("test_sums")
    module.load_environment = lambda: sums
    monkeypatch.setitem(sys.modules, "test_sums", module)
    return "verifiers:test-sums"


@pytest.mark.engine
async def test_a_tool_environment_is_played_and_scored_by_its_rubric(installed):
    entry = spec(installed)
    task = entry.task_set("test")[0]
    solution = [
        calling(("add", {"a": 34, "b": 20}), ("add", {"a": 4, "b": "x"}), ("sub", {})),
        says("It is 54."),
    ]

    def policy(messages, task, rng):
        return solution[sum(one["role"] == "assistant" for one in messages)]

    good = await play(entry, policy, task)
    poor = await play(entry, lambda messages, task, rng: "no idea", task)

    assert [one["content"] for one in good.messages[:2]] == ["Use the tool.", "What is 34 + 20?"]
    assert good.tool_results[0].text == "54"
    assert "sub" in good.tool_results[2].text
    assert (good.reward, good.stop_reason, poor.reward) == (1.0, "env_terminated", 0.0)
    assert good.rewards["total_tool_calls"] == 3.0


@pytest.mark.engine
def test_the_example_of_a_port_gives_the_same_rewards(vf, capsys):
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "verifiers_port.py"), run_name="__main__")

    theirs, ours = (line.split(": ")[1] for line in capsys.readouterr().out.splitlines())
    assert theirs == ours == "[1.0, 0.0, 1.0, 0.0, 1.0, 0.0]"


@pytest.mark.engine
async def test_rows_are_tasks_of_their_split_and_the_specification_survives_json(installed):
    entry = spec(installed)

    assert [len(entry.task_set(split)) for split in ("train", "test")] == [4, 2]
    assert entry.task_set()[1].id == "train-1"
    assert type(entry).from_json(entry.to_json()).task_set("test")[1].data["answer"] == "55"
    assert [one["function"]["name"] for one in make(entry).unwrapped.tool_schemas] == ["add"]
    with pytest.raises(UnknownEnvironment, match="no environment 'nothing-there'"):
        spec("verifiers:nothing-there")


@pytest.mark.engine
async def test_the_checker_finds_nothing_wrong(installed):
    report = await check_env(installed, tasks=3, fuzz_calls=60)

    assert report.ok, str(report)


@pytest.fixture
def guess(vf, rows):
    class Guess(vf.MultiTurnEnv):
        """Guess the row's answer."""

        async def setup_state(self, state):
            state["tries"] = 0
            return state

        async def env_response(self, messages, state, **kwargs):
            said = messages[-1]["content"]
            state["tries"] += 1
            if said == "crash":
                raise vf.SandboxError("gone")
            if said == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "Right."}]
                return []
            return [{"role": "user", "content": f"Wrong, try {state['tries'] + 1}."}]

    def early(state, **kwargs):
        return 1.0 / state["tries"] if state["stop_condition"] == "has_final_env_response" else 0.0

    return Guess(dataset=rows, rubric=vf.Rubric(funcs=[early]), max_turns=3)


@pytest.mark.engine
async def test_a_last_word_of_the_environment_ends_the_episode(guess):
    env = Verifiers(guess)
    await begun(env, {"prompt": [{"role": "user", "content": "Guess."}], "answer": "7"})
    wrong, hit = await env.advance(Action.of(says("3"))), await env.advance(Action.of(says("7")))

    assert [one["content"] for one in wrong.messages] == ["Wrong, try 2."]
    assert ([one["content"] for one in hit.messages], hit.terminated) == (["Right."], True)
    assert (await env.end("env_terminated")).reward == 0.5
    await env.shutdown()


@pytest.mark.engine
async def test_its_turn_limit_truncates_but_a_single_turn_is_an_end(vf, rows, guess):
    games, questions = Verifiers(guess), Verifiers(vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right])))
    row = {"prompt": [{"role": "user", "content": "Guess."}], "answer": "7"}
    for env in (games, questions):
        await begun(env, row)
    last = [await games.advance(Action.of(says("3"))) for _ in range(3)][-1]
    only = await questions.advance(Action.of(says("It is 7.")))

    assert (last.truncated, last.terminated) == (True, False)
    assert (only.truncated, only.terminated) == (False, True)
    assert [(await games.end("env_truncated")).reward, (await questions.end("env_terminated")).reward] == [
        0.0,
        1.0,
    ]


@pytest.mark.engine
async def test_infrastructure_that_fails_aborts_and_is_cleaned_up(guess, vf):
    cleaned = []

    class Careful(type(guess)):
        @vf.cleanup
        async def free(self, state):
            cleaned.append(state["tries"])

    env = Verifiers(Careful(dataset=guess.dataset, max_turns=3))
    await begun(env, {"prompt": [{"role": "user", "content": "Guess."}], "answer": "7"})
    with pytest.raises(SandboxCrashed, match="gone"):
        await env.advance(Action.of(says("crash")))
    await env.shutdown()
    await env.shutdown()

    assert cleaned == [1]


@pytest.mark.engine
async def test_what_cannot_be_stepped_is_refused_in_words(vf, rows, guess):
    class Own(vf.MultiTurnEnv):
        async def get_model_response(self, state, prompt, **kwargs): ...

        async def env_response(self, messages, state, **kwargs): ...

    class Rewrites(type(guess)):
        async def get_prompt_messages(self, state):
            return [vf.UserMessage(content=str(len(state["trajectory"])))]

    def compared(states) -> list[float]:
        return [0.0 for _ in states]

    ranked = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[compared]))
    with warnings.catch_warnings(action="ignore"):
        prompts = [{"prompt": "Say 4:", "answer": "4"}]
        text = vf.SingleTurnEnv(dataset=type(rows).from_list(prompts), message_type="completion")
    for thing, words in [
        (Own(dataset=rows), "calls the model itself"),
        (ranked, "groups of episodes"),
        (text, "message_type='chat'"),
        (vf.EnvGroup(envs=[guess, ranked], env_names=["guess", "ranked"]), "groups of episodes"),
        (3, "not a MultiTurnEnv"),
    ]:
        with pytest.raises(UsageError, match=words):
            Verifiers(thing)
    env = Verifiers(Rewrites(dataset=rows))
    await begun(env, {"prompt": [{"role": "user", "content": "Guess."}], "answer": "7"})
    with pytest.raises(EnvironmentMisuse, match="rewrites messages that the model was already shown"):
        await env.advance(Action.of(says("1")))
    await env.shutdown()


@pytest.mark.engine
async def test_a_group_plays_each_row_in_the_environment_that_it_names(vf, rows, sums, guess):
    inner = vf.EnvGroup(envs=[sums, guess], env_names=["sums", "guess"])
    alone = vf.EnvGroup(envs=[guess], env_names=["guess"])
    group = vf.EnvGroup(envs=[alone, inner], env_names=["alone", "inner"])
    found = {}
    for row in group.get_dataset():
        found.setdefault(str(row["info"]["env_id"]), row)

    def answer(row):
        return calling(("add", {"a": 1, "b": 2})) if "sums" in row["info"]["env_id"] else says(row["answer"])

    outcomes = []
    for row in found.values():
        env = Verifiers(group)
        shown = await begun(env, row)
        await env.advance(Action.of(answer(row)))
        outcomes.append((shown[-1], len(env.tool_schemas), (await env.end("max_turns")).reward is not None))

    assert list(found) == ["['alone', 'guess']", "['inner', 'sums']", "['inner', 'guess']"]
    assert [(tools, scored) for _, tools, scored in outcomes] == [(0, True), (1, True), (0, True)]
