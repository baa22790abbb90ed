"""AgentDojo's own pipeline and scorers, beside our episodes."""

from __future__ import annotations

import importlib
import json
import random
import warnings
from typing import Any

from agentenv.envs import spec
from agentenv.testing import play
from agentenv_worlds.agentdojo import env, package
from agreement import Agreement
from agreement.bfcl import said
from agreement.change import changed_calls


def _pipeline(lines: list[tuple[str, list[tuple[str, str]]]]) -> Any:
    """Return AgentDojo's usual pipeline around a model that says these lines: a text, and calls."""
    tools = package.module("agent_pipeline.tool_execution")
    with package._without_clients():
        basic: Any = importlib.import_module("agentdojo.agent_pipeline.basic_elements")
        base: Any = importlib.import_module("agentdojo.agent_pipeline.base_pipeline_element")
    call = package.module("functions_runtime").FunctionCall
    left = iter(lines)

    class Model(base.BasePipelineElement):
        def query(
            self, query: str, runtime: Any, env: Any = None, messages: Any = (), extra_args: Any = None
        ) -> Any:
            text, calls = next(left, ("Done.", []))
            made = [
                call(function=name, args=json.loads(arguments), id=str(n))
                for n, (name, arguments) in enumerate(calls)
            ]
            content = [package.module("types").text_content_block_from_string(text)] if text else None
            reply = {"role": "assistant", "content": content, "tool_calls": made or None}
            return query, runtime, env, [*messages, reply], extra_args or {}

    model = Model()
    loop = tools.ToolsExecutionLoop([tools.ToolsExecutor(), model])

    class Whole(base.BasePipelineElement):
        def query(
            self, query: str, runtime: Any, env: Any = None, messages: Any = (), extra_args: Any = None
        ) -> Any:
            state: Any = (query, runtime, env, messages, extra_args or {})
            for element in (basic.SystemMessage(env_module_system()), basic.InitQuery(), model, loop):
                state = element.query(*state)
            return state

    return Whole()


def env_module_system() -> str:
    """Return the system message that our episodes show."""
    return env._system_message()


async def compare(world: str, answers: int, seed: int) -> Agreement:
    """Compare random runs of all suites, attacked and not; malformed calls are left out, which end a run there."""
    result, rng = Agreement(world), random.Random(seed)
    for number in range(answers):
        suite = package.SUITES[number % len(package.SUITES)]
        split = rng.choice(["test", "attacked"])
        entry = spec(f"agentdojo:{suite}")
        task = rng.choice(list(entry.task_set(split)))
        fields = task.data
        names = suite, str(fields["user_task"]), str(fields["injection_task"])
        calls, answer = env._ground_truth(*names)
        kind, made = changed_calls([(name, dict(values)) for name, values in calls], rng)
        if kind == "broken":
            continue
        if names[2] and rng.random() < 0.4:  # the attacker is obeyed
            goal = package.suite_of(suite).injection_tasks[names[2]]
            data = package.fresh(suite, names[1], names[2], env.ATTACK, env.MODEL)
            made += [(call.function, json.dumps(dict(call.args))) for call in goal.ground_truth(data)]
        text = rng.choice([answer, answer, "Done.", answer[: len(answer) // 2] or "x"])
        lines = [("", [call]) for call in made] if rng.random() < 0.7 else [("", made)] if made else []
        if rng.random() < 0.05 and made:
            lines = [("", [made[0]])] * 15 + lines
        lines.append((text or "Done.", []))
        injections = {}
        if names[2]:
            parts = package.suite_of(suite)
            attack = package.attack_of(suite, env.ATTACK, env.MODEL)
            injections = attack.attack(parts.user_tasks[names[1]], parts.injection_tasks[names[2]])
        goal = package.suite_of(suite).injection_tasks[names[2]] if names[2] else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            utility, security = package.suite_of(suite).run_task_with_pipeline(
                _pipeline(lines), package.suite_of(suite).user_tasks[names[1]], goal, injections
            )
        ours = iter(lines)

        def policy(*_: Any, ours: Any = ours) -> Any:
            text, calls = next(ours, ("Done.", []))
            return said(calls) if calls else {"role": "assistant", "content": text}

        played = await play(entry, policy, task)
        obeyed = bool(security) if goal is not None else False
        there = {"utility": float(utility), "security": float(not obeyed)}
        result.add(there["utility"] * there["security"], played.reward, (task.id, kind, lines))
        if played.rewards != there:
            result.differ.append(f"{task.id}: {there} there, {played.rewards} here")
    return result
