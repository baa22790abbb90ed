"""Episodes in which an agent with a loop of its own asks the model."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import openai
import pytest

import agentenv as ae
from agentenv.core import EngineUnavailable, TrajectoryGroup
from agentenv.engine import ScriptedTurn
from agentenv.runs import replay_episode, verify_episode
from agentenv.runs.store.codec import decode_trajectory, dumps, encode_trajectory
from agentenv.training import GRPOConfig
from agentenv.training.batch import build_batch
from agentenv_bridges import to_openai, to_sft
from helpers.agents import ADD, by_turn, call
from helpers.waiting import until
from scenes import RENDERER, Chat, groups_of, runner, spec_of
from scenes import play as play_in_scene

CALL = call('{"a": 2, "b": 3}')
TURNS = by_turn(CALL, "It is 5.")
TASK = {"x": 2, "y": 3}


@asynccontextmanager
async def asking(url) -> AsyncGenerator:
    """A function that asks with OpenAI's SDK, adds the reply and the results of its calls to the messages."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as sdk:

        async def ask(messages, *, system=None, result="5", **options):
            prompt = [*([{"role": "system", "content": system}] if system else []), *messages]
            answer = await sdk.chat.completions.create(model="m", messages=prompt, **options)
            message = answer.choices[0].message
            made = message.tool_calls or ()
            messages += [
                message,
                *({"role": "tool", "tool_call_id": one.id, "content": result} for one in made),
            ]
            return message

        yield ask


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def loop(url, question, *, tools=(ADD,)):
    """The loop that every agent has."""
    async with asking(url) as ask:
        messages = [user(question)]
        while (message := await ask(messages, tools=list(tools))).tool_calls:
            pass
        return message.content


class Adder(ae.AgentEnv):
    async def agent(self, url, task):
        return await loop(url, f"What is {task['x']} + {task['y']}?")

    def reward(self, answer, x, y):
        return float(str(x + y) in answer)


async def play(agent=None, script=TURNS, env=Adder, **settings):
    """Play an episode of an agent; or of a function in the place of one's method."""
    made = type("Own", (env,), {"agent": agent}) if agent is not None else env
    return await play_in_scene(made(), script, TASK, **settings)


def right(record) -> bool:
    """Whether the doctor finds nothing wrong, and whether the record is read back as it was written."""
    assert list(verify_episode(record, RENDERER, drift="off").wrong) == []
    return decode_trajectory(json.loads(dumps(encode_trajectory(record)))) == record


async def test_an_agent_plays_an_episode_as_any_environment():
    record = await play()

    (sequence,) = record.sequences
    assert (record.stop_reason, record.reward, record.trainable) == ("final_answer", 1.0, True)
    assert [message["role"] for message in record.messages] == ["user", "assistant", "tool", "assistant"]
    assert [result.content for result in record.turns[0].tool_results] == ["5"]
    assert sequence.num_trained_tokens == record.num_sampled_tokens
    assert (record.tools, record.metrics["tool_calls"]) == ((ADD,), 1)
    assert (record.turns[-1].reward, record.answer) == (1.0, "It is 5.")


async def test_the_sampling_seeds_are_those_of_any_environment():
    one, other = runner(TURNS), runner(TURNS)
    await one.run_episode(Adder(), TASK)
    await other.run_episode(Adder(), TASK, member=1)

    assert len({request.sampling.seed for each in (one, other) for request in each.engine.requests}) == 4


async def test_groups_of_an_agent_are_played_at_once():
    playing = runner(TURNS, concurrency=8)

    groups = await groups_of(playing, spec_of(Adder, [TASK, {"x": 1, "y": 1}]), group_size=4)

    assert sorted([member.reward for member in group] for group in groups) == [[0.0] * 4, [1.0] * 4]
    assert len(set(playing.engine.released)) == 8
    assert playing.ledger.balanced


async def test_an_episode_of_an_agent_cannot_be_continued_from_a_turn():
    """The agent has a state of its own, which a replay of the environment does not bring back."""
    branches = runner(TURNS).run_branches(spec_of(Adder, [TASK]), [await play()], 2, from_turn=1)

    (group,) = [group async for group in branches]

    assert all(member.stop_reason == "error" for member in group)
    assert "cannot be continued from one of its turns" in group[0].error.message


