"""Episodes of agents with several conversations, in the formats of others: each sampled token is trained once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest

import agentenv as ae
from agentenv.core import TrajectoryGroup, UsageError
from agentenv.engine import ScriptedEngine
from agentenv.runner import Runner
from agentenv_bridges import (
    from_atif,
    from_prime_rl,
    from_slime,
    from_trl,
    slime_samples,
    to_atif,
    to_openai,
    to_prime_rl,
    to_sft,
    trl_samples,
    verl_samples,
)
from helpers.agents import ADD, RENDERER, TOKENIZER, by_turn, call

TURNS = by_turn(call('{"a": 2, "b": 3}'), "It is 5.")


class Busy(ae.AgentEnv):
    """Asks for a title, leads two conversations, and asks one turn again."""

    async def agent(self, url, task):
        async with aiohttp.ClientSession() as http:

            async def ask(messages, tools=(ADD,)):
                body = {"model": "m", "messages": messages, **({"tools": list(tools)} if tools else {})}
                async with http.post(f"{url}/v1/chat/completions", json=body) as got:
                    return (await got.json())["choices"][0]["message"]

            await ask([{"role": "user", "content": "A title?"}], tools=())
            for question in ("Sub task", "What is 2 + 3?"):
                messages = [{"role": "user", "content": question}]
                said = await ask(messages)
                result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}
                messages += [said, result]
                said = await ask(messages)
            await ask([*messages[:-1], {**result, "content": "6"}])
        return said["content"]

    def reward(self, answer):
        return float("5" in answer)


@pytest.fixture(scope="module")
def record():
    async def play():
        engine = ScriptedEngine(TURNS, tokenizer=TOKENIZER)
        return await Runner(engine, RENDERER).run_episode(Busy(), {"x": 2})

    played = asyncio.run(play())
    assert (len(played.turns), len(played.sequences), played.reward) == (6, 4, 1.0)
    assert played.metrics["auxiliary_tokens"] > 0
    return played


def trained(record):
    """The trained tokens of each sequence that has some."""
    return sorted(
        [
            [token for token, own in zip(sequence.token_ids, sequence.loss_mask, strict=True) if own]
            for sequence in record.sequences
            if any(sequence.loss_mask)
        ]
    )


def trained_in(rows, ids, mask):
    return sorted([token for token, own in zip(row[ids], row[mask], strict=True) if own] for row in rows)


def slime_rows(records):
    (entries,) = slime_samples([TrajectoryGroup(records)], decode=TOKENIZER.decode)
    for samples, record in zip(entries, records, strict=True):
        own = [{**row, "tokens": row["tokens"][-row["response_length"] :]} for row in samples]
        assert trained_in(own, "tokens", "loss_mask") == trained(record)
        assert len({row["rollout_id"] for row in samples}) == 1
    return [row for samples in entries for row in samples]


def trl_rows(records):
    rows = list(trl_samples(records))
    assert trained_in(rows, "completion_ids", "env_mask") == trained(records[0]) * len(records)
    return rows


def test_verl_would_count_an_episode_of_several_conversations_more_than_once(record):
    with pytest.raises(UsageError, match=r"member 0, has \d conversations .* export as slime"):
        list(verl_samples([record]))


FORMATS = {
    "trl": (lambda records: trl_rows(records[:1]) * 2, lambda rows: from_trl(rows, decode=TOKENIZER.decode)),
    "slime": (slime_rows, lambda rows: from_slime(rows, decode=TOKENIZER.decode)),
    "prime-rl": (to_prime_rl, from_prime_rl),
    "atif": (lambda records: map(to_atif, records), from_atif),
}


@pytest.mark.parametrize(("write", "read"), FORMATS.values(), ids=FORMATS)
def test_a_format_gets_each_sampled_token_once_and_gives_it_back(record, write, read):
    both = list(read(write((record, replace(record, member=1)))))

    assert [trained(back) for back in both] == [trained(record)] * 2
    assert [back.reward for back in both] == [record.reward] * 2


def test_atif_has_all_turns_and_tokens(record):
    (back,) = from_atif([to_atif(record)])

    assert [turn.message["content"] for turn in back.turns] == [
        turn.message["content"] for turn in record.turns
    ]
    assert [sequence.token_ids for sequence in back.sequences] == [
        sequence.token_ids for sequence in record.sequences
    ]
    assert trained(back) == trained(record)


def test_chat_rows_have_every_reply(record):
    chats = list(to_openai([record]))
    rows = list(to_sft([record]))

    replies = [row["messages"][-len(row["metadata"]["turn_rewards"]) :] for row in chats]
    assert len(chats) == len(rows) == len(record.sequences)
    assert sum(len(row["metadata"]["turn_rewards"]) for row in chats) == len(record.turns)
    assert [row["metadata"]["conversation"] for row in chats] == list(range(len(chats)))
    assert all(part[-1]["role"] in ("assistant", "tool") for part in replies)
