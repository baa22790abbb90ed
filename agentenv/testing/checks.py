"""The checks of an environment, in the order of the report."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from agentenv.context import Context
from agentenv.env import Env
from agentenv.envspec import EnvSpec
from agentenv.errors import AgentEnvError, EnvironmentMisuse, ToolDefinitionError, UsageError
from agentenv.filling import wanted_by
from agentenv.messages import Message, ToolErrorKind, text_of
from agentenv.seeding import derive_seed
from agentenv.tasks import Task
from agentenv.testing.episodes import Played, Policy, oracle_of, play, play_by_turns
from agentenv.testing.fuzz import random_call
from agentenv.toolenv import ToolEnv

__all__ = ["CHECKS", "Problem", "Skipped", "Subject"]

_ANSWER_FIELDS = frozenset({"answer", "expected", "gold", "ground_truth", "label", "solution", "target"})
_NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
_WORD = re.compile(r"[\w./-]*\w")


class Problem(Exception):
    """Something is wrong with the environment."""


class Skipped(Exception):
    """A check that does not apply."""


@dataclass
class Subject:
    """The environment being checked, and what was played of it so far."""

    entry: EnvSpec
    tasks: int
    fuzz_calls: int
    seed: int
    trivial_limit: float
    plays: list[Played] = field(default_factory=list[Played])

    def some_tasks(self) -> list[Task]:
        """Return the tasks to play."""
        found = self.entry.task_set().take(self.tasks)
        if not found:
            raise Problem("there are no tasks")
        return found

    def seed_of(self, task: Task) -> int:
        """Return the seed of a task's episode."""
        return derive_seed(self.seed, task.id)

    async def play(self, policy: Policy, task: Task) -> Played:
        """Play a task; an exception says which task it was."""
        try:
            played = await play(self.entry, policy, task, seed=self.seed_of(task))
        except AgentEnvError as error:
            raise Problem(f"task {task.id}: {error}") from error
        except Exception as error:
            error.args = (f"task {task.id}: {error}",)
            raise
        self.plays.append(played)
        return played

    def policy(self) -> Policy:
        """Return the oracle, or a policy that calls tools at random and then speaks."""
        return oracle_of(self.entry) or _random_policy(self.entry.make())


async def check_recipe(subject: Subject) -> str:
    """The specification is one that can be written down, and its tasks have unique ids."""
    tasks = subject.some_tasks()
    ids = [task.id for task in tasks]
    if len(set(ids)) < len(ids):
        raise Problem("two tasks have the same id")
    text = f"{len(tasks)} tasks tried"
    try:
        again = EnvSpec.from_json(subject.entry.to_json())
    except UsageError as error:
        return f"{text}; works here only: {error}"
    if again.to_json() != subject.entry.to_json():
        raise Problem("the specification changes when it is written as JSON and read back")
    return f"{text}; the specification survives JSON"


async def check_schema(subject: Subject) -> str:
    """Tools have names that providers take, descriptions, and schemas that are always the same."""
    first, second = subject.entry.make(), subject.entry.make()
    task = subject.some_tasks()[0]
    try:
        for env in (first, second):
            await env.begin(task.data, seed=0, context=Context())
        schemas = list(first.tool_schemas)
        if json.dumps(schemas) != json.dumps(list(second.tool_schemas)):
            raise Problem("two instances show different tools for the same task")
        names = [str(_function(schema)["name"]) for schema in schemas]
        for name in names:
            if not _NAME.match(name):
                raise Problem(
                    f"providers refuse the tool name {name!r}: letters, digits, _ and -, at most 64"
                )
        if len(set(names)) < len(names):
            raise Problem(f"two tools have one name: {', '.join(sorted(names))}")
        silent = [str(_function(one)["name"]) for one in schemas if not _function(one).get("description")]
        if silent:
            raise Problem(f"the model is told nothing about {', '.join(silent)}: write a docstring")
        if not schemas:
            return "no tools: the model acts in text"
        return f"{len(schemas)} tool{'s' if len(schemas) > 1 else ''}{_strict_note(first)}"
    finally:
        await first.shutdown()
        await second.shutdown()


async def check_determinism(subject: Subject) -> str:
    """The same seed and task give the same episode."""
    policy, tasks = subject.policy(), subject.some_tasks()
    for task in tasks:
        one, two = await subject.play(policy, task), await subject.play(policy, task)
        if one.messages[:1] != two.messages[:1] or one.story != two.story:
            place = next(
                (n for n, (a, b) in enumerate(zip(one.messages, two.messages, strict=False)) if a != b), -1
            )
            raise Problem(
                f"task {task.id} played twice with one seed differs at message {place}: draw from "
                "self.np_random, never from random, time or hash order"
            )
    return f"{len(tasks)} tasks played twice with one seed: the same episodes"