@pytest.mark.parametrize(
    ("error", "asks", "kind"),
    [
        (LookupError("lost"), True, "LookupError"),
        (None, False, "UsageError"),
        (TimeoutError(), False, "TimeoutError"),
        *((one(), False, None) for one in (SystemExit, asyncio.CancelledError, GeneratorExit)),
    ],
    ids=repr,
)
async def test_whatever_an_agent_raises_ends_only_its_episode(error, asks, kind):
    async def broken(self, url, task):
        if asks:
            await loop(url, "?")
        if isinstance(error, TimeoutError):  # it hangs
            await asyncio.Event().wait()
        if error is not None:
            raise error
        return "5"  # without having asked the model

    record = await play(broken, env_timeout_s=0.5 if isinstance(error, TimeoutError) else 60)

    assert (record.stop_reason, record.error.boundary, record.trainable) == ("error", "agent", False)
    assert len(record.turns) == 2 * asks
    assert kind in (None, record.error.type)
    assert error is not None or "without asking the model" in record.error.message


async def test_an_agent_that_hides_a_refusal_is_told_its_words():
    async def hiding(self, url, task):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as sdk:
            with suppress(openai.BadRequestError):
                await sdk.chat.completions.create(model="any", messages="What?")
        return "5"

    record = await play(hiding)

    assert "messages is 'What?': send a list" in record.error.message
    assert "base URL" not in record.error.message


@pytest.mark.parametrize(
    ("script", "limits", "ended", "turns"),
    [
        (by_turn(CALL), {"max_turns": 3}, "max_turns", 3),
        # A full context that the agent does not handle is no failure.
        (by_turn(CALL), {"max_context_tokens": 700, "min_answer_tokens": 150}, "context_length", None),
        ("x" * 90, {"max_tokens_per_turn": 20}, "generation_length", 1),
    ],
)
async def test_a_limit_ends_the_agent_and_the_episode_is_scored(script, limits, ended, turns):
    record = await play(None, script, **limits)

    assert (record.stop_reason, record.reward, record.trainable) == (ended, 0.0, True)
    assert turns in (None, len(record.turns))


async def test_an_agent_may_shorten_its_conversation_when_the_context_is_full():
    async def compacting(self, url, task):
        try:
            return await loop(url, "x" * 800)
        except openai.BadRequestError as error:
            return await loop(url, f"What is 2 + 3 ({error.code})?")

    record = await play(compacting, max_context_tokens=900)

    assert "(context_length_exceeded)" in record.messages[0]["content"]
    assert (record.stop_reason, record.reward) == ("final_answer", 1.0)


async def test_an_agent_whose_model_never_answers_is_not_scored():
    record = await play(None, [ScriptedTurn(text="12", gate=asyncio.Event())], episode_timeout_s=2.5)

    assert (record.stop_reason, record.reward, record.error.boundary) == ("aborted", None, "engine")


async def test_a_deadline_ends_an_agent_that_never_ends():
    ended = asyncio.Event()

    async def endless(self, url, task):
        await loop(url, "?")
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    record = await play(endless, episode_timeout_s=2.5)

    assert (record.stop_reason, record.reward) == ("deadline", 1.0)
    assert ended.is_set()


async def test_an_engine_that_fails_aborts_the_episode_which_is_played_again():
    asked = []

    def policy(request):
        asked.append(request)
        return ScriptedTurn(error=EngineUnavailable("gone")) if len(asked) == 1 else TURNS(request)

    ((record,),) = await groups_of(runner(policy), spec_of(Adder, [TASK]))

    assert (record.stop_reason, record.attempt) == ("final_answer", 1)


async def test_an_episode_that_is_cancelled_ends_its_agent_and_its_server():
    ended, playing = asyncio.Event(), runner([ScriptedTurn(text="late", gate=asyncio.Event())])

    class Watched(Adder):
        async def agent(self, url, task):
            try:
                return await super().agent(url, task)
            finally:
                ended.set()

    task = asyncio.create_task(playing.run_episode(Watched(), TASK))
    await until(lambda: playing.engine.requests)
    task.cancel()
    await asyncio.wait({task})

    assert ended.is_set()
    assert playing.engine.released
    await until(lambda: not [one for one in asyncio.all_tasks() if "agentenv" in repr(one.get_coro())])


async def test_sub_agents_are_sequences_of_one_episode_and_share_its_reward():
    async def team(self, url, task):
        await asyncio.gather(*(loop(url, f"Part {part}") for part in range(3)))
        return await loop(url, "What is 2 + 3?")

    record = await play(team)

    assert (len(record.sequences), record.metrics["forks_new"], record.reward) == (4, 3, 1.0)
    assert record.turns[-1].message["content"] == "It is 5."
    assert [rewrite.turn for rewrite in record.rewrites] == [2, 4, 6]
    assert sum(sequence.num_trained_tokens for sequence in record.sequences) == record.num_sampled_tokens


