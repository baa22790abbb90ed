"""Episodes in which an agent with a loop of its own asks the model."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import aiohttp
import openai
import pytest

import agentenv as ae
from agentenv.core import EngineUnavailable, RunLimits, StopReason, TrajectoryGroup
from agentenv.engine import ChatCompletion, ScriptedEngine, ScriptedTurn, Usage
from agentenv.runner import Runner, RunnerOptions
from agentenv.runs import replay_episode, verify_episode
from agentenv.runs.store.codec import decode_trajectory, dumps, encode_trajectory
from agentenv.training import GRPOConfig
from agentenv.training.batch import build_batch
from agentenv_bridges import to_openai, to_sft
from helpers.agents import ADD, RENDERER, TOKENIZER, by_turn, call
from helpers.waiting import until

TURNS = by_turn(call('{"a": 2, "b": 3}'), "It is 5.")


async def loop(url, question, *, tools=(ADD,), **options):
    """The loop that every agent has, written with OpenAI's SDK."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", **options) as sdk:
        messages = [{"role": "user", "content": question}]
        while True:
            answer = await sdk.chat.completions.create(model="m", messages=messages, tools=list(tools))
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            messages += [
                {"role": "tool", "tool_call_id": made.id, "content": "5"} for made in message.tool_calls
            ]


class Adder(ae.AgentEnv):
    async def agent(self, url, task):
        return await loop(url, f"What is {task['x']} + {task['y']}?")

    def reward(self, answer, x, y):
        return float(str(x + y) in answer)


def runner(script=TURNS, limits=None, **options) -> Runner:
    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    return Runner(engine, RENDERER, limits, options=RunnerOptions(retry_wait_s=0, **options))


async def play(env, script=TURNS, limits=None, **options):
    return await runner(script, limits, **options).run_episode(env, {"x": 2, "y": 3})


async def test_an_agent_plays_an_episode_as_any_environment():
    record = await play(Adder())

    assert (record.stop_reason, record.reward) == (StopReason.FINAL_ANSWER, 1.0)
    assert record.trainable
    assert [message["role"] for message in record.messages] == ["user", "assistant", "tool", "assistant"]
    assert [result.content for result in record.turns[0].tool_results] == ["5"]
    (sequence,) = record.sequences
    assert sequence.num_trained_tokens == record.num_sampled_tokens
    assert record.tools == (ADD,)
    assert record.metrics["tool_calls"] == 1
    assert record.turns[-1].reward == 1.0
    assert record.answer == "It is 5."


async def test_the_sampling_seeds_are_those_of_any_environment():
    one, other = runner(), runner()
    await one.run_episode(Adder(), {"x": 2, "y": 3})
    await other.run_episode(Adder(), {"x": 2, "y": 3}, member=1)

    seeds = [[request.sampling.seed for request in each.engine.requests] for each in (one, other)]
    assert len({*seeds[0], *seeds[1]}) == 4


async def test_groups_of_an_agent_are_played_at_once():
    played = runner(concurrency=8)
    spec = ae.EnvSpec.of("demo/Adder-v0", Adder, tasks=[{"x": 2, "y": 3}, {"x": 1, "y": 1}])

    groups = [group async for group in played.run_groups(spec, spec.task_set(), 4)]

    assert [[member.reward for member in group] for group in groups] in (
        [[1.0] * 4, [0.0] * 4],
        [[0.0] * 4, [1.0] * 4],
    )
    assert len(set(played.engine.released)) == 8
    assert played.ledger.balanced


async def test_an_episode_of_an_agent_cannot_be_continued_from_a_turn():
    """The agent has a state of its own, which a replay of the environment does not bring back."""
    spec = ae.EnvSpec.of("demo/Adder-v0", Adder, tasks=[{"x": 2, "y": 3}])
    record = await play(Adder())

    (group,) = [group async for group in runner().run_branches(spec, [record], 2, from_turn=1)]

    assert all(member.stop_reason is StopReason.ERROR for member in group)
    assert "cannot be continued from one of its turns" in group[0].error.message