async def check_oracle(subject: Subject) -> str:
    """The author's own solution gets full marks on every task."""
    oracle = oracle_of(subject.entry)
    if oracle is None:
        raise Skipped("no oracle: write a function oracle(messages, task, rng) beside the class")
    marks, tasks = subject.entry.make().full_marks, subject.some_tasks()
    played = [await subject.play(oracle, task) for task in tasks]
    short = [one for one in played if one.reward is None or one.reward < marks - 1e-6]
    if short:
        worst = short[0]
        raise Problem(
            f"the oracle gets {worst.reward} of {marks:g} on task {worst.task_id} (stop reason "
            f"{worst.stop_reason}), and less than full marks on {len(short)} of {len(tasks)}"
        )
    return f"full marks ({marks:g}) on {len(tasks)} of {len(tasks)} tasks"


async def check_trivial(subject: Subject) -> str:
    """Policies that do not think score low."""
    entry, tasks = subject.entry, subject.some_tasks()
    marks, limit = entry.make().full_marks, subject.trivial_limit
    scores: dict[str, float] = {}
    for name, policy in (await _trivial_policies(subject, tasks)).items():
        # The constant is the right answer to the first task: it is judged by the others.
        tried = tasks[1:] if name == "constant" and len(tasks) > 1 else tasks
        rewards = [(await subject.play(policy, task)).reward or 0.0 for task in tried]
        scores[name] = fmean(rewards) / marks
    high = {name: score for name, score in scores.items() if score > limit}
    if high:
        told = ", ".join(f"{name} {score:.2f}" for name, score in high.items())
        raise Problem(
            f"policies without thought score too much of the full marks: {told} (at most {limit:g})"
        )
    return ", ".join(f"{name} {score:.2f}" for name, score in scores.items())


async def check_gym(subject: Subject) -> str:
    """Gymnasium's own checker passes, and the rules that it does not ask for hold."""
    from gymnasium.utils.env_checker import check_env

    def run() -> list[str]:
        env = subject.entry.make()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_env(env, skip_render_check=True)
        env.close()
        env.close()
        return [str(one.message) for one in caught]

    try:
        warned = await asyncio.to_thread(run)
    except AssertionError as error:
        raise Problem(f"Gymnasium's checker: {str(error).splitlines()[0]}") from error
    if warned:
        raise Problem(f"Gymnasium's checker warns: {warned[0].splitlines()[0]}")
    return "Gymnasium's checker passes; closing twice is fine"


async def check_ends(subject: Subject) -> str:
    """An episode ends once, in one way, and takes no step after that."""
    task = subject.some_tasks()[0]
    env = subject.entry.make()
    try:
        await env.begin(task.data, seed=0, context=Context())
        outcomes = [await env.end("max_turns"), await env.end("max_turns")]
        if outcomes[0] != outcomes[1]:
            raise Problem("ending an episode twice gives two different rewards")
        try:
            await env.advance({"role": "assistant", "content": "?"})
        except EnvironmentMisuse:
            pass
        else:
            raise Problem("step after the end of an episode does not raise")
        await env.begin(task.data, seed=0, context=Context())
    finally:
        await env.shutdown()
    return "one verdict however often asked; a step after the end raises; reset starts anew"


async def check_fuzz(subject: Subject) -> str:
    """Tool calls drawn from the schema, right and wrong, never crash a tool."""
    env, rng = subject.entry.make(), random.Random(subject.seed)
    tasks, made, refused = subject.some_tasks(), 0, 0
    try:
        while made < subject.fuzz_calls:
            task = tasks[made % len(tasks)]
            first = await env.begin(task.data, seed=subject.seed_of(task), context=Context())
            schemas = list(env.tool_schemas)
            if not schemas:
                raise Skipped("no tools")
            said = _WORD.findall(" ".join(map(text_of, first.messages)))
            for _ in range(10):
                call: Any = random_call(schemas, rng, made, said)
                result = await env.advance({"role": "assistant", "content": None, "tool_calls": [call]})
                made += 1
                for answer in result.tool_results:
                    said += _WORD.findall(answer.text[:2000])
                    refused += answer.is_error
                    if answer.error_kind in {ToolErrorKind.EXCEPTION, ToolErrorKind.TIMEOUT}:
                        raise Problem(_crash(call, answer.detail or answer.text))
                if result.terminated or result.truncated or await env.is_finished():
                    break
    finally:
        await env.shutdown()
    return f"{made} random tool calls: no crash; {refused} refused with a message"


