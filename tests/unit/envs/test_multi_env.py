"""Games for several seats: the policy plays one of them, and opponents play the others."""

import random

import pytest

import agentenv as ae
import scenes
from agentenv.core import Action, Context, EnvironmentMisuse, TaskError, UsageError
from agentenv.engine import ScriptedEngine, TextModel
from agentenv.envs import EnvSpec, Move, MultiEnv, for_each_seat, opponents
from agentenv.testing import check_env, play


class Nim(MultiEnv):
    """Players take one or two of some sticks in turn; who takes the last one wins."""

    seats = ("first", "second")
    system_prompt = "Take 1 or 2 sticks. Who takes the last one wins."

    def start(self, task, seed):
        self.left = 4 + seed % 3
        self.at = 0
        self.winner = None
        self.taken = dict.fromkeys(self.seats, "")

    def turn(self):
        return None if self.winner else self.seats[self.at]

    def observe(self, seat):
        said, self.taken[seat] = self.taken[seat], ""
        return f"{said}{self.left} sticks are left."

    def choices(self, seat):
        return ["1", "2"][: self.left]

    def act(self, seat, text):
        other = self.seats[1 - self.at]
        if text not in self.choices(seat):
            self.winner = other
            return
        self.left -= int(text)
        self.taken[other] = f"The other player took {text}. "
        self.winner = seat if self.left == 0 else None
        self.at = 1 - self.at

    def rewards(self):
        return {seat: 1.0 if seat == self.winner else -1.0 for seat in self.seats}


def best(move: Move) -> str:
    left = int(move.observation.split(" sticks")[0].split()[-1])
    return str(left % 3 or 1)


def entry(**kwargs):
    tasks = {"train": for_each_seat([{"seed": n} for n in range(6)], Nim.seats)}
    return EnvSpec.of("game/Nim-v0", Nim, tasks=tasks, kwargs=kwargs)


async def begun(seat, seed, **kwargs):
    env = entry(**kwargs).make()
    first = await env.begin({"seed": seed, "seat": seat}, seed=seed, context=Context(seed=seed))
    return env, first.messages[-1]["content"]


async def test_the_policy_sees_what_the_others_did_before_its_first_turn():
    _, alone = await begun("first", 0, opponents=best)
    _, told = await begun("second", 0, opponents=best)

    assert alone == "4 sticks are left."
    assert told == "The other player took 1. 3 sticks are left."


async def test_each_seat_gets_its_own_reward_of_a_game():
    env, _ = await begun("first", 0, opponents=best)  # 4 sticks: who takes one wins against any play

    middle = await env.advance(Action.of("1"))
    last = await env.advance(Action.of("1" if "2 sticks" not in middle.messages[-1]["content"] else "2"))

    assert (last.terminated, last.reward) == (True, 1.0)
    assert last.info["seat_rewards"] == {"first": 1.0, "second": -1.0}


async def test_a_move_that_is_not_valid_is_the_game_s_to_judge():
    env, _ = await begun("second", 1, opponents=best)

    last = await env.advance(Action.of("all of them"))

    assert (last.terminated, last.reward) == (True, -1.0)


async def test_a_model_plays_a_seat_in_a_conversation_of_its_own():
    engine = ScriptedEngine(["1", "2"], tokenizer=scenes.TOKENIZER)
    model = TextModel(engine, scenes.RENDERER)
    env, _ = await begun("first", 2, opponents={"second": model})

    await env.advance(Action.of("1"))
    await env.advance(Action.of("1"))

    assert all(
        message in engine.requests[1].prompt_text for message in ("Take 1 or 2", "5 sticks", "3 sticks")
    )
    assert "took 1. 5 sticks" in engine.requests[0].prompt_text


async def test_the_tokens_of_an_opponent_are_not_in_the_trajectory():
    env, task = entry(opponents=best).make(), {"seed": 1, "seat": "second"}
    trajectory = await scenes.play(env, ["2", "1", "2", "1"], task)

    assert trajectory.error is None
    assert trajectory.turns[0].message["content"] == "2"
    assert trajectory.num_sampled_tokens == sum(len(turn.message["content"]) + 1 for turn in trajectory.turns)


async def test_a_seat_is_a_group_of_its_own():
    tasks = list(entry().task_set())[:4]

    groups = await scenes.groups_of(scenes.runner("1"), entry(opponents="random"), tasks, 3)

    seats = [{one.task["seat"] for one in group} for group in groups]
    assert sorted(map(len, seats)) == [1, 1, 1, 1]
    assert len({group[0].group_id for group in groups}) == 4


