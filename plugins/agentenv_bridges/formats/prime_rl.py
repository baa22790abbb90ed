"""Write episodes as prime-rl's episode records, which are those of verifiers, and read them back.

prime-rl trains on `verifiers.v1.Episode` objects and writes them to `rollouts/step_N/*/*/traces.jsonl`, one
JSON object in a line (PrimeIntellect-ai/prime-rl, src/prime_rl/monitors/file.py and
src/prime_rl/orchestrator/trajectories.py; PrimeIntellect-ai/verifiers, verifiers/v1/trace.py and graph.py).
`WireEpisode.model_validate` loads a line, and prime-rl's `trace_to_samples` makes its training samples.

A trace is a graph of messages. Each node adds tokens to those of its parent, with a mask and with logprobs of
the sampled ones; each path from a root to a leaf is a training sample. Each token sequence of ours is a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentenv.core import Message, StopReason, TokenSequence, Trajectory, Turn, UsageError, text_of
from agentenv_bridges.formats.facts import facts_of
from agentenv_bridges.formats.prime_rl_read import read_trace
from agentenv_bridges.formats.split import refuse_images, refuse_supports
from agentenv_bridges.formats.tokens import spans_of

__all__ = ["from_prime_rl", "to_prime_rl"]

ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}
FACTS = "agentenv"
"""Key of the facts of an episode in a trace's `info`."""
CONDITIONS = {
    StopReason.CONTEXT_LENGTH: "max_total_tokens",
    StopReason.TOOL_OUTPUT_OVERFLOW: "max_total_tokens",
    StopReason.GENERATION_LENGTH: "max_output_tokens",
}
"""Stop conditions of verifiers for limits of tokens. Other limits are `max_turns`, so that verifiers counts
the trace as truncated; the exact stop reason is among the facts."""


def to_prime_rl(trajectories: Iterable[Trajectory], *, model: str = "") -> Iterator[dict[str, Any]]:
    """Yield one record for each episode, with a single trace.

    The trace's reward is the episode's; the named parts of the reward are metrics. Traces of episodes that
    cannot be trained have `agent.trainable` false, and those of failed ones have `ok` false.

    Args:
        trajectories: the episodes.
        model: name of the model that played them.

    Raises:
        UsageError: An episode was sampled with top_p, top_k or min_p, which a record cannot say.
    """
    for trajectory in trajectories:
        refuse_supports(trajectory, "prime-rl")
        refuse_images(trajectory, "prime-rl")
        task = {
            "type": trajectory.env_id,
            "data": {"id": trajectory.task_id, "task": dict(trajectory.task)},
            "key": trajectory.task_id,
        }
        errors = [] if trajectory.error is None else [_error(trajectory)]
        ok = not trajectory.stop_reason.failed
        yield {
            "id": f"{trajectory.group_id}#{trajectory.member}",
            "env": {"id": trajectory.env_id, "name": trajectory.env_id},
            "task": task,
            "group": {"id": trajectory.group_id},
            "ok": ok,
            "errors": errors,
            "traces": [{**_trace(trajectory, model), "task": task, "ok": ok, "errors": errors}],
        }


def _error(trajectory: Trajectory) -> dict[str, Any]:
    error = trajectory.error
    return {} if error is None else {"type": error.type, "message": error.message}


def _trace(trajectory: Trajectory, model: str) -> dict[str, Any]:
    nodes, calls = _Graph(trajectory, model).build()
    reward = trajectory.reward
    return {
        "version": 1,
        "id": f"{trajectory.group_id}#{trajectory.member}",
        "agent": {
            "config": {"model": model or None},
            "trainable": trajectory.trainable and reward is not None,
        },
        "tools": _tools(trajectory),
        "nodes": nodes,
        "calls": calls,
        "rewards": {"reward": None if reward is None else {"score": reward, "weight": 1.0}},
        "metrics": dict(trajectory.rewards),
        "info": {
            FACTS: {
                **facts_of(trajectory),
                "spans": [spans_of(sequence, len(sequence)) for sequence in trajectory.sequences],
            }
        },
        "is_completed": True,
        "stop_condition": _condition(trajectory.stop_reason),
    }


def _condition(reason: StopReason) -> str:
    return CONDITIONS.get(reason, "max_turns") if reason.truncated else reason.value


def _tools(trajectory: Trajectory) -> list[dict[str, Any]]:
    functions: list[Any] = [tool.get("function") or tool for tool in trajectory.all_tools]
    return [
        {
            "name": function.get("name", ""),
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {},
        }
        for function in functions
    ]


