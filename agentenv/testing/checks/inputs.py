"""Checks that no output of a model breaks an environment: invalid calls, a megabyte of text."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping
from typing import Any

from agentenv.core.episode_env import Action
from agentenv.core.messages import ToolCallMessage, ToolErrorKind, chat_call, text_of
from agentenv.testing.checks.subject import Problem, Skipped, Subject, function_of, thread_hint
from agentenv.testing.fuzz import random_call

__all__ = ["check_fuzz", "check_overflow"]

_WORD = re.compile(r"[\w./-]*\w")


async def check_fuzz(subject: Subject) -> str:
    """Random tool calls, valid and invalid, never crash a tool."""
    env, rng = subject.entry.make(), random.Random(subject.seed)
    tasks, made, refused = subject.some_tasks(), 0, 0
    try:
        while made < subject.fuzz_calls:
            task = tasks[made % len(tasks)]
            async with subject.context() as context:
                first = await env.begin(task.data, seed=subject.seed_of(task), context=context)
                schemas = list(env.tool_schemas)
                if not schemas:
                    raise Skipped("no tools")
                said = _WORD.findall(" ".join(map(text_of, first.messages)))
                for _ in range(10):
                    call = random_call(schemas, rng, made, said)
                    result = await env.advance(
                        Action.of({"role": "assistant", "content": None, "tool_calls": [call]})
                    )
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


async def check_overflow(subject: Subject) -> str:
    """Messages and arguments of a megabyte are answered."""
    big = "9" * 1_000_000
    env, task = subject.entry.make(), subject.some_tasks()[0]
    slowest, longest, talker = 0.0, 0, ""
    try:
        async with subject.context() as context:
            await env.begin(task.data, seed=0, context=context)
            for schema in list(env.tool_schemas):
                properties: Mapping[str, Any] = function_of(schema)["parameters"].get("properties", {})
                # The arguments stay under a megabyte in total; more is refused before it reaches the tool.
                arguments = json.dumps(dict.fromkeys(properties, big[: 800_000 // max(1, len(properties))]))
                call = chat_call("call_big", function_of(schema)["name"], arguments)
                began = time.perf_counter()
                result = await env.advance(
                    Action.of({"role": "assistant", "content": None, "tool_calls": [call]})
                )
                slowest = max(slowest, time.perf_counter() - began)
                for answer in result.tool_results:
                    longest, talker = max((longest, talker), (len(answer.text), answer.name))
                    if answer.error_kind in {ToolErrorKind.EXCEPTION, ToolErrorKind.TIMEOUT}:
                        raise Problem(f"{answer.name} fails on a megabyte of input: {answer.detail[-200:]}")
                if result.terminated or result.truncated:
                    break
            else:
                began = time.perf_counter()
                await env.advance(Action.of(big))
                slowest = max(slowest, time.perf_counter() - began)
            await env.end("max_turns")
    finally:
        await env.shutdown()
    if slowest > 10:
        raise Problem(f"a megabyte of input takes {slowest:.0f} s")
    if longest > 500_000:
        raise Problem(f"{talker} answers a megabyte of input with {longest} characters; shorten its answer")
    of = f" of {talker}" if talker else ""
    return f"a megabyte of input is answered in {slowest:.1f} s; longest tool result {longest} characters{of}"


def _crash(call: ToolCallMessage, detail: str) -> str:
    function = call["function"]
    last = detail.strip().splitlines()[-1] if detail.strip() else "no answer in time"
    advice = thread_hint(last) or "; raise ae.ToolError for a mistake of the model"
    return f"{function['name']}({function['arguments'][:120]}) crashed: {last[:200]}{advice}"