async def test_an_agent_that_raises_fails_its_episode():
    class Broken(Adder):
        async def agent(self, url, task):
            await super().agent(url, task)
            raise LookupError("lost")

    record = await play(Broken())

    assert record.stop_reason is StopReason.ERROR
    assert (record.error.boundary, record.error.type) == ("agent", "LookupError")
    assert len(record.turns) == 2
    assert not record.trainable


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()], ids=repr)
async def test_whatever_an_agent_raises_ends_only_its_episode(error):
    class Broken(Adder):
        async def agent(self, url, task):
            raise error

    record = await play(Broken())

    assert record.stop_reason is StopReason.ERROR
    assert record.error.boundary == "agent"


async def test_an_agent_that_never_asks_the_model_is_told():
    class Silent(Adder):
        async def agent(self, url, task):
            return "5"

    record = await play(Silent())

    assert "without asking the model" in record.error.message


async def test_a_limit_of_turns_ends_the_agent_and_the_episode_is_scored():
    record = await play(Adder(), by_turn(call('{"a": 2, "b": 3}')), RunLimits(max_turns=3))

    assert (record.stop_reason, record.reward) == (StopReason.MAX_TURNS, 0.0)
    assert len(record.turns) == 3
    assert record.trainable


async def test_a_full_context_that_the_agent_does_not_handle_is_no_failure():
    record = await play(
        Adder(),
        by_turn(call('{"a": 2, "b": 3}')),
        RunLimits(max_turns=None, max_context_tokens=700, min_answer_tokens=150),
    )

    assert record.stop_reason is StopReason.CONTEXT_LENGTH
    assert record.trainable


async def test_an_agent_may_shorten_its_conversation_when_the_context_is_full():
    class Compacting(Adder):
        async def agent(self, url, task):
            try:
                return await loop(url, "x" * 800)
            except openai.BadRequestError as error:
                return await loop(url, f"What is 2 + 3 ({error.code})?")

    record = await play(Compacting(), limits=RunLimits(max_context_tokens=900))

    assert "(context_length_exceeded)" in record.messages[0]["content"]
    assert (record.stop_reason, record.reward) == (StopReason.FINAL_ANSWER, 1.0)


async def test_an_episode_that_ends_with_a_cut_reply_is_truncated():
    record = await play(Adder(), ["x" * 90], RunLimits(max_tokens_per_turn=20))

    assert record.stop_reason is StopReason.GENERATION_LENGTH


async def test_an_agent_whose_model_never_answers_is_not_scored():
    stuck = [ScriptedTurn(text="12", gate=asyncio.Event())]

    record = await play(Adder(), stuck, limits=RunLimits(episode_timeout_s=2.5))

    assert (record.stop_reason, record.reward) == (StopReason.ABORTED, None)
    assert record.error.boundary == "engine"


async def test_a_deadline_ends_an_agent_that_never_ends():
    ended = asyncio.Event()

    class Endless(Adder):
        async def agent(self, url, task):
            await super().agent(url, task)
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    record = await play(Endless(), limits=RunLimits(episode_timeout_s=2.5))

    assert record.stop_reason is StopReason.DEADLINE
    assert ended.is_set()
    assert record.reward == 1.0


async def test_an_agent_that_hangs_fails_its_episode():
    class Hung(Adder):
        async def agent(self, url, task):
            await asyncio.Event().wait()

    record = await play(Hung(), limits=RunLimits(env_timeout_s=0.2))

    assert record.stop_reason is StopReason.ERROR
    assert (record.error.boundary, record.error.type) == ("agent", "TimeoutError")


