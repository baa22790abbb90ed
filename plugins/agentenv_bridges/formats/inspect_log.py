"""Write episodes as a log of Inspect (`inspect_ai`, log version 2), for its viewer and data frames.

An Inspect log is about one task, so a run of several environments becomes several logs. Inspect has no
fields for token ids and loss masks. They remain in the run, whose id is in the log's metadata.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from agentenv.core import Message, StopReason, ToolErrorKind, ToolResult, Trajectory, Turn, text_of
from agentenv.runs.store import RunInfo, RunStatus

__all__ = ["to_inspect"]

VERSION = 2
STATUS = {
    RunStatus.RUNNING: "started",
    RunStatus.FINISHED: "success",
    RunStatus.INTERRUPTED: "cancelled",
    RunStatus.FAILED: "error",
}
LIMITS = {
    StopReason.MAX_TURNS: "turn",
    StopReason.CONTEXT_LENGTH: "context",
    StopReason.TOOL_OUTPUT_OVERFLOW: "context",
    StopReason.GENERATION_LENGTH: "token",
    StopReason.DEADLINE: "time",
}
"""Inspect's names for stop reasons that are limits; all other limits are `custom`."""
ERRORS = {
    ToolErrorKind.INVALID_JSON: "parsing",
    ToolErrorKind.BAD_ARGUMENTS: "parsing",
    ToolErrorKind.TIMEOUT: "timeout",
    ToolErrorKind.NOT_RUN: "limit",
}
FINISH = {"stop": "stop", "length": "max_tokens", "abort": "unknown", "content_filter": "content_filter"}


def to_inspect(trajectories: Iterable[Trajectory], info: RunInfo) -> dict[str, dict[str, Any]]:
    """Return one log for each environment, by the environment's id.

    The episodes of a task become Inspect's epochs, numbered from 1 in the given order.

    Args:
        trajectories: episodes of the run, in order.
        info: description of the run.
    """
    by_env: dict[str, list[dict[str, Any]]] = {}
    epochs = Counter[tuple[str, str]]()
    model = info.model or "unknown"
    for trajectory in trajectories:
        epochs[trajectory.env_id, trajectory.task_id] += 1
        epoch = epochs[trajectory.env_id, trajectory.task_id]
        by_env.setdefault(trajectory.env_id, []).append(_sample(trajectory, epoch, model))
    return {env_id: _log(env_id, samples, info, model) for env_id, samples in by_env.items()}


def _log(env_id: str, samples: list[dict[str, Any]], info: RunInfo, model: str) -> dict[str, Any]:
    ids = list(dict.fromkeys(sample["id"] for sample in samples))
    status = STATUS[info.status]
    log: dict[str, Any] = {
        "version": VERSION,
        "status": status,
        "eval": {
            "created": info.created,
            "task": env_id,
            "task_id": f"{info.id}:{env_id}",
            "run_id": info.id,
            "eval_id": f"{info.id}:{env_id}",
            "dataset": {"name": env_id, "samples": len(ids), "sample_ids": ids, "shuffled": False},
            "model": model,
            "config": {"epochs": max(sample["epoch"] for sample in samples)},
            "packages": dict(info.versions),
            "metadata": {"run": info.id, "seed": info.seed},
        },
        "results": {
            "total_samples": len(samples),
            "completed_samples": sum("error" not in sample for sample in samples),
            "scores": _scores(samples),
        },
        "stats": {
            "started_at": info.created,
            "completed_at": info.closed,
            "model_usage": {model: _added([sample["model_usage"][model] for sample in samples])},
        },
        "samples": samples,
    }
    if status == "error":
        log["error"] = _error(info.note, "")
    return log