async def check_isolation(subject: Subject) -> str:
    """Episodes played in turns do not touch each other."""
    policy, tasks = subject.policy(), subject.some_tasks()
    pair = (tasks[0], tasks[len(tasks) // 2])
    alone = [(await subject.play(policy, task)).story for task in pair]
    together: list[Played] = []
    async with (
        aclosing(play_by_turns(subject.entry, policy, pair[0], seed=subject.seed_of(pair[0]))) as one,
        aclosing(play_by_turns(subject.entry, policy, pair[1], seed=subject.seed_of(pair[1]))) as two,
    ):
        running, last = [one, two], dict[int, Played]()
        while running:
            for turns in list(running):
                played = await anext(turns, None)
                if played is None:
                    running.remove(turns)
                else:
                    last[id(turns)] = played
        together = [last[id(one)], last[id(two)]]
    if [played.story for played in together] != alone:
        raise Problem(
            "two instances played in turns differ from each alone: state is shared between instances"
        )
    return "two instances played in turns give the same as each alone"


async def check_parallel(subject: Subject) -> str:
    """Many episodes at once give what they give one after another."""
    policy, tasks = subject.policy(), subject.some_tasks()[:8]
    jobs = [task for task in tasks for _ in range(4)]
    in_turn = {task.id: (await subject.play(policy, task)).story for task in tasks}
    at_once = await asyncio.gather(*(subject.play(policy, task) for task in jobs))
    wrong = [played.task_id for played in at_once if played.story != in_turn[played.task_id]]
    if wrong:
        raise Problem(f"{len(jobs)} episodes at once differ from one after another, on task {wrong[0]}")
    return f"{len(jobs)} episodes at once give the same as one after another"


async def check_overflow(subject: Subject) -> str:
    """A message and arguments of a megabyte are answered."""
    big = "9" * 1_000_000
    env, task = subject.entry.make(), subject.some_tasks()[0]
    began = time.perf_counter()
    longest = 0
    try:
        await env.begin(task.data, seed=0, context=Context())
        for schema in list(env.tool_schemas):
            properties: Mapping[str, Any] = _function(schema)["parameters"].get("properties", {})
            # A little under a megabyte in all: more is refused before it reaches the tool.
            arguments = json.dumps(dict.fromkeys(properties, big[: 800_000 // max(1, len(properties))]))
            call: Any = {
                "id": "call_big",
                "type": "function",
                "function": {"name": _function(schema)["name"], "arguments": arguments},
            }
            result = await env.advance({"role": "assistant", "content": None, "tool_calls": [call]})
            for answer in result.tool_results:
                longest = max(longest, len(answer.text))
                if answer.error_kind in {ToolErrorKind.EXCEPTION, ToolErrorKind.TIMEOUT}:
                    raise Problem(f"{answer.name} fails on a megabyte of input: {answer.detail[-200:]}")
            if result.terminated or result.truncated:
                break
        else:
            result = await env.advance({"role": "assistant", "content": big})
        await env.end("max_turns")
    finally:
        await env.shutdown()
    took = time.perf_counter() - began
    if took > 10:
        raise Problem(f"a megabyte of input takes {took:.0f} s")
    if longest > 500_000:
        raise Problem(f"a tool answered a megabyte of input with {longest} characters: say less")
    return f"a megabyte of input is answered in {took:.1f} s; longest tool result {longest} characters"


async def check_leak(subject: Subject) -> str:
    """The first observation does not tell the answer."""
    oracle, tasks = oracle_of(subject.entry), subject.some_tasks()
    env = subject.entry.make()
    hidden = _hidden_fields(env)
    tried = 0
    for task in tasks:
        reset = await env.begin(task.data, seed=subject.seed_of(task), context=Context())
        shown = "\n".join(text_of(message) for message in reset.messages)
        secrets = [str(task.data[name]) for name in task.data if name in hidden]
        if oracle is not None and env.ends_on_text:
            secrets.append((await subject.play(oracle, task)).messages[-1].get("content") or "")  # pyright: ignore[reportArgumentType]
        for secret in secrets:
            tried += 1
            if len(secret) >= 3 and re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", shown):
                raise Problem(f"the first observation of task {task.id} holds the answer {secret!r:.80}")
    await env.shutdown()
    if not tried:
        raise Skipped("no field of the tasks is known to hold an answer, and there is no oracle")
    return f"{tried} answers looked for in the first observations: none found"


async def check_runner(subject: Subject) -> str:
    """The runner plays it with a model that knows nothing, and every token is accounted for."""
    from agentenv.engine.factory import load_engine
    from agentenv.limits import RunLimits
    from agentenv.render import Renderer
    from agentenv.runner import Runner

    loaded = load_engine("mock")
    assert loaded.tokenizer is not None
    runner = Runner(
        loaded.engine,
        Renderer(loaded.tokenizer),
        RunLimits(max_turns=4, max_tokens_per_turn=64, max_context_tokens=65_536),
    )
    stops: dict[str, int] = {}
    tokens = 0
    async with aclosing(runner.run_groups(subject.entry, subject.some_tasks()[:4], 2)) as groups:
        async for group in groups:
            for one in group:
                if one.error is not None:
                    told = f"{one.error.boundary}: {one.error.type}: {one.error.message}"
                    raise Problem(f"task {one.task_id} under the runner: {told:.300}")
                stops[one.stop_reason.value] = stops.get(one.stop_reason.value, 0) + 1
                tokens += sum(map(len, one.sequences))
    told = ", ".join(f"{name} {count}" for name, count in sorted(stops.items()))
    return f"{sum(stops.values())} episodes of a mock model, {tokens} tokens: {told}"


async def check_speed(subject: Subject) -> str:
    """Say what a reset and a step cost."""
    if not subject.plays:
        await subject.play(subject.policy(), subject.some_tasks()[0])
    resets = [one.reset_s for one in subject.plays]
    steps = [took for one in subject.plays for took in one.step_s] or [0.0]
    return f"{1000 * fmean(steps):.2f} ms a step, {1000 * fmean(resets):.2f} ms a reset"


CHECKS: Mapping[str, Callable[[Subject], Awaitable[str]]] = {
    "recipe": check_recipe,
    "schema": check_schema,
    "determinism": check_determinism,
    "oracle": check_oracle,
    "trivial": check_trivial,
    "gym": check_gym,
    "ends": check_ends,
    "fuzz": check_fuzz,
    "isolation": check_isolation,
    "parallel": check_parallel,
    "overflow": check_overflow,
    "leak": check_leak,
    "runner": check_runner,
    "speed": check_speed,
}
"""Check by name; the first line of a check's text says what it holds."""


def _function(schema: Mapping[str, Any]) -> dict[str, Any]:
    return schema["function"]


def _strict_note(env: Env) -> str:
    if not isinstance(env, ToolEnv):
        return ""
    try:
        env.toolbox.schemas("strict")
    except ToolDefinitionError as error:
        return f"; not in strict mode: {error}"
    return ", strict mode too"


def _crash(call: Mapping[str, Any], detail: str) -> str:
    function = call["function"]
    last = detail.strip().splitlines()[-1] if detail.strip() else "no answer in time"
    return (
        f"{function['name']}({function['arguments'][:120]}) crashed: {last[:200]}; "
        "raise ae.ToolError for what the model did wrong"
    )


def _hidden_fields(env: Env) -> set[str]:
    """Fields that the model must not see: named like an answer, or read by the reward alone."""
    if not isinstance(env, ToolEnv):
        return set(_ANSWER_FIELDS)
    wanted = wanted_by(env.start)
    if wanted.takes_rest or "task" in wanted.names:
        return set(_ANSWER_FIELDS)
    return set(_ANSWER_FIELDS) | (wanted_by(env.reward).names - wanted.names)


def _random_policy(env: Env) -> Policy:
    """Call tools at random for three turns, then speak."""

    def policy(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        turns = sum(message["role"] == "assistant" for message in messages)
        schemas = list(env.tool_schemas)
        if not schemas or turns >= 3:
            return {"role": "assistant", "content": rng.choice(["yes", "no", "42", "up", "left"])}
        return {"role": "assistant", "content": None, "tool_calls": [random_call(schemas, rng, turns)]}  # pyright: ignore[reportReturnType]

    return policy


async def _trivial_policies(subject: Subject, tasks: Sequence[Task]) -> dict[str, Policy]:
    oracle, constant = oracle_of(subject.entry), "42"
    if oracle is not None:
        said = [
            message
            for message in (await subject.play(oracle, tasks[0])).messages
            if message["role"] == "assistant"
        ]
        constant = next((text_of(one) for one in reversed(said) if text_of(one)), constant)
    policies: dict[str, Policy] = {
        "empty": lambda messages, task, rng: "",
        "constant": lambda messages, task, rng: constant,
        "echo": lambda messages, task, rng: next(
            (text_of(one) for one in reversed(messages) if one["role"] == "user"), ""
        ),
    }
    if subject.entry.make().tool_schemas:
        policies["tool spam"] = _random_policy(subject.entry.make())
    return policies