async def test_an_engine_that_fails_aborts_the_episode_which_is_played_again():
    asked = []

    def policy(request):
        asked.append(request)
        return ScriptedTurn(error=EngineUnavailable("gone")) if len(asked) == 1 else TURNS(request)

    spec = ae.EnvSpec.of("demo/Adder-v0", Adder, tasks=[{"x": 2, "y": 3}])
    (group,) = [group async for group in runner(policy).run_groups(spec, spec.task_set())]

    assert (group[0].stop_reason, group[0].attempt) == (StopReason.FINAL_ANSWER, 1)


async def test_an_episode_that_is_cancelled_ends_its_agent_and_its_server():
    ended, gate = asyncio.Event(), asyncio.Event()

    class Watched(Adder):
        async def agent(self, url, task):
            try:
                return await super().agent(url, task)
            finally:
                ended.set()

    played = runner([ScriptedTurn(text="late", gate=gate)])
    playing = asyncio.create_task(played.run_episode(Watched(), {"x": 2, "y": 3}))
    await until(lambda: played.engine.requests)
    playing.cancel()
    await asyncio.wait({playing})

    assert ended.is_set()
    assert played.engine.released
    await until(
        lambda: {task for task in asyncio.all_tasks() if "agentenv" in repr(task.get_coro())} == set()
    )


async def test_sub_agents_are_sequences_of_one_episode_and_share_its_reward():
    class Team(Adder):
        async def agent(self, url, task):
            await asyncio.gather(*(loop(url, f"Part {part}") for part in range(3)))
            return await loop(url, "What is 2 + 3?")

    record = await play(Team())

    assert len(record.sequences) == 4
    assert record.turns[-1].message["content"] == "It is 5."
    assert [rewrite.turn for rewrite in record.rewrites] == [2, 4, 6]
    assert sum(sequence.num_trained_tokens for sequence in record.sequences) == record.num_sampled_tokens
    assert record.metrics["forks_new"] == 3
    assert record.reward == 1.0


class Branching(Adder):
    """Has a sub-agent, asks each turn twice, and makes calls that repeat."""

    async def agent(self, url, task):
        await loop(url, "Sub task")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as sdk:
            messages = [{"role": "user", "content": "What is 2 + 3?"}]
            for _ in range(3):
                asked = {"model": "m", "messages": messages, "tools": [ADD]}
                (_, second) = [await sdk.chat.completions.create(**asked) for _ in range(2)]
                message = second.choices[0].message
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": made.id, "content": "5"}
                    for made in message.tool_calls or ()
                ]
            return message.content


async def branching():
    """An episode of `Branching`."""
    calls = call('{"a": 2, "b": 3}')
    return await play(Branching(), by_turn(calls, calls, "It is 5."))


async def test_a_branching_record_holds_together():
    record = await branching()

    found = verify_episode(record, RENDERER, drift="off")

    assert list(found.wrong) == []
    causes = {(rewrite.cause, rewrite.parent is None) for rewrite in record.rewrites}
    assert causes == {("new", True), ("forked", False)}
    assert sum(sequence.num_trained_tokens for sequence in record.sequences) == record.num_sampled_tokens
    assert decode_trajectory(json.loads(dumps(encode_trajectory(record)))) == record


TRANSFER = {**ADD, "function": {**ADD["function"], "name": "transfer"}}


class Handoff(Adder):
    """Hands its conversation to an agent with another system prompt and other tools."""

    async def agent(self, url, task):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as sdk:
            asking = {"role": "user", "content": "What is 2 + 3?"}
            history = [asking]
            for system, tools in (("You sort.", [TRANSFER]), ("You add.", [ADD]), ("You add.", [ADD])):
                messages = [{"role": "system", "content": system}, *history]
                answer = await sdk.chat.completions.create(model="m", messages=messages, tools=tools)
                message = answer.choices[0].message
                history.append(message)
                history += [
                    {"role": "tool", "tool_call_id": made.id, "content": "done"}
                    for made in message.tool_calls or ()
                ]
            return message.content


async def handed():
    """An episode of `Handoff`."""
    given = by_turn(call('{"a": 1, "b": 1}', "transfer"), call('{"a": 2, "b": 3}'), "It is 5.")
    return await play(Handoff(), given)