def _scores(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean of each score over the samples that have it."""
    names = dict.fromkeys(name for sample in samples for name in sample["scores"])
    scores: list[dict[str, Any]] = []
    for name in names:
        values = [sample["scores"][name]["value"] for sample in samples if name in sample["scores"]]
        metric = {"name": "mean", "value": fmean(values)}
        scores.append(
            {
                "name": name,
                "scorer": name,
                "scored_samples": len(values),
                "unscored_samples": len(samples) - len(values),
                "metrics": {"mean": metric},
            }
        )
    return scores


def _added(usages: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(usage[name] for usage in usages) for name in usages[0]}


def _error(message: str, traceback: str) -> dict[str, str]:
    return {"message": message, "traceback": traceback, "traceback_ansi": traceback}


def _sample(one: Trajectory, epoch: int, model: str) -> dict[str, Any]:
    messages = _messages(one, model)
    read, written = sum(turn.start for turn in one.turns), one.num_sampled_tokens
    usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    named = {name: value for name, value in one.rewards.items() if value is not None}
    if one.reward is not None:
        named["reward"] = one.reward
    sample: dict[str, Any] = {
        "id": one.task_id,
        "epoch": epoch,
        "input": messages[: len(messages) if not one.turns else _first_turn(one)],
        "target": "",
        "messages": messages,
        "output": _output(one, messages, usage, model),
        "scores": {name: {"value": value, "answer": one.answer} for name, value in named.items()},
        "metadata": {
            "group_id": one.group_id,
            "member": one.member,
            "seed": str(one.seed),
            "stop_reason": one.stop_reason.value,
            "untrainable_reason": one.untrainable_reason,
            "turn_rewards": list(one.turn_rewards),
            "task": dict(one.task),
            "tools": list(one.all_tools),
        },
        "model_usage": {model: usage},
        "uuid": f"{one.group_id}#{one.member}#{epoch}",
        "turn_count": len(one.turns),
    }
    if "total_s" in one.timings:
        sample["total_time"] = one.timings["total_s"]
    if one.error is not None:
        sample["error"] = _error(f"{one.error.type}: {one.error.message}", one.error.traceback)
    if one.truncated:
        sample["limit"] = _limit(one)
    return sample


def _limit(one: Trajectory) -> dict[str, Any]:
    kind = LIMITS.get(one.stop_reason, "custom")
    reached = {
        "turn": len(one.turns),
        "time": one.timings.get("total_s", 0.0),
        "token": one.num_sampled_tokens,
        "context": max(map(len, one.sequences), default=0),
    }
    return {"type": kind, "limit": reached.get(kind, 0), "reason": one.stop_reason.value}


def _first_turn(one: Trajectory) -> int:
    """Return the index of the first message that the model wrote in this episode."""
    first, messages = one.turns[0].message, one.messages
    return next((index for index, message in enumerate(messages) if message == first), len(messages))


def _messages(one: Trajectory, model: str) -> list[dict[str, Any]]:
    turns = list(one.turns)
    answers: dict[str, ToolResult] = {}
    converted: list[dict[str, Any]] = []
    for index, message in enumerate(one.messages):
        turn = turns.pop(0) if turns and message == turns[0].message else None
        if turn is not None:
            answers = {result.tool_call_id: result for result in turn.tool_results}
        converted.append({"id": f"m{index}", **_message(message, turn, answers, model)})
    return converted


def _message(
    message: Message, turn: Turn | None, answers: dict[str, ToolResult], model: str
) -> dict[str, Any]:
    role = message["role"]
    if role == "tool":
        return _tool_message(message, answers.get(message.get("tool_call_id", "")))
    if role != "assistant":
        return {"role": "user" if role == "user" else "system", "content": _content(message)}
    content: Any = _content(message)
    reasoning = message.get("reasoning_content")
    if reasoning:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        content = [{"type": "reasoning", "reasoning": reasoning}, *parts]
    converted: dict[str, Any] = {"role": "assistant", "content": content}
    if turn is not None:
        converted |= {"source": "generate", "model": model}
    calls = message.get("tool_calls")
    if calls:
        converted["tool_calls"] = [_call(call["id"], call["function"]) for call in calls]
    return converted


def _call(call_id: str, function: Any) -> dict[str, Any]:
    call = {"id": call_id, "function": function["name"], "type": "function", "arguments": {}}
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError) as error:
        return {**call, "parse_error": f"{error}: {function['arguments']}"}
    if not isinstance(arguments, dict):
        return {**call, "parse_error": f"the arguments are not an object: {function['arguments']}"}
    return {**call, "arguments": arguments}


def _tool_message(message: Message, result: ToolResult | None) -> dict[str, Any]:
    converted: dict[str, Any] = {
        "role": "tool",
        "content": _content(message),
        "tool_call_id": message.get("tool_call_id", ""),
    }
    name = message.get("name") or (result.name if result else "")
    if name:
        converted["function"] = name
    if result is not None and result.error_kind is not None:
        converted["error"] = {"type": ERRORS.get(result.error_kind, "unknown"), "message": text_of(message)}
    return converted


def _content(message: Message) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return content or ""
    parts: list[dict[str, Any]] = []
    for part in content:
        image: Any = part.get("image_url")
        if part.get("type") == "image_url" and image:
            parts.append({"type": "image", "image": image["url"] if isinstance(image, dict) else image})
        else:
            parts.append({"type": "text", "text": part.get("text") or json.dumps(part)})
    return parts


def _output(
    one: Trajectory, messages: Sequence[dict[str, Any]], usage: dict[str, int], model: str
) -> dict[str, Any]:
    said = [message for message in messages if message.get("source") == "generate"]
    if not said:
        return {"model": model, "choices": []}
    turn = one.turns[-1]
    reason = "tool_calls" if turn.tool_calls else FINISH[turn.finish_reason]
    choice = {"message": said[-1], "stop_reason": reason}
    return {"model": model, "choices": [choice], "completion": text_of(turn.message), "usage": usage}