class _Graph:
    """Builds the nodes and model calls of a trace."""

    def __init__(self, trajectory: Trajectory, model: str) -> None:
        self._trajectory = trajectory
        self._model = model
        self._nodes: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        messages = trajectory.messages
        said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        # The first observation may contain assistant messages as examples; those are not turns.
        self._said = [*said[max(0, len(said) - len(trajectory.turns)) :], len(messages)]

    def build(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return nodes and calls; the path of each sequence begins at a root of its own."""
        turns = self._trajectory.turns
        for number, sequence in enumerate(self._trajectory.sequences or (TokenSequence(()),)):
            self._add_path(sequence, [turn for turn in turns if turn.sequence == number])
        return self._nodes, self._calls

    def _add_path(self, sequence: TokenSequence, turns: Sequence[Turn]) -> None:
        path = _Path(self._nodes, sequence)
        for message in self._context(turns):
            path.add(message)
        path.reach(turns[0].start if turns else len(sequence))
        ends = [*(turn.start for turn in turns[1:]), len(sequence)]
        for turn, end in zip(turns, ends, strict=False):
            node = path.add_sampled(turn)
            self._calls.append(_call(turn, node, self._model))
            after = self._trajectory.messages[self._said[turn.index] + 1 : self._said[turn.index + 1]]
            for message in after:
                path.add(message)
            if after:
                path.reach(end)

    def _context(self, turns: Sequence[Turn]) -> Sequence[Message]:
        """Return the messages that the first of the turns saw."""
        messages = self._trajectory.messages
        if not turns:
            return messages
        first = turns[0].index
        rewrites = [rewrite for rewrite in self._trajectory.rewrites if rewrite.turn <= first]
        if not rewrites:
            return messages[: self._said[first]]
        return [*rewrites[-1].messages, *messages[self._said[rewrites[-1].turn] : self._said[first]]]


class _Path:
    """Appends the nodes of one token sequence, and gives each token to a node."""

    def __init__(self, nodes: list[dict[str, Any]], sequence: TokenSequence) -> None:
        self._nodes = nodes
        self._views = sequence.token_ids, sequence.loss_mask, sequence.logprobs
        self._reached = 0
        """Number of tokens of the sequence that nodes have."""
        self._parent: int | None = None

    def add(self, message: Message) -> int:
        """Append the node of a message without tokens, and return its index."""
        self._nodes.append({"parent": self._parent, "message": _message(message), "sampled": False})
        self._parent = len(self._nodes) - 1
        return self._parent

    def add_sampled(self, turn: Turn) -> int:
        """Append the node of a turn, with its tokens and those that no earlier node has."""
        node = self.add(turn.message)
        self._nodes[node]["sampled"] = True
        self.reach(turn.end)
        return node

    def reach(self, end: int) -> None:
        """Give the tokens up to `end` to the last node."""
        ids, mask, logprobs = (view[self._reached : end] for view in self._views)
        if not ids or self._parent is None:
            return
        sampled = [logprob for logprob, trained in zip(logprobs, mask, strict=True) if trained]
        self._nodes[self._parent] |= {"token_ids": ids, "mask": mask, "logprobs": sampled}
        self._reached = end


def _message(message: Message) -> dict[str, Any]:
    role = message["role"]
    if role == "assistant":
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
        said: dict[str, Any] = {"role": role, "content": text_of(message)}
        if "reasoning_content" in message:
            said["reasoning_content"] = message["reasoning_content"]
        return said | ({"tool_calls": calls} if calls else {})
    heard: dict[str, Any] = {"role": ROLES[role], "content": message.get("content") or ""}
    if role == "tool":
        heard["tool_call_id"] = message.get("tool_call_id", "")
        heard |= {"name": message["name"]} if "name" in message else {}
    return heard


def _call(turn: Turn, node: int, model: str) -> dict[str, Any]:
    return {
        "node": node,
        "model": model or None,
        "sampling": dict(turn.sampling),
        "finish_reason": None if turn.finish_reason == "abort" else turn.finish_reason,
        "usage": {"prompt_tokens": turn.start, "completion_tokens": turn.num_tokens},
    }


def from_prime_rl(
    records: Iterable[Mapping[str, Any]], *, env_id: str = "import/PrimeRL-v0"
) -> Iterator[Trajectory]:
    """Yield an episode for each trace of prime-rl's or verifiers' episode records.

    Messages, tokens with mask and logprobs, rewards, errors and truncation come back. The paths of a trace
    become sequences; a node that several paths share is trained in the first of them, as prime-rl does. Stop
    reason, turn rewards, the task and the sources of tokens outside the mask come back from records that we
    wrote; of others, a truncated trace is `generation_length`, and `deadline` if a time limit ended it.

    Args:
        records: the records.
        env_id: environment id for records that name none.

    Raises:
        UsageError: A record has no list `traces`, or the tokens of a node disagree.
    """
    for number, record in enumerate(records):
        if not isinstance(record.get("traces"), list):
            raise UsageError(f"record {number} has no list `traces`; its keys are {sorted(map(str, record))}")
        for index, trace in enumerate(record["traces"]):
            yield read_trace(trace, record, index, where=f"record {number}", env_id=env_id)