async def test_the_checker_passes_on_a_game():
    report = await check_env(
        entry(),
        tasks=4,
        trivial_limit=1.0,
        only=("determinism", "reuse", "isolation", "parallel", "gym", "runner", "ends"),
    )

    assert report.ok, str(report)


async def test_chance_plays_the_same_game_again_from_the_same_seed():
    spec = entry(opponents="random")
    task = spec.task_set()[1]

    first, second = [await play(spec, lambda messages, task, rng: "1", task, seed=5) for _ in range(2)]

    assert first.story == second.story


async def test_a_seat_that_does_not_exist_and_a_player_that_is_none_are_told():
    with pytest.raises(TaskError, match=r"no seat 'third'.*there are: first, second"):
        await begun("third", 0)
    with pytest.raises(UsageError, match="the seat second has no player"):
        await begun("first", 0, opponents={"first": "random"})
    with pytest.raises(UsageError, match="5 cannot play a seat"):
        await begun("first", 0, opponents=5)


class Endless(Nim):
    def act(self, seat, text):
        pass


class Mute(Nim):
    def choices(self, seat):
        return ()


async def test_a_game_that_never_comes_back_is_told_and_so_is_one_without_moves_to_draw():
    env = Endless(opponents=best)
    with pytest.raises(EnvironmentMisuse, match="still not seat second's turn"):
        await env.begin({"seed": 0, "seat": "second"}, seed=0, context=Context())
    with pytest.raises(UsageError, match="write choices"):
        await Mute().begin({"seed": 0, "seat": "second"}, seed=0, context=Context())


async def test_a_game_that_is_over_before_the_seat_s_first_turn_has_a_reward_and_no_turn():
    env = entry(opponents=lambda move: "nonsense").make()
    first = await env.begin({"seed": 0, "seat": "second"}, seed=0, context=Context())
    outcome = await env.end("env_terminated")

    assert (first.terminated, outcome.reward) == (True, 1.0)
    alone = ae.make(Nim, opponents=lambda move: "nonsense")
    alone.reset(options={"task": {"seed": 0, "seat": "second"}})
    with pytest.raises(EnvironmentMisuse, match="over before seat second had a turn"):
        alone.step("1")


async def test_a_seat_that_is_cut_loses_and_does_not_escape():
    env, _ = await begun("first", 0, opponents=best)

    outcome = await env.end("generation_length")

    assert outcome.reward == -1.0


async def test_a_league_draws_the_same_opponent_for_all_members_of_a_group():
    seen = []

    def one(move):
        seen.append("one")
        return "1"

    def two(move):
        seen.append("two")
        return "1"

    drawn = set()
    for seed in range(20):
        for _ in range(2):
            env = entry(opponents=[one, two]).make()
            await env.begin({"seed": 1, "seat": "second"}, seed=0, context=Context(seed=seed))
        assert seen[0] == seen[1]
        drawn.add(seen[0])
        seen.clear()

    assert drawn == {"one", "two"}


def test_the_league_of_a_run_has_its_checkpoints(tmp_path):
    rng = random.Random(0)
    assert drawn_player(f"league:{tmp_path}", rng) == "self"
    for step in ("step-1", "step-2"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "config.json").write_text("{}")

    drawn = {drawn_player(f"league:{tmp_path}", rng) for _ in range(20)}

    assert drawn == {f"hf:{tmp_path}/checkpoints/{step}" for step in ("step-1", "step-2")}
    with pytest.raises(UsageError, match="no directory"):
        drawn_player("league:nowhere", rng)
    with pytest.raises(UsageError, match="list of opponents is empty"):
        drawn_player([], rng)


def drawn_player(player, rng):
    return opponents._drawn(player, rng)


async def test_without_a_runner_the_policy_cannot_play_another_seat():
    with pytest.raises(UsageError, match="cannot play the seat second too, because no runner"):
        await begun("first", 0, opponents="self")


@pytest.mark.parametrize("method", ["start", "turn", "observe", "act", "rewards"])
def test_a_missing_method_is_named(method):
    arguments = {"start": ({}, 0), "observe": ("a",), "act": ("a", "b")}

    with pytest.raises(NotImplementedError, match=f"must write {method}"):
        getattr(MultiEnv(), method)(*arguments.get(method, ()))


def test_a_task_is_repeated_for_each_seat():
    assert for_each_seat([{"id": "a", "x": 1}, {"x": 2}], ("p", "q")) == [
        {"id": "a-p", "x": 1, "seat": "p"},
        {"id": "a-q", "x": 1, "seat": "q"},
        {"x": 2, "seat": "p"},
        {"x": 2, "seat": "q"},
    ]
    assert ae.MultiEnv is MultiEnv