async def test_tools_and_system_belong_to_a_conversation_and_not_to_the_episode():
    record = await handed()

    found = verify_episode(record, RENDERER, drift="off")

    assert list(found.wrong) == []
    assert [rewrite.cause for rewrite in record.rewrites] == ["system"]
    assert record.tools == (TRANSFER,)
    assert [record.tools_at(turn.index) for turn in record.turns] == [(TRANSFER,), (ADD,), (ADD,)]
    assert record.all_tools == (TRANSFER, ADD)
    assert decode_trajectory(json.loads(dumps(encode_trajectory(record)))) == record


async def test_the_call_that_hands_over_counts_as_run():
    record = await handed()

    assert [[result.content for result in turn.tool_results] for turn in record.turns] == [
        ["done"],
        ["done"],
        [],
    ]
    assert record.metrics["tool_calls"] == 2


async def test_two_agents_are_exported_as_two_conversations():
    record = await handed()

    first, second = to_openai([record])
    rows = list(to_sft([record]))

    assert [first["tools"], second["tools"]] == [[TRANSFER], [ADD]]
    assert [row["tools"] for row in rows] == [[TRANSFER], [ADD]]
    systems = [row["messages"][0]["content"] for row in (first, second)]
    assert systems == ["You sort.", "You add."]
    roles = [[message["role"] for message in row["messages"]] for row in (first, second)]
    assert roles[0] == ["system", "user", "assistant", "tool"]
    assert roles[1] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]


async def test_a_reply_that_the_client_cut_is_found_right_by_the_doctor():
    class Text(Adder):
        async def agent(self, url, task):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as sdk:
                messages = [{"role": "user", "content": "What is 2 + 3?"}]
                for _ in range(2):
                    answer = await sdk.chat.completions.create(model="m", messages=messages)
                    said = answer.choices[0].message.content.split("\nObservation")[0]
                    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "5"}]
                return said

    record = await play(Text(), by_turn("Action: add\nObservation: 6", "It is 5."))

    assert list(verify_episode(record, RENDERER, drift="off").wrong) == []
    assert len(record.sequences) == 1
    assert record.metrics["cut_tokens"] > 0


@pytest.mark.parametrize("settings", [{"tool_choice": "none"}, {"parallel_tool_calls": False}], ids=str)
async def test_calls_that_were_not_sent_are_found_right_by_the_doctor(settings):
    class Strict(Adder):
        async def agent(self, url, task):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as sdk:
                messages = [{"role": "user", "content": "What is 2 + 3?"}]
                answer = await sdk.chat.completions.create(
                    model="m", messages=messages, tools=[ADD], **settings
                )
                return answer.choices[0].message.content or "5"

    record = await play(Strict(), ["So." + 2 * call('{"a": 2, "b": 3}')])

    assert list(verify_episode(record, RENDERER, drift="off").wrong) == []


async def test_a_reply_that_a_stop_string_ended_is_found_right_by_the_doctor():
    class Stops(Adder):
        async def agent(self, url, task):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as sdk:
                messages = [{"role": "user", "content": "What is 2 + 3?"}]
                answer = await sdk.chat.completions.create(model="m", messages=messages, stop=["END"])
                return answer.choices[0].message.content

    record = await play(Stops(), ["It is 5.END of it"])

    assert list(verify_episode(record, RENDERER, drift="off").wrong) == []


async def test_every_conversation_of_a_branching_record_is_exported_and_learned_once():
    record = await branching()

    rows = list(to_sft([record]))

    assert len(rows) == len(record.sequences)
    learned = [message for row in rows for message in row["messages"] if message["role"] == "assistant"]
    assert sum(message.get("weight", 1) for message in learned) == len(record.turns)


