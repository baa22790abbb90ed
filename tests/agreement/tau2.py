"""tau2's tools called as Python methods with the arguments as they are written, beside our episodes.

This is what tau2's own environment does with a call (`tools.use_tool(name, **arguments)`, and an exception is the
answer). Tools, data and scorers are those of inspect-evals, there and here.
"""

from __future__ import annotations

import copy
import json
import random
from types import SimpleNamespace
from typing import Any

from agentenv.core import Message
from agentenv.envs import spec
from agentenv.testing import play
from agentenv_worlds.tau2 import env as tau2
from agentenv_worlds.tau2.package import Store, module, using
from agreement import Agreement
from agreement.bfcl import said
from agreement.change import changed_calls

CLOSED: Message = {"role": "assistant", "content": "Is there anything else?"}


def changed(script: list[Message], rng: random.Random) -> tuple[str, list[Message]]:
    """Return a kind of change, and the agent's messages of the ground truth after it."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for message in script
        for call in message.get("tool_calls") or ()
    ]
    texts = [message for message in script if not message.get("tool_calls")]
    if rng.random() < 0.3:
        keep = [message for message in script if message.get("tool_calls") or rng.random() < 0.7]
        return "fewer words", [*keep, CLOSED]
    kind, made = changed_calls(calls, rng)
    if kind == "right":
        return kind, script
    return kind, [*(said([call]) for call in made), *texts, CLOSED]


async def official(domain: str, task: Any, seed: int, messages: list[Message], user: list[Message]) -> float:
    """Run the calls of agent and user in their order, and return the verdict of the domain's scorer."""
    short = domain.removesuffix("_knowledge")
    here = tau2.Tau2(domain)
    store = Store(rng=random.Random(seed))
    row = tau2._task(domain, task.id)
    agent_calls: list[Any] = []
    heard = iter(user[1:])  # after the prompt to begin

    def run(call: Any, whose: str) -> None:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            return
        if not isinstance(arguments, dict):
            return
        name = call["function"]["name"]
        if whose == "agent":
            agent_calls.append(SimpleNamespace(function=name, arguments=arguments))
        method = getattr(_tools(short, whose), name.removeprefix("banking_"), None)
        if method is None or name.startswith("_"):
            return
        try:
            method(**arguments)
        except Exception:  # noqa: BLE001 - it is the answer to the agent
            return

    def user_acts() -> None:
        for message in heard:
            if message["role"] == "assistant" and not message.get("tool_calls"):
                return
            for call in message.get("tool_calls") or ():
                run(call, "user")

    with using(store):
        here._set_up(row)
        user_acts()
        for message in messages:
            if message["role"] != "assistant":
                continue
            for call in message.get("tool_calls") or ():
                run(call, "agent")
            if not message.get("tool_calls"):
                user_acts()
        names = module("common.scorer")
        spoken = [
            names.ChatMessageUser(str(m.get("content"))) if m["role"] == "user" else tau2._message(m)
            for m in user
        ]
        # A copy of its own: the episode's database holds records of `row`, and the scorer's would share them.
        fresh = tau2._task(domain, task.id)
        state = SimpleNamespace(messages=spoken, metadata={"instance": "Agent", "task": fresh})
        assistant = [names.ChatMessageAssistant("", [call]) for call in agent_calls]
        store.objects[module("common.agents").StoredAgentState, "Agent"] = SimpleNamespace(messages=assistant)
        score = await getattr(module(f"{short}.scorer"), f"{short}_scorer")()(state, None)
    return float(score.value == "C")


def _tools(domain: str, whose: str) -> Any:
    if domain in {"retail", "airline"}:
        return getattr(module(f"{domain}.tools"), f"get_{domain}_tools")()
    environment = module(f"{domain}.environment")
    if domain == "banking":
        return environment.get_agent_tools() if whose == "agent" else environment.get_user_tools()
    both = environment.get_environment()
    return both.tools if whose == "agent" else both.user_tools


async def compare(world: str, answers: int, seed: int) -> Agreement:
    """Compare random conversations of one domain."""
    result, rng = Agreement(world), random.Random(seed)
    domain = world.partition(" ")[2]
    entry = spec(f"tau2:{domain}")
    tasks = [task for split in entry.task_set().splits for task in entry.task_set(split)]
    for number in range(answers):
        task = rng.choice(tasks)
        kind, script = changed(copy.deepcopy(list(tau2._gold_messages(domain, task.id))), rng)
        lines = iter(script)
        env: Any = entry.make()
        played = await play(entry, lambda *_, lines=lines: next(lines, CLOSED), task, seed=number, env=env)
        if played.stop_reason != "env_terminated":
            continue
        user = getattr(env, "unwrapped", env)._user.messages
        there = await official(domain, task, number, played.messages, user)
        result.add(
            there,
            played.reward,
            (task.id, kind, env.explanation if hasattr(env, "explanation") else "", script[-3:]),
        )
    return result