class Branching(Adder):
    """Has a sub-agent, asks each turn twice, and makes calls that repeat."""

    async def agent(self, url, task):
        await loop(url, "Sub task")
        async with asking(url) as ask:
            messages = [user("What is 2 + 3?")]
            for _ in range(3):
                await ask([*messages], tools=[ADD])
                message = await ask(messages, tools=[ADD])
            return message.content


async def branching():
    """An episode of `Branching`."""
    return await play(None, by_turn(CALL, CALL, "It is 5."), Branching)


async def test_a_branching_record_holds_together_and_is_exported_and_trained_whole():
    record = await branching()
    bad = replace(await play(None, ["no"]), member=1)
    good = replace(record, env_id=bad.env_id, group_id=bad.group_id)

    exported = list(to_sft([record]))
    trained = build_batch([TrajectoryGroup((good, bad))], GRPOConfig()).rows

    assert right(record)
    causes = {(rewrite.cause, rewrite.parent is None) for rewrite in record.rewrites}
    assert causes == {("new", True), ("forked", False)}
    assert sum(sequence.num_trained_tokens for sequence in record.sequences) == record.num_sampled_tokens
    learned = [message for row in exported for message in row["messages"] if message["role"] == "assistant"]
    assert len(exported) == len(record.sequences)
    assert sum(message.get("weight", 1) for message in learned) == len(record.turns)
    assert sum(row.num_trained for row in trained) == good.num_sampled_tokens + bad.num_sampled_tokens
    assert {row.sequence for row in trained if row.member == 0} == set(range(len(good.sequences)))
    assert len({float(row.advantages_n[0]) for row in trained}) == 2


TRANSFER = {**ADD, "function": {**ADD["function"], "name": "transfer"}}


async def test_tools_and_system_belong_to_a_conversation_and_not_to_the_episode_or_its_export():
    async def handoff(self, url, task):
        async with asking(url) as ask:
            history = [user("What is 2 + 3?")]
            for system, tool in (("You sort.", TRANSFER), ("You add.", ADD), ("You add.", ADD)):
                message = await ask(history, system=system, tools=[tool], result="done")
            return message.content

    record = await play(handoff, by_turn(call('{"a": 1, "b": 1}', "transfer"), CALL, "It is 5."))
    rows = list(to_openai([record]))

    assert right(record)
    assert [rewrite.cause for rewrite in record.rewrites] == ["system"]
    assert [record.tools_at(turn.index) for turn in record.turns] == [(TRANSFER,), (ADD,), (ADD,)]
    assert (record.tools, record.all_tools) == ((TRANSFER,), (TRANSFER, ADD))
    ran = [[result.content for result in turn.tool_results] for turn in record.turns]
    assert (ran, record.metrics["tool_calls"]) == ([["done"], ["done"], []], 2), "handing over counts as run"
    assert [row["tools"] for row in rows] == [row["tools"] for row in to_sft([record])] == [[TRANSFER], [ADD]]
    told = [[message["role"] for message in row["messages"]] for row in rows]
    asked = ["system", "user", "assistant", "tool"]
    assert told == [asked, [*asked, "assistant", "tool", "assistant"]]
    assert [row["messages"][0]["content"] for row in rows] == ["You sort.", "You add."]


async def test_a_reply_that_the_client_cut_is_found_right_by_the_doctor():
    async def text(self, url, task):
        async with asking(url) as ask:
            messages = [user("What is 2 + 3?")]
            for _ in range(2):
                said = (await ask(messages)).content.split("\nObservation")[0]
                messages[-1:] = [{"role": "assistant", "content": said}, user("5")]
            return said

    record = await play(text, by_turn("Action: add\nObservation: 6", "It is 5."))

    assert right(record)
    assert len(record.sequences) == 1
    assert record.metrics["cut_tokens"] > 0


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ("So." + 2 * CALL, {"tools": [ADD], "tool_choice": "none"}),
        ("So." + 2 * CALL, {"tools": [ADD], "parallel_tool_calls": False}),
        ("It is 5.END of it", {"stop": ["END"]}),
    ],
    ids=str,
)
async def test_what_was_not_sent_is_found_right_by_the_doctor(said, settings):
    async def strict(self, url, task):
        async with asking(url) as ask:
            return (await ask([user("What is 2 + 3?")], **settings)).content or "5"

    assert right(await play(strict, [said]))