async def test_the_trainer_takes_every_sequence_of_an_agent():
    good, bad = await branching(), await play(Adder(), ["no"])
    bad = replace(bad, member=1)

    rows = build_batch(
        [TrajectoryGroup((replace(good, env_id="Adder", group_id=bad.group_id), bad))], GRPOConfig()
    ).rows

    assert sum(row.num_trained for row in rows) == good.num_sampled_tokens + bad.num_sampled_tokens
    assert {row.sequence for row in rows if row.member == 0} == set(range(len(good.sequences)))
    assert len({float(row.advantages_n[0]) for row in rows}) == 2


async def test_a_chat_api_can_be_evaluated_with_an_agent():
    class Api:
        name = "api"
        max_context_tokens = None

        async def chat(self, messages, tools, sampling, *, deadline_s=None):
            last = len([message for message in messages if message["role"] == "assistant"])
            made = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            first = {"role": "assistant", "content": "", "tool_calls": [made]}
            message = {"role": "assistant", "content": "It is 5."} if last else first
            return ChatCompletion(message, Usage(10, 5), "stop")

        async def close(self):
            pass

    record = await Runner(Api()).run_episode(Adder(), {"x": 2, "y": 3})

    assert (record.stop_reason, record.reward) == (StopReason.FINAL_ANSWER, 1.0)
    assert record.sequences == ()
    assert "only speaks text" in record.untrainable_reason
    assert record.metrics["prompt_tokens"] == 20


async def test_an_agent_that_is_a_program_gets_a_fresh_home_and_the_address(tmp_path: Path):
    program = tmp_path / "my_agent.py"
    program.write_text(
        textwrap.dedent(
            """
            import json, os, sys, urllib.request
            assert os.listdir(os.environ["HOME"]) == [".codex"], os.listdir(os.environ["HOME"])
            assert "SECRET" not in os.environ
            question = json.loads(os.environ["AGENTENV_TASK"])["x"]
            body = {"model": "m", "messages": [{"role": "user", "content": f"{question} {open('note').read()}"}]}
            request = urllib.request.Request(
                os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            answer = json.load(urllib.request.urlopen(request))
            open("result", "w").write("made")
            print(answer["choices"][0]["message"]["content"])
            sys.exit(int(sys.argv[1]))
            """
        )
    )

    class Program(ae.AgentEnv):
        def start(self):
            (self.workspace / "note").write_text("hi")

        def command(self, x, exits):
            return [sys.executable, str(program), str(exits)]

        def reward(self, answer, workspace):
            return float(answer == "Six.\n" and (workspace / "result").read_text() == "made")

    os.environ["SECRET"] = "x"
    try:
        env = Program()
        record = await runner(["Six."]).run_episode(env, {"x": 2, "exits": 0})
        failed = await runner(["Six."]).run_episode(Program(), {"x": 2, "exits": 3})
    finally:
        del os.environ["SECRET"]

    assert (record.stop_reason, record.reward, record.error) == (StopReason.FINAL_ANSWER, 1.0, None)
    assert record.messages[0]["content"] == "2 hi"
    assert not env.workspace.joinpath("note").exists()
    assert (failed.error.boundary, failed.error.type) == ("agent", "AgentFailed")
    assert "exit code 3" in failed.error.message


async def test_an_agent_runs_what_the_model_writes_in_the_sandbox_of_its_episode():
    class Coder(Adder):
        async def agent(self, url, task):
            code = await loop(url, "Write Python.", tools=())
            return (await self.context.sandbox.run_code(code)).stdout

        async def reward(self, answer, x, y):
            checked = await self.context.sandbox.run_code(f"print({answer} == {x + y})")
            return float(checked.stdout == "True\n")

    spec = ae.EnvSpec.of("demo/Coder-v0", Coder, tasks=[{"x": 2, "y": 3}], sandbox="none")

    (group,) = [group async for group in runner(["print(2 + 3)"]).run_groups(spec, spec.task_set())]

    assert (group[0].stop_reason, group[0].reward) == (StopReason.FINAL_ANSWER, 1.0)


