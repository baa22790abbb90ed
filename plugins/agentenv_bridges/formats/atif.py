"""Write episodes as ATIF, the Agent Trajectory Interchange Format (version 1.8), and read them back.

ATIF has prompt and completion ids with logprobs for each step, but no loss mask, no rewards and no stop
reason; these are written to `extra`. Tokens after the last completion of a sequence have no place in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from mimetypes import guess_type
from typing import Any, cast

from agentenv.core import ContentPart, Message, TokenSequence, Trajectory, Turn, UsageError, text_of
from agentenv_bridges.formats.chatlogs import NO_TOKENS, chat_turns, is_answered
from agentenv_bridges.formats.facts import episode_of, facts_of
from agentenv_bridges.formats.split import refuse_images
from agentenv_bridges.formats.tokens import TokenRow, cut_spans, sequence_of, spans_of, turns_of

__all__ = ["from_atif", "to_atif"]

SCHEMA = "ATIF-v1.8"
SOURCES = {"assistant": "agent", "user": "user"}
"""Source of a step for the role of its message; all other roles are `system`."""


def to_atif(trajectory: Trajectory, *, model: str = "") -> dict[str, Any]:
    """Return an episode as an ATIF document.

    Args:
        trajectory: the episode.
        model: name of the model that played it.
    """
    from agentenv import __version__

    agent: dict[str, Any] = {
        "name": "agentenv",
        "version": __version__,
        "tool_definitions": list(trajectory.all_tools),
    }
    if model:
        agent["model_name"] = model
    steps = _steps(trajectory)
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
            **facts_of(trajectory),
            "spans": [spans_of(sequence, len(sequence)) for sequence in trajectory.sequences],
        },
    }


def _steps(trajectory: Trajectory) -> list[dict[str, Any]]:
    messages = trajectory.messages
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    # The first observation may contain assistant messages as examples; those are not turns.
    played = said[max(0, len(said) - len(trajectory.turns)) :]
    turns = dict(zip(played, trajectory.turns[len(trajectory.turns) - len(played) :], strict=True))
    steps: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool" and steps:
            steps[-1].setdefault("observation", {"results": []})["results"].append(_result(message))
            continue
        step: dict[str, Any] = {"step_id": len(steps) + 1, "message": _said(message)}
        step["source"] = SOURCES.get(message["role"], "system")
        if message["role"] not in {"assistant", "user", "system"}:
            step["extra"] = {"role": message["role"]}
        if message["role"] == "assistant":
            step |= _agent_step(message)
        if index in turns:
            step["metrics"] = _metrics(turns[index], trajectory)
        steps.append(step)
    return steps


def _agent_step(message: Message) -> dict[str, Any]:
    step: dict[str, Any] = {}
    if "reasoning_content" in message:
        step["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        step["tool_calls"] = [
            {
                "tool_call_id": call["id"],
                "function_name": call["function"]["name"],
                "arguments": _arguments(call["function"]["arguments"]),
                "extra": {"arguments": call["function"]["arguments"]},
            }
            for call in message.get("tool_calls", ())
        ]
    return step


def _result(message: Message) -> dict[str, Any]:
    result: dict[str, Any] = {
        "source_call_id": message.get("tool_call_id", ""),
        "content": _said(message),
    }
    return result | ({"extra": {"name": message["name"]}} if "name" in message else {})


def _metrics(turn: Turn, trajectory: Trajectory) -> dict[str, Any]:
    metrics: dict[str, Any] = {"completion_tokens": turn.num_tokens, "extra": {"reward": turn.reward}}
    if trajectory.sequences:
        refuse_images(trajectory, "ATIF")
        sequence = trajectory.sequences[turn.sequence]
        ids, mask = sequence.token_ids, sequence.loss_mask
        metrics |= {
            "prompt_tokens": turn.start,
            "prompt_token_ids": ids[: turn.start],
            "completion_token_ids": ids[turn.start : turn.end],
            "logprobs": sequence.logprobs[turn.start : turn.end],
        }
        metrics["extra"] |= {"loss_mask": mask[turn.start : turn.end], "sequence": turn.sequence}
    return metrics


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as a JSON object, as ATIF requires; other text is put under `_raw`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_raw": text}


def from_atif(
    documents: Iterable[Mapping[str, Any]], *, env_id: str = "import/ATIF-v0"
) -> Iterator[Trajectory]:
    """Yield an episode for each ATIF document, with messages, tokens, rewards and stop reason.

    A document has tokens if each of its agent steps has prompt ids, completion ids and logprobs. Without a
    stop reason, the rule of `from_openai` holds.

    Args:
        documents: the documents.
        env_id: environment id for documents that name none.

    Raises:
        UsageError: A document is not ATIF, or the tokens of its steps disagree.
    """
    for number, document in enumerate(documents):
        if not str(document.get("schema_version", "")).startswith("ATIF-"):
            raise UsageError(
                f"document {number} is not ATIF: schema_version is {document.get('schema_version')!r}"
            )
        yield _episode(document, f"document {number}", env_id)


def _episode(document: Mapping[str, Any], where: str, env_id: str) -> Trajectory:
    steps = document.get("steps", [])
    metrics = (document.get("final_metrics") or {}).get("extra") or {}
    facts: dict[str, Any] = {
        "group_id": document.get("session_id"),
        "reward": metrics.get("reward"),
        "rewards": metrics.get("rewards"),
        **(document.get("extra") or {}),
    }
    said = [step.get("metrics") or {} for step in steps if step.get("source") == "agent"]
    rewards = [(values.get("extra") or {}).get("reward") for values in said]
    if rewards and None not in rewards:
        facts.setdefault("turn_rewards", rewards)
    messages = cast("list[Message]", [message for step in steps for message in _messages(step)])
    turns = chat_turns(messages, facts)
    sequences = _sequences(said[len(said) - len(turns) :], facts.get("spans"), where)
    if sequences:
        places = turns_of(sequences, facts, None)
        turns = [
            replace(turn, num_tokens=place.num_tokens, sequence=place.sequence, start=place.start)
            for turn, place in zip(turns, places, strict=True)
        ]
    return episode_of(
        facts,
        env_id=env_id,
        task_id=str(document.get("session_id") or where),
        turns=turns,
        messages=messages,
        sequences=sequences,
        tools=tuple((document.get("agent") or {}).get("tool_definitions") or ()),
        untrainable_reason="" if sequences else NO_TOKENS,
        answered=is_answered(messages),
    )


def _sequences(said: Sequence[Mapping[str, Any]], recorded: Any, where: str) -> list[TokenSequence]:
    """Return the token sequences of the turns' metrics; none if a turn lacks ids or logprobs."""
    keys = ("prompt_token_ids", "completion_token_ids", "logprobs")
    if not said or any(values.get(key) is None for values in said for key in keys):
        return []
    rows: dict[int, _Row] = {}
    number = -1
    for turn, values in enumerate(said):
        prompt = list(values["prompt_token_ids"])
        extra = values.get("extra") or {}
        last = rows.get(number)
        if "sequence" in extra:
            number = extra["sequence"]
        elif last is None or prompt[: len(last.ids)] != last.ids:
            number += 1
        rows.setdefault(number, _Row()).add(turn, prompt, values)
    return [
        sequence_of(
            row.token_row(recorded[number] if isinstance(recorded, list) else None), f"{where}, sequence {n}"
        )
        for n, (number, row) in enumerate(sorted(rows.items()))
    ]


