"""Games in which the policy plays several seats at once: one episode and one group for each seat."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentenv.core import Context, EngineUnavailable, RunLimits, StopReason
from agentenv.engine import Sampling, ScriptedEngine
from agentenv.envs import EnvSpec, MultiEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions
from agentenv.runner.guard import Failure, Guard, Halt
from agentenv.runs import evaluate, replay_episode
from agentenv.training.objective import group_advantages
from helpers.virtual_time import run_in_virtual_time
from helpers.waiting import until

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)


class Count(MultiEnv):
    """Players name numbers in turn; whoever says the last of `length` numbers wins."""

    seats = ("a", "b", "c")
    length = 4
    system_prompt = "Name a number."

    def start(self, task, seed):
        self.said = []

    def turn(self):
        return None if len(self.said) == self.length or "bad" in self.said else self.seats[len(self.said) % 3]

    def observe(self, seat):
        return f"{seat}: {' '.join(self.said)}."

    def choices(self, seat):
        return ("1", "2")

    def act(self, seat, text):
        if text == "crash":
            raise RuntimeError("the board broke")
        self.said.append(text)

    def rewards(self):
        last = self.seats[(len(self.said) - 1) % 3]
        won = "bad" not in self.said
        return {seat: (1.0 if won else -1.0) * (1.0 if seat == last else -0.5) for seat in self.seats}


def spec(tasks=({"id": "t", "seat": "a"},), **kwargs) -> EnvSpec:
    return EnvSpec.of("test/Count-v0", Count, tasks=list(tasks), kwargs={"opponents": "self", **kwargs})


def runner(answer, *, limits=None, **options) -> Runner:
    engine = ScriptedEngine(answer, tokenizer=TOKENIZER)
    return Runner(engine, RENDERER, limits, options=RunnerOptions(retry_wait_s=0.0, **options))


def seat_of(request) -> str:
    return request.prompt_text.split("user\n")[-1][0]


async def groups_of(playing: Runner, entry: EnvSpec, group_size=2):
    return [group async for group in playing.run_groups(entry, entry.task_set(), group_size)]


async def test_each_seat_has_its_own_group_episode_tokens_and_reward():
    groups = await groups_of(
        runner(lambda request: {"a": "11", "b": "2", "c": "333"}[seat_of(request)]), spec()
    )

    assert [group.group_id for group in groups] == [
        "test/Count-v0:t/seat:b",
        "test/Count-v0:t/seat:c",
        "test/Count-v0:t",
    ]
    b, c, a = (group[0] for group in groups)
    assert [one.task["seat"] for one in (a, b, c)] == ["a", "b", "c"]
    assert [one.reward for one in (a, b, c)] == [1.0, -0.5, -0.5]
    assert [[turn.message["content"] for turn in one.turns] for one in (a, b, c)] == [
        ["11", "11"],
        ["2"],
        ["333"],
    ]
    assert all(len(group) == 2 for group in groups)


async def test_a_seat_s_tokens_are_only_its_own():
    groups = await groups_of(
        runner(lambda request: {"a": "11", "b": "2", "c": "333"}[seat_of(request)]), spec()
    )

    for group in groups:
        for one in group:
            (sequence,) = one.sequences
            sampled = [
                TOKENIZER.decode(list(span.token_ids)) for span in sequence.spans if span.source == "model"
            ]
            said = {"a": "11", "b": "2", "c": "333"}[one.task["seat"]]
            assert [text.removesuffix("<|im_end|>") for text in sampled] == [said] * len(one.turns)
            assert one.trainable
            assert one.other_seats == ()


async def test_only_the_seats_of_the_policy_have_episodes():
    players = {"b": lambda move: "7", "c": "self"}

    groups = await groups_of(runner(lambda request: "1"), spec(opponents=players))

    assert [group[0].task["seat"] for group in groups] == ["c", "a"]
    assert "7" in groups[0][0].messages[1]["content"]


async def test_rewards_of_a_game_sum_to_zero_and_so_do_the_advantages_of_two_seats():
    class Two(Count):
        seats = ("a", "b")
        length = 2

        def turn(self):
            return None if len(self.said) == 2 else self.seats[len(self.said)]

        def rewards(self):
            won = int(self.said[0][0]) > int(self.said[1][0])
            return {"a": 1.0 if won else -1.0, "b": -1.0 if won else 1.0}

    entry = EnvSpec.of("test/Two-v0", Two, tasks=[{"id": "t", "seat": "a"}], kwargs={"opponents": "self"})
    playing = runner(lambda request: str(request.sampling.seed % 10))

    second, first = await groups_of(playing, entry, 8)

    rewards = [[one.reward for one in group] for group in (first, second)]
    assert len(set(rewards[0])) == 2
    assert [a + b for a, b in zip(*rewards, strict=True)] == [0.0] * 8
    for advantage, scale in (("grpo", "group"), ("grpo", "none"), ("rloo", "none"), ("grpo", "batch")):
        own, other = group_advantages(rewards, advantage=advantage, scale_rewards=scale)
        assert [a + b for a, b in zip(own, other, strict=True)] == pytest.approx([0.0] * 8)
    # One group of both seats would have the mean 0, whatever the seats are worth: no baseline at all.
    assert sum(rewards[0] + rewards[1]) == 0.0


async def test_seats_sample_with_seeds_of_their_own_and_the_same_ones_again():
    def seeds():
        seen = {}

        def answer(request):
            seen.setdefault(seat_of(request), []).append(request.sampling.seed)
            return "1"

        return seen, runner(answer)

    runs = [seeds(), seeds()]
    for _, playing in runs:
        await groups_of(playing, spec(), 1)

    (first, _), (again, _) = runs
    assert first == again
    assert len({seed for own in first.values() for seed in own}) == 4


async def test_a_seat_that_is_cut_loses_and_the_others_win():
    limits = RunLimits(max_tokens_per_turn=4)
    playing = runner(lambda request: "far too long" if seat_of(request) == "b" else "1", limits=limits)

    groups = await groups_of(playing, spec(), 1)

    ended = {group[0].task["seat"]: (group[0].stop_reason, group[0].reward) for group in groups}
    assert ended == {  # c had no turn, so it has no episode
        "a": (StopReason.ENV_TERMINATED, 0.5),
        "b": (StopReason.GENERATION_LENGTH, -1.0),
    }
    assert groups[1][0].messages[-1]["content"] == "The game is over: b has left it."


async def test_if_the_game_s_own_seat_is_cut_the_others_are_told():
    limits = RunLimits(max_tokens_per_turn=4)
    playing = runner(
        lambda request: "far too long" if request.prompt_text.count("a:") > 1 else "1", limits=limits
    )

    groups = await groups_of(playing, spec(), 1)

    rewards = {group[0].task["seat"]: group[0].reward for group in groups}
    assert rewards == {"a": -1.0, "b": 0.5, "c": 0.5}


async def test_a_game_that_ends_before_a_seat_s_first_turn_leaves_no_episode_of_it():
    tasks = [{"id": "t", "seat": "b"}]

    groups = await groups_of(runner(lambda request: "bad"), spec(tasks), 1)

    told = {group[0].task["seat"]: (group[0].reward, len(group[0].turns)) for group in groups}
    assert told == {"a": (-1.0, 1), "b": (0.5, 0)}
    assert groups[-1][0].untrainable_reason == "no token was sampled by the policy"


async def test_if_the_game_breaks_every_seat_has_failed():
    playing = runner(lambda request: "crash" if seat_of(request) == "c" else "1")

    groups = await groups_of(playing, spec(), 1)

    assert {group[0].task["seat"] for group in groups} == {"a", "b", "c"}
    assert {group[0].stop_reason for group in groups} == {StopReason.ERROR}
    assert {group[0].error.message for group in groups} == {"the board broke"}
    assert playing.ledger.balanced
    assert playing.ledger.outcomes == {StopReason.ERROR: 3}


async def test_a_game_is_played_again_as_a_whole_if_the_engine_fails_at_one_seat():
    failed = []

    def answer(request):
        if seat_of(request) == "b" and not failed:
            failed.append(True)
            raise EngineUnavailable("try again")
        return "1"

    playing = runner(answer)

    groups = await groups_of(playing, spec(), 1)

    assert [group[0].error for group in groups] == [None] * 3
    assert [group[0].attempt for group in groups] == [1] * 3
    assert (playing.ledger.retried, playing.ledger.submitted, playing.ledger.balanced) == (1, 3, True)


async def test_a_cancelled_game_leaves_no_task_behind():
    reached, never = asyncio.Event(), asyncio.Event()

    class Stuck(ScriptedEngine):
        async def generate(self, *args, **kwargs):
            if reached.is_set():
                return await super().generate(*args, **kwargs)
            reached.set()
            await never.wait()
            raise AssertionError

    playing = Runner(Stuck(lambda request: "1", tokenizer=TOKENIZER), RENDERER)
    before = asyncio.all_tasks()
    task = asyncio.create_task(groups_of(playing, spec(opponents={"b": "self", "c": "self"}), 1))
    await reached.wait()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await until(lambda: asyncio.all_tasks() == before)
    assert playing.ledger.balanced
    assert playing.ledger.cancelled == 1


async def passed(seconds: float) -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, event.set)
    await event.wait()


def test_the_time_limit_of_a_step_does_not_run_while_another_seat_thinks(monkeypatch):
    async def step(thinking_s: float, own_s: float, deadline_s: float | None) -> str:
        monkeypatch.setattr(time, "monotonic", asyncio.get_running_loop().time)
        context = Context(deadline=None if deadline_s is None else time.monotonic() + deadline_s)
        guard = Guard(context)
        try:
            async with guard.waiting("env", 1.0):
                with guard.other_episode():
                    await passed(thinking_s)
                await passed(own_s)
        except Failure as failure:
            return failure.error.message
        except Halt as halt:
            return halt.reason
        return "answered"

    def outcome(*arguments):
        return run_in_virtual_time(lambda: step(*arguments), monkeypatch)

    assert outcome(60.0, 0.5, None) == "answered"
    assert outcome(60.0, 2.0, None) == "env: no answer within 1.0 s (limits.env_timeout_s)"
    assert outcome(60.0, 0.5, 30.0) == "deadline"


def test_a_game_of_seats_cannot_be_continued_from_a_turn():
    async def played():
        playing = runner(lambda request: "1")
        entry = spec()
        record = (await groups_of(playing, entry, 1))[-1][0]
        return [group async for group in playing.run_branches(entry, [record], 1, from_turn=1)]

    (group,) = asyncio.run(played())

    assert "several seats can neither" in group[0].error.message


async def test_a_game_of_seats_cannot_be_replayed():
    playing, entry = runner(lambda request: "1"), spec()
    record = (await groups_of(playing, entry, 1))[-1][0]

    replay = await replay_episode(record, entry.make(), RENDERER)

    assert "several seats can neither" in replay.trajectory.error.message


def test_an_evaluation_keeps_the_episodes_of_all_seats(tmp_path):
    result = evaluate(spec(), "random", num_tasks=1, group_size=2, runs_dir=tmp_path)

    assert [one.task_id for one in result.summaries] == [
        "t",
        "t",
        "t/seat:b",
        "t/seat:b",
        "t/seat:c",
        "t/seat:c",
    ]
    assert result.stopped == ""


async def test_one_episode_hands_out_the_other_seats_of_its_game():
    playing = runner(lambda request: "1")

    record = await playing.run_episode(spec().make(), {"id": "t", "seat": "b"}, sampling=Sampling())

    assert [one.task["seat"] for one in record.other_seats] == ["a", "c"]