async def test_a_program_that_never_ends_is_ended_with_all_that_it_started(tmp_path: Path):
    class Endless(ae.AgentEnv):
        def command(self):
            return ["/bin/sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; wait"]

    record = await runner().run_episode(Endless(), {}, limits=RunLimits(episode_timeout_s=2.5))

    assert record.stop_reason is StopReason.ABORTED, "the program asked the model nothing"
    pid = int((tmp_path / "pid").read_text())
    await until(
        lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    )


async def test_fifty_agents_at_once_leave_nothing_behind():
    played = runner(concurrency=50)
    spec = ae.EnvSpec.of("demo/Adder-v0", Raw, tasks=[{"x": 2, "y": 3}])

    (group,) = [group async for group in played.run_groups(spec, spec.task_set(), 50)]

    assert {member.reward for member in group} == {1.0}
    assert {len(member.sequences) for member in group} == {1}
    assert played.ledger.balanced


class Raw(Adder):
    """The same agent without an SDK."""

    async def agent(self, url, task):
        messages = [{"role": "user", "content": "?"}]
        async with aiohttp.ClientSession() as http:
            while True:
                body = {"model": "m", "messages": messages, "tools": [ADD]}
                async with http.post(f"{url}/v1/chat/completions", json=body) as got:
                    message = (await got.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return message["content"]
                messages += [
                    {"role": "tool", "tool_call_id": made["id"], "content": "5"}
                    for made in message["tool_calls"]
                ]


class Team(Adder):
    """Asks two sub-agents at once, of which the one with the lower number ends first."""

    slower = "Part 1"

    async def agent(self, url, task):
        first, second = asyncio.Event(), asyncio.Event()

        async def part(name):
            await loop(url, name)
            (second if name == self.slower else first).set()

        async with asyncio.TaskGroup() as group:
            group.create_task(part("Part 0" if self.slower == "Part 1" else "Part 1"))
            await first.wait()
            group.create_task(part(self.slower))
            await second.wait()
        return await loop(url, "What is 2 + 3?")


class SlowFirst(Team):
    slower = "Part 0"


@pytest.mark.parametrize("again", [Team, SlowFirst])
async def test_a_branching_record_is_replayed_whatever_conversation_comes_first(again):
    record = await play(Team())
    assert len(record.sequences) == 3

    replay = await replay_episode(record, again(), RENDERER)

    assert str(replay.difference) == "None"
    assert sum(len(turn.message["content"]) for turn in replay.trajectory.turns) == sum(
        len(turn.message["content"]) for turn in record.turns
    )


async def test_a_record_with_forks_is_replayed():
    record = await branching()

    replay = await replay_episode(record, Branching(), RENDERER)

    assert str(replay.difference) == "None"
    assert [sequence.token_ids for sequence in replay.trajectory.sequences] == [
        sequence.token_ids for sequence in record.sequences
    ]


async def test_an_agent_that_does_otherwise_than_recorded_is_told():
    class Other(Branching):
        async def agent(self, url, task):
            await loop(url, "Another sub task")
            return await super().agent(url, task)

    record = await branching()

    replay = await replay_episode(record, Other(), RENDERER)

    assert not replay.same


async def test_a_branching_record_of_a_chat_api_is_replayed():
    class Api:
        name, max_context_tokens = "api", None

        async def chat(self, messages, tools, sampling, *, deadline_s=None):
            said = {"role": "assistant", "content": f"{len(messages)} to {messages[0]['content']}"}
            return ChatCompletion(said, Usage(completion_tokens=3), "stop")

        async def close(self):
            pass

    played = Runner(Api(), None, options=RunnerOptions(retry_wait_s=0))
    record = await played.run_episode(Team(), {"x": 2, "y": 3})
    assert len(record.rewrites) == 2

    replay = await replay_episode(record, Team(), None)
    other = await replay_episode(record, SlowFirst(), None)

    assert str(replay.difference) == "None"
    assert sorted(turn.message["content"] for turn in other.trajectory.turns) == sorted(
        turn.message["content"] for turn in record.turns
    )