class _Row:
    """The tokens of a sequence, collected from the steps that sampled them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: dict[str, list[Any]] = {"source": [], "turn": [], "length": [], "weights_version": []}

    def add(self, turn: int, prompt: Sequence[int], metrics: Mapping[str, Any]) -> None:
        """Add the prompt that is new in a step, and its completion."""
        new, completion = prompt[len(self.ids) :], metrics["completion_token_ids"]
        self._span("env" if self.ids else "prompt", turn - 1 if self.ids else -1, new, [0.0] * len(new))
        mask = (metrics.get("extra") or {}).get("loss_mask") or [True]
        self._span("model" if any(mask) else "other", turn, completion, metrics["logprobs"])

    def _span(self, source: str, turn: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.ids += ids
        self.logprobs += logprobs
        for name, value in zip(self.spans, (source, turn, len(ids), None), strict=True):
            self.spans[name].append(value)

    def token_row(self, recorded: Mapping[str, Any] | None) -> TokenRow:
        """Return the row, with the spans that the document recorded, as far as its tokens reach."""
        spans = self.spans if recorded is None else cut_spans(recorded, len(self.ids))
        return TokenRow([], self.ids, [1] * len(self.ids), self.logprobs, {"spans": spans})


def _messages(step: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    role = {"agent": "assistant", "user": "user", "system": "system"}.get(str(step.get("source")), "")
    role = (step.get("extra") or {}).get("role") or role
    message: dict[str, Any] = {"role": role, "content": _heard(step.get("message"))}
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call["tool_call_id"],
                "type": "function",
                "function": {"name": call["function_name"], "arguments": _arguments_text(call)},
            }
            for call in step["tool_calls"]
        ]
    yield message
    for result in (step.get("observation") or {}).get("results", []):
        answer = {
            "role": "tool",
            "tool_call_id": result.get("source_call_id") or "",
            "content": _heard(result.get("content")),
        }
        name = (result.get("extra") or {}).get("name")
        yield answer | ({"name": name} if name else {})


def _arguments_text(call: Mapping[str, Any]) -> str:
    """Return the arguments as the model wrote them, or else as JSON."""
    text = (call.get("extra") or {}).get("arguments")
    if isinstance(text, str):
        return text
    return call["arguments"].get("_raw") or json.dumps(call["arguments"])


def _said(message: Message) -> str | list[dict[str, Any]]:
    """Return a message's text, or ATIF's parts if it has images."""
    content = message.get("content")
    if not isinstance(content, list) or all(part.get("type") != "image_url" for part in content):
        return text_of(message)
    return [
        {"type": "text", "text": part.get("text", "")} if part.get("type") == "text" else _image(part)
        for part in content
    ]


def _image(part: ContentPart) -> dict[str, Any]:
    """Return an image as ATIF writes it; the path may be any URL, also one that holds the image."""
    url = part.get("image_url", {}).get("url", "")
    kind = url.removeprefix("data:").partition(";")[0] if url.startswith("data:") else guess_type(url)[0]
    return {"type": "image", "source": {"media_type": kind or "image/png", "path": url}}


def _heard(content: object) -> str | list[ContentPart]:
    """Return content of ATIF as text, or as parts of chat messages if it has images."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [cast("dict[str, Any]", part) for part in cast("list[object]", content) if isinstance(part, dict)]
    if all(part.get("type") != "image" for part in parts):
        return "".join(str(part.get("text") or "") for part in parts)
    return [
        {"type": "image_url", "image_url": {"url": str((part.get("source") or {}).get("path", ""))}}
        if part.get("type") == "image"
        else {"type": "text", "text": str(part.get("text") or "")}
        for part in parts
    ]