async def test_a_chat_api_can_be_evaluated_with_an_agent():
    made = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}

    record = await play(None, Chat({"role": "assistant", "content": "", "tool_calls": [made]}, "It is 5."))

    assert (record.stop_reason, record.reward, record.sequences) == ("final_answer", 1.0, ())
    assert "only speaks text" in record.untrainable_reason
    assert record.metrics["prompt_tokens"] == 20


PROGRAM = """
import json, os, sys, urllib.request
assert os.listdir(os.environ["HOME"]) == [".codex"], os.listdir(os.environ["HOME"])
assert "SECRET" not in os.environ
question = json.loads(os.environ["AGENTENV_TASK"])["x"]
body = {"model": "m", "messages": [{"role": "user", "content": f"{question} {open('note').read()}"}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))
open("result", "w").write("made")
print(answer["choices"][0]["message"]["content"])
sys.exit(int(sys.argv[1]))
"""


async def test_an_agent_that_is_a_program_gets_a_fresh_home_and_the_address(tmp_path: Path, monkeypatch):
    (tmp_path / "my_agent.py").write_text(PROGRAM)
    monkeypatch.setitem(os.environ, "SECRET", "x")

    class Program(ae.AgentEnv):
        def start(self):
            (self.workspace / "note").write_text("hi")

        def command(self, x, exits):
            return [sys.executable, str(tmp_path / "my_agent.py"), str(exits)]

        def reward(self, answer, workspace):
            return float(answer == "Six.\n" and (workspace / "result").read_text() == "made")

    env = Program()
    record = await play_in_scene(env, "Six.", {"x": 2, "exits": 0})
    failed = await play_in_scene(Program(), "Six.", {"x": 2, "exits": 3})

    assert (record.stop_reason, record.reward, record.error) == ("final_answer", 1.0, None)
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

    ((record,),) = await groups_of(runner("print(2 + 3)"), spec_of(Coder, [TASK], sandbox="none"))

    assert (record.stop_reason, record.reward) == ("final_answer", 1.0)


async def test_a_program_that_never_ends_is_ended_with_all_that_it_started(tmp_path: Path):
    class Endless(ae.AgentEnv):
        def command(self):
            return ["/bin/sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; wait"]

    record = await play_in_scene(Endless(), episode_timeout_s=2.5)

    assert record.stop_reason == "aborted", "the program asked the model nothing"
    stat = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")
    await until(lambda: not stat.exists() or "Z" in stat.read_text().split()[2])


class Team(Adder):
    """Asks two sub-agents at once, of which the one with the lower number ends first."""

    order = ("Part 0", "Part 1")

    async def agent(self, url, task):
        first, second = asyncio.Event(), asyncio.Event()

        async def part(name):
            await loop(url, name)
            (second if name == self.order[1] else first).set()

        async with asyncio.TaskGroup() as group:
            group.create_task(part(self.order[0]))
            await first.wait()
            group.create_task(part(self.order[1]))
            await second.wait()
        return await loop(url, "What is 2 + 3?")


class SlowFirst(Team):
    order = ("Part 1", "Part 0")


def texts(trajectory) -> list[str]:
    return sorted(turn.message["content"] for turn in trajectory.turns)


@pytest.mark.parametrize("again", [Team, SlowFirst])
async def test_a_branching_record_is_replayed_whatever_conversation_comes_first(again):
    record = await play(env=Team)
    assert len(record.sequences) == 3

    replay = await replay_episode(record, again(), RENDERER)

    assert str(replay.difference) == "None"
    assert texts(replay.trajectory) == texts(record)


async def test_a_record_with_forks_is_replayed_and_an_agent_that_does_otherwise_is_told():
    class Other(Branching):
        async def agent(self, url, task):
            await loop(url, "Another sub task")
            return await super().agent(url, task)

    record = await branching()

    replay = await replay_episode(record, Branching(), RENDERER)
    other = await replay_episode(record, Other(), RENDERER)

    assert (str(replay.difference), other.same) == ("None", False)
    ours, truth = ([one.token_ids for one in each.sequences] for each in (replay.trajectory, record))
    assert ours == truth


async def test_a_branching_record_of_a_chat_api_is_replayed():
    api = Chat(lambda messages: f"{len(messages)} to {messages[0]['content']}")
    record = await play(None, api, Team)
    assert len(record.rewrites) == 2

    replay = await replay_episode(record, Team(), None)
    other = await replay_episode(record, SlowFirst(), None)

    assert str(replay.difference) == "None"
    assert texts(other.trajectory) == texts(record)
