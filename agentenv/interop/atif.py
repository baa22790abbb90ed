"""Write episodes as ATIF, the Agent Trajectory Interchange Format (version 1.8), and read them.

ATIF has prompt and completion ids with logprobs for each step, but no loss mask and no reward; these are
written to `extra`. Reading returns episodes with messages only, without tokens, because the ids of a step do
not say which of them the environment wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.core.messages import text_of
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.interop.chatlogs import from_openai

__all__ = ["from_atif", "to_atif"]

SCHEMA = "ATIF-v1.8"


def to_atif(trajectory: Trajectory, *, model: str = "", version: str = "0.1.0") -> dict[str, Any]:
    """Return an episode as an ATIF document.

    Args:
        trajectory: the episode.
        model: name of the model that played it.
        version: version of agentenv in the document.
    """
    steps: list[dict[str, Any]] = []
    turns = list(trajectory.turns)
    for message in trajectory.messages:
        role = message["role"]
        if role == "tool":
            continue
        step: dict[str, Any] = {"step_id": len(steps) + 1, "message": text_of(message)}
        if role == "assistant":
            turn = turns.pop(0) if turns and message == turns[0].message else None
            step["source"] = "agent"
            if "reasoning_content" in message:
                step["reasoning_content"] = message["reasoning_content"]
            if turn is not None:
                step |= _agent_step(turn, trajectory)
        else:
            step["source"] = "user" if role == "user" else "system"
        steps.append(step)
    agent: dict[str, Any] = {
        "name": "agentenv",
        "version": version,
        "tool_definitions": list(trajectory.tools),
    }
    if model:
        agent["model_name"] = model
    return {
        "schema_version": SCHEMA,
        "session_id": f"{trajectory.group_id}#{trajectory.member}",
        "agent": agent,
        "steps": steps,
        "final_metrics": {
            "total_completion_tokens": trajectory.num_sampled_tokens,
            "total_steps": len(steps),
            "extra": {"reward": trajectory.reward, "rewards": dict(trajectory.rewards)},
        },
        "extra": {
            "env_id": trajectory.env_id,
            "task_id": trajectory.task_id,
            "seed": trajectory.seed,
            "stop_reason": trajectory.stop_reason.value,
            "task": dict(trajectory.task),
        },
    }


def _agent_step(turn: Turn, trajectory: Trajectory) -> dict[str, Any]:
    step: dict[str, Any] = {
        "metrics": {"completion_tokens": turn.num_tokens, "extra": {"reward": turn.reward}}
    }
    if trajectory.sequences:
        sequence = trajectory.sequences[turn.sequence]
        ids, mask = sequence.token_ids, sequence.loss_mask
        step["metrics"] |= {
            "prompt_tokens": turn.start,
            "prompt_token_ids": ids[: turn.start],
            "completion_token_ids": ids[turn.start : turn.end],
            "logprobs": sequence.logprobs[turn.start : turn.end],
        }
        step["metrics"]["extra"]["loss_mask"] = mask[turn.start : turn.end]
    if turn.tool_calls:
        step["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name, "arguments": _arguments(call.arguments)}
            for call in turn.tool_calls
        ]
    if turn.tool_results:
        step["observation"] = {
            "results": [
                {"source_call_id": result.tool_call_id, "content": result.text}
                for result in turn.tool_results
            ]
        }
    return step


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as a JSON object, as ATIF requires; other text is put under `_raw`."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"_raw": text}


def from_atif(documents: Iterable[Mapping[str, Any]]) -> Iterator[Trajectory]:
    """Yield an episode for each ATIF document, with its messages, calls, results and reward.

    Raises:
        UsageError: A document is not ATIF.
    """
    for number, document in enumerate(documents):
        if not str(document.get("schema_version", "")).startswith("ATIF-"):
            raise UsageError(
                f"document {number} is not ATIF: schema_version is {document.get('schema_version')!r}"
            )
        extra = document.get("extra") or {}
        metrics = (document.get("final_metrics") or {}).get("extra") or {}
        agent = document.get("agent") or {}
        row = {
            "messages": [message for step in document.get("steps", []) for message in _messages(step)],
            "tools": agent.get("tool_definitions") or [],
            "metadata": {**extra, "reward": metrics.get("reward"), "group_id": document.get("session_id")},
        }
        yield from from_openai([row], env_id="import/ATIF-v0")


def _messages(step: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    role = {"agent": "assistant", "user": "user", "system": "system"}.get(str(step.get("source")), "")
    message: dict[str, Any] = {"role": role, "content": _text(step.get("message"))}
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call["tool_call_id"],
                "type": "function",
                "function": {
                    "name": call["function_name"],
                    "arguments": call["arguments"].get("_raw") or json.dumps(call["arguments"]),
                },
            }
            for call in step["tool_calls"]
        ]
    yield message
    for result in (step.get("observation") or {}).get("results", []):
        yield {
            "role": "tool",
            "tool_call_id": result.get("source_call_id") or "",
            "content": _text(result.get("content")),
        }


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
