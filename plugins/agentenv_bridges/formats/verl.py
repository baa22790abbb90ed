"""Export trajectories in the sample format of verl's agent loop (`AgentLoopOutput`), with its length rules.

The format is defined in volcengine/verl, verl/experimental/agent_loop. A sample is a prompt and one response,
and the response contains everything after the first prompt. `response_mask` is 1 for tokens of the model and
0 for tool output. Mask and logprobs are as long as the response. `num_turns` counts user, assistant and tool
messages. `extra_fields` holds `turn_scores`, where verl looks for rewards of turns, and the facts with which
`from_verl` reads an episode back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agentenv.core import JsonValue, Trajectory, UsageError
from agentenv_bridges.formats.facts import facts_of
from agentenv_bridges.formats.split import refuse_images, refuse_supports, trained_sequences
from agentenv_bridges.formats.tokens import Decode, TokenRow, episodes_of, spans_of
from agentenv_bridges.split import split_sequence

__all__ = ["from_verl", "verl_samples"]


def verl_samples(
    trajectories: Iterable[Trajectory],
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> Iterator[dict[str, JsonValue]]:
    """Yield one sample for each trainable, scored trajectory.

    Args:
        trajectories: the episodes; those that cannot be trained or have no reward are skipped.
        prompt_length: verl's `data.max_prompt_length`.
        response_length: verl's `data.max_response_length`.

    Raises:
        UsageError: A sample is longer than a limit, and verl would cut it silently. Or an episode has several
            sequences, which verl's advantages would count as several episodes of the group, or was sampled
            with top_p, top_k or min_p, which samples cannot say.
    """
    for trajectory in trajectories:
        if not trajectory.trainable or trajectory.reward is None:
            continue
        refuse_supports(trajectory, "verl")
        refuse_images(trajectory, "verl")
        facts = facts_of(trajectory)
        scores = facts.pop("turn_rewards")
        sequences = trained_sequences(trajectory)
        if len(sequences) > 1:
            raise UsageError(
                f"{trajectory.group_id}, member {trajectory.member}, has {len(sequences)} conversations that "
                "are trained, and verl would count them as so many episodes of its group",
                remedy="export as slime, which counts the episode once, or play without a condenser",
            )
        for sequence in sequences:
            part = split_sequence(sequence)
            _check("prompt", len(part.prompt_ids), prompt_length, trajectory)
            _check("response", len(part.response_ids), response_length, trajectory)
            yield {
                "prompt_ids": part.prompt_ids,
                "response_ids": part.response_ids,
                "response_mask": [int(trained) for trained in part.loss_mask],
                "response_logprobs": part.logprobs,
                "reward_score": trajectory.reward,
                "num_turns": sum(message["role"] != "system" for message in trajectory.messages),
                "metrics": {
                    "generate_sequences": trajectory.timings.get("generate_s", 0.0),
                    "tool_calls": trajectory.timings.get("tools_s", 0.0),
                },
                "extra_fields": {
                    **facts,
                    "uid": trajectory.group_id,
                    "turn_scores": scores,
                    "spans": spans_of(sequence, len(part)),
                },
            }


def from_verl(
    rows: Iterable[Mapping[str, Any]], *, env_id: str = "import/Verl-v0", decode: Decode | None = None
) -> Iterator[Trajectory]:
    """Yield the episodes of verl's samples, with tokens, turn scores and stop reason.

    Args:
        rows: the samples; those of one episode follow each other.
        env_id: environment id for samples that name none.
        decode: function that returns the text of token ids. Without it, turns have tokens and no text.

    Raises:
        UsageError: The lists of a sample have different lengths; the error names the row.
    """
    yield from episodes_of(rows, _token_row, env_id=env_id, decode=decode)


def _token_row(row: Mapping[str, Any]) -> TokenRow:
    extra = row.get("extra_fields") or {}
    facts = {
        "group_id": extra.get("uid"),
        **extra,
        "reward": row.get("reward_score"),
        "turn_rewards": extra.get("turn_scores"),
    }
    return TokenRow(
        row["prompt_ids"], row["response_ids"], row["response_mask"], row.get("response_logprobs"), facts
    )


def _check(what: str, length: int, limit: int | None, trajectory: Trajectory) -> None:
    if limit is not None and length > limit:
        raise UsageError(
            f"the {what} of {trajectory.group_id}, member {trajectory.member}, has {length} tokens, "
            f"and verl's limit is {limit}",
            remedy="raise that limit, or lower max_context_tokens",
        )
