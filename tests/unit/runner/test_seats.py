"""Games in which the policy plays several seats at once: one episode and one group for each seat."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentenv.core import Context, EngineUnavailable
from agentenv.engine import Sampling, ScriptedEngine
from agentenv.envs import EnvSpec, MultiEnv
from agentenv.runner import Runner
from agentenv.runner.guard import Failure, Guard, Halt
from agentenv.runs import evaluate, replay_episode
from agentenv.training.objective import group_advantages
from helpers.virtual_time import run_in_virtual_time
from helpers.waiting import until
from scenes import RENDERER, TOKENIZER, groups_of, runner, spec_of


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


def spec(seat: str = "a", env: type[MultiEnv] = Count, **kwargs) -> EnvSpec:
    return spec_of(env, [{"id": "t", "seat": seat}], kwargs={"opponents": "self", **kwargs})


def seat_of(request) -> str:
    return request.prompt_text.split("user\n")[-1][0]


SAID = {"a": "11", "b": "2", "c": "333"}


async def by_seat(playing: Runner, entry: EnvSpec | None = None, group_size: int = 1):
    """Play a game; return the groups by their seats, in the order in which they came."""
    groups = await groups_of(playing, entry or spec(), None, group_size)
    return {group[0].task["seat"]: group for group in groups}


async def test_each_seat_has_its_own_group_episode_tokens_and_reward():
    groups = await by_seat(runner(lambda request: SAID[seat_of(request)]), group_size=2)

    ids = {"b": "test/Count-v0:t/seat:b", "c": "test/Count-v0:t/seat:c", "a": "test/Count-v0:t"}
    assert {seat: group.group_id for seat, group in groups.items()} == ids
    assert {seat: group[0].reward for seat, group in groups.items()} == {"a": 1.0, "b": -0.5, "c": -0.5}
    for seat, group in groups.items():
        assert len(group) == 2
        for one in group:
            spans = [span for span in one.sequences[0].spans if span.source == "model"]
            sampled = [TOKENIZER.decode(list(span.token_ids)).removesuffix("<|im_end|>") for span in spans]
            told = [turn.message["content"] for turn in one.turns]
            assert told == sampled == [SAID[seat]] * (2 if seat == "a" else 1), "tokens are only its own"
            assert (one.trainable, one.other_seats) == (True, ())


async def test_only_the_seats_of_the_policy_have_episodes():
    players = {"b": lambda move: "7", "c": "self"}

    groups = await by_seat(runner("1"), spec(opponents=players))

    assert [*groups] == ["c", "a"]
    assert "7" in groups["c"][0].messages[1]["content"]


async def test_rewards_of_a_game_sum_to_zero_and_so_do_the_advantages_of_two_seats():
    class Two(Count):
        seats = ("a", "b")
        length = 2

        def turn(self):
            return None if len(self.said) == 2 else self.seats[len(self.said)]

        def rewards(self):
            won = int(self.said[0][0]) > int(self.said[1][0])
            return {"a": 1.0 if won else -1.0, "b": -1.0 if won else 1.0}

    playing = runner(lambda request: str(request.sampling.seed % 10))
    groups = await by_seat(playing, spec(env=Two), 8)

    rewards = [[one.reward for one in group] for group in (groups["a"], groups["b"])]
    assert len(set(rewards[0])) == 2
    assert [a + b for a, b in zip(*rewards, strict=True)] == [0.0] * 8
    for advantage, scale in (("grpo", "group"), ("grpo", "none"), ("rloo", "none"), ("grpo", "batch")):
        own, other = group_advantages(rewards, advantage=advantage, scale_rewards=scale)
        assert [a + b for a, b in zip(own, other, strict=True)] == pytest.approx([0.0] * 8)
    # One group of both seats would have the mean 0, whatever the seats are worth: no baseline at all.
    assert sum(rewards[0] + rewards[1]) == 0.0


async def test_seats_sample_with_seeds_of_their_own_and_the_same_ones_again():
    async def seeds() -> list[tuple[str, int]]:
        playing = runner("1")
        await by_seat(playing)
        return [(seat_of(request), request.sampling.seed) for request in playing.engine.requests]

    first, again = await seeds(), await seeds()

    assert first == again
    assert len({seed for _, seed in first}) == 4


async def test_a_seat_that_is_cut_loses_and_the_others_win():
    playing = runner(
        lambda request: "far too long" if seat_of(request) == "b" else "1", max_tokens_per_turn=4
    )

    groups = await by_seat(playing)

    ended = {seat: (group[0].stop_reason, group[0].reward) for seat, group in groups.items()}
    # c had no turn, so it has no episode.
    assert ended == {"a": ("env_terminated", 0.5), "b": ("generation_length", -1.0)}
    assert groups["a"][0].messages[-1]["content"] == "The game is over: b has left it."


async def test_if_the_game_s_own_seat_is_cut_the_others_are_told():
    playing = runner(
        lambda request: "far too long" if request.prompt_text.count("a:") > 1 else "1", max_tokens_per_turn=4
    )

    groups = await by_seat(playing)

    rewards = {seat: group[0].reward for seat, group in groups.items()}
    assert rewards == {"a": -1.0, "b": 0.5, "c": 0.5}


async def test_a_game_that_ends_before_a_seat_s_first_turn_leaves_no_episode_of_it():
    groups = await by_seat(runner("bad"), spec("b"))

    told = {seat: (group[0].reward, len(group[0].turns)) for seat, group in groups.items()}
    assert told == {"a": (-1.0, 1), "b": (0.5, 0)}
    assert groups["b"][0].untrainable_reason == "no token was sampled by the policy"


async def test_if_the_game_breaks_every_seat_has_failed():
    playing = runner(lambda request: "crash" if seat_of(request) == "c" else "1")

    groups = await by_seat(playing)

    assert {*groups} == {"a", "b", "c"}
    told = {(group[0].stop_reason, group[0].error.message) for group in groups.values()}
    assert told == {("error", "the board broke")}
    assert (playing.ledger.outcomes, playing.ledger.balanced) == ({"error": 3}, True)


async def test_a_game_is_played_again_as_a_whole_if_the_engine_fails_at_one_seat():
    failed = []

    def answer(request):
        if seat_of(request) == "b" and not failed:
            failed.append(True)
            raise EngineUnavailable("try again")
        return "1"

    playing = runner(answer)

    groups = await by_seat(playing)

    assert [(group[0].error, group[0].attempt) for group in groups.values()] == [(None, 1)] * 3
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

    playing = runner(Stuck(lambda request: "1", tokenizer=TOKENIZER))
    before = asyncio.all_tasks()
    task = asyncio.create_task(by_seat(playing, spec(opponents={"b": "self", "c": "self"})))
    await reached.wait()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await until(lambda: asyncio.all_tasks() == before)
    assert (playing.ledger.balanced, playing.ledger.cancelled) == (True, 1)


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


async def test_a_game_of_seats_cannot_be_continued_from_a_turn_or_replayed():
    playing = runner("1")
    record = (await by_seat(playing))["a"][0]

    (group,) = [group async for group in playing.run_branches(spec(), [record], 1, from_turn=1)]
    replay = await replay_episode(record, spec().make(), RENDERER)

    for one in (group[0], replay.trajectory):
        assert "several seats can neither" in one.error.message


def test_an_evaluation_keeps_the_episodes_of_all_seats(tmp_path):
    result = evaluate(spec(), "random", num_tasks=1, group_size=2, runs_dir=tmp_path)

    ids = [one.task_id for one in result.summaries]
    assert ids == ["t", "t", "t/seat:b", "t/seat:b", "t/seat:c", "t/seat:c"]
    assert result.stopped == ""


async def test_one_episode_hands_out_the_other_seats_of_its_game():
    record = await runner("1").run_episode(spec().make(), {"id": "t", "seat": "b"}, sampling=Sampling())

    assert [one.task["seat"] for one in record.other_seats] == ["a", "c"]
