"""Read a trace of prime-rl and verifiers: a graph of messages whose paths are token sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

from agentenv.core import Message, TokenSequence, Trajectory, UsageError
from agentenv_bridges.formats.chatlogs import NO_TOKENS, chat_turns, is_answered
from agentenv_bridges.formats.facts import episode_of
from agentenv_bridges.formats.tokens import TokenRow, cut_spans, sequence_of, turns_of

__all__ = ["read_trace"]

LIMITS = frozenset(
    {
        "max_turns",
        "max_input_tokens",
        "max_output_tokens",
        "max_total_tokens",
        "context_length",
        "compaction_failed",
    }
)
"""Stop conditions for which verifiers counts a trace as truncated."""


def read_trace(
    trace: Mapping[str, Any], record: Mapping[str, Any], index: int, *, where: str, env_id: str
) -> Trajectory:
    """Return the episode of a trace; see `from_prime_rl`."""
    nodes: list[Mapping[str, Any]] = trace.get("nodes") or []
    facts = _facts(trace, record, index, nodes)
    paths = list(_paths(nodes))
    messages = [_message(nodes[node]["message"]) for node in _order(paths, nodes)]
    turns = chat_turns(messages, facts)
    sequences = _sequences(paths, nodes, facts.get("spans"), where)
    if sequences:
        places = turns_of(sequences, facts, None)
        turns = [
            replace(turn, num_tokens=place.num_tokens, sequence=place.sequence, start=place.start)
            for turn, place in zip(turns, places, strict=True)
        ]
    return episode_of(
        facts,
        env_id=str((record.get("env") or {}).get("id") or env_id),
        task_id=where,
        turns=turns,
        messages=messages,
        sequences=sequences,
        tools=tuple({"type": "function", "function": _function(tool)} for tool in trace.get("tools") or ()),
        untrainable_reason="" if sequences or not nodes else NO_TOKENS,
        answered=is_answered(messages),
    )


def _facts(
    trace: Mapping[str, Any], record: Mapping[str, Any], index: int, nodes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what the trace says about the episode, in our names; facts that we wrote win."""
    task = trace.get("task") or record.get("task") or {}
    data = task.get("data") or {}
    rewards = {
        name: None if part is None else part["score"] * part.get("weight", 1.0)
        for name, part in (trace.get("rewards") or {}).items()
    }
    scored = [value for value in rewards.values() if value is not None]
    reward = sum(scored) if scored else None
    errors = trace.get("errors") or record.get("errors") or []
    sampled = sum(bool(node.get("sampled")) for node in nodes)
    calls = [call for call in trace.get("calls") or () if call.get("error") is None]
    facts: dict[str, Any] = {
        "task_id": task.get("key") or data.get("id") or data.get("idx"),
        "group_id": (record.get("group") or {}).get("id"),
        "member": index,
        "reward": reward,
        "rewards": rewards,
        "task": data,
        "turn_rewards": [0.0] * (sampled - 1) + [reward or 0.0] if sampled else [],
        "truncated": trace.get("stop_condition") in LIMITS
        or bool(calls and calls[-1].get("finish_reason") == "length"),
    }
    if trace.get("is_timeout"):
        facts["stop_reason"] = "deadline"
    if trace.get("ok") is False:
        facts |= {"stop_reason": "error", "error": errors[-1] if errors else {}, "truncated": False}
    if not (trace.get("agent") or {}).get("trainable", True):
        facts["untrainable_reason"] = "the trace says that it is not trained on"
    return facts | ((trace.get("info") or {}).get("agentenv") or {})


def _paths(nodes: Sequence[Mapping[str, Any]]) -> Iterator[list[int]]:
    """Yield the paths from a root to each leaf, as indices of nodes."""
    parents = {node.get("parent") for node in nodes}
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path: list[int] = []
        place: int | None = leaf
        while place is not None:
            path.append(place)
            place = nodes[place].get("parent")
        yield path[::-1]


def _order(paths: Sequence[Sequence[int]], nodes: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Yield the nodes of the conversation once each.

    A later path with a root of its own repeats or condenses the conversation until its first turn.
    """
    seen: set[int] = set()
    for path in paths:
        new = [node for node in path if node not in seen]
        if seen and new and new[0] == path[0]:
            first = next((place for place, node in enumerate(new) if nodes[node].get("sampled")), len(new))
            new = new[first:]
        seen.update(path)
        yield from new


def _sequences(
    paths: Sequence[Sequence[int]], nodes: Sequence[Mapping[str, Any]], recorded: Any, where: str
) -> list[TokenSequence]:
    """Return the token sequences of the paths; none if a sampled node has no tokens."""
    sampled = [place for place, node in enumerate(nodes) if node.get("sampled")]
    if any(not nodes[place].get("token_ids") for place in sampled):
        return []
    trained: set[int] = set()
    sequences: list[TokenSequence] = []
    for number, path in enumerate(paths):
        ids, logprobs, spans = _path_tokens(path, nodes, sampled, trained, where)
        if isinstance(recorded, list) and number < len(cast("list[Any]", recorded)):
            spans = cut_spans(recorded[number], len(ids))
        row = TokenRow([], ids, [1] * len(ids), logprobs, {"spans": spans})
        if ids:
            sequences.append(sequence_of(row, f"{where}, path {number}"))
    return sequences


def _path_tokens(
    path: Sequence[int],
    nodes: Sequence[Mapping[str, Any]],
    sampled: Sequence[int],
    trained: set[int],
    where: str,
) -> tuple[list[int], list[float], dict[str, list[Any]]]:
    """Return ids, logprobs and spans of a path; nodes in `trained` are context in this one."""
    ids: list[int] = []
    logprobs: list[float] = []
    spans: dict[str, list[Any]] = {"source": [], "turn": [], "length": [], "weights_version": []}
    turn = -1
    for place in path:
        node = nodes[place]
        mask, values = node.get("mask") or [], iter(node.get("logprobs") or ())
        if len(mask) != len(node.get("token_ids") or ()):
            raise UsageError(f"{where}, node {place}: mask and tokens have different lengths")
        ids += node.get("token_ids") or ()
        for is_sampled, run in groupby(mask):
            length = len(list(run))
            fresh = bool(is_sampled) and place not in trained
            turn = sampled.index(place) if fresh else turn
            source = "model" if fresh else "prompt" if turn < 0 else "env"
            logprobs += [next(values, 0.0) if is_sampled else 0.0 for _ in range(length)]
            for name, value in zip(spans, (source, turn, length, None), strict=True):
                spans[name].append(value)
        if any(mask):
            trained.add(place)
    return ids, logprobs, spans


def _message(message: Mapping[str, Any]) -> Message:
    kept = {key: value for key, value in message.items() if value is not None and key != "provider_state"}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in kept["tool_calls"]
        ]
    return cast("Message", kept)


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
