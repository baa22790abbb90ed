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


async def begun(seat, seed, env=None, **kwargs):
    env = env or entry(**kwargs).make()
    first = await env.begin({"seed": seed, "seat": seat}, seed=seed, context=Context(seed=seed))
    return env, first.messages[-1]["content"]


async def test_the_policy_sees_what_the_others_did_before_its_first_turn():
    _, alone = await begun("first", 0, opponents=best)
    _, told = await begun("second", 0, opponents=best)

    assert alone == "4 sticks are left."
    assert told == "The other player took 1. 3 sticks are left."


async def test_each_seat_gets_its_own_reward_of_a_game():
    """The game judges a move that is not valid, and a seat that is cut does not escape."""
    env, _ = await begun("first", 0, opponents=best)  # 4 sticks: who takes one wins against any play
    middle = await env.advance(Action.of("1"))
    last = await env.advance(Action.of("1" if "2 sticks" not in middle.messages[-1]["content"] else "2"))
    assert (last.terminated, last.reward) == (True, 1.0)
    assert last.info["seat_rewards"] == {"first": 1.0, "second": -1.0}

    env, _ = await begun("second", 1, opponents=best)
    wrong = await env.advance(Action.of("all of them"))
    assert (wrong.terminated, wrong.reward) == (True, -1.0)

    env, _ = await begun("first", 0, opponents=best)
    assert (await env.end("generation_length")).reward == -1.0


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
    assert for_each_seat([{"id": "a", "x": 1}, {"x": 2}], ("p", "q")) == [
        *({"id": f"a-{seat}", "x": 1, "seat": seat} for seat in "pq"),
        *({"x": 2, "seat": seat} for seat in "pq"),
    ]
    tasks = list(entry().task_set())[:4]

    groups = await scenes.groups_of(scenes.runner("1"), entry(opponents="random"), tasks, 3)

    assert [len({one.task["seat"] for one in group}) for group in groups] == [1, 1, 1, 1]
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


class Endless(Nim):
    def act(self, seat, text):
        pass


class Mute(Nim):
    def choices(self, seat):
        return ()


@pytest.mark.parametrize(
    ("seat", "made", "error", "words"),
    [
        ("third", {}, TaskError, r"no seat 'third'.*there are: first, second"),
        ("first", {"opponents": {"first": "random"}}, UsageError, "the seat second has no player"),
        ("first", {"opponents": 5}, UsageError, "5 cannot play a seat"),
        ("first", {"opponents": []}, UsageError, "list of opponents is empty"),
        ("first", {"opponents": "league:nowhere"}, UsageError, "no directory"),
        ("first", {"opponents": "self"}, UsageError, "seat second too, because no runner"),
        ("second", {"env": Endless(opponents=best)}, EnvironmentMisuse, "still not seat second's turn"),
        ("second", {"env": Mute()}, UsageError, "write choices"),
    ],
)
async def test_a_game_that_cannot_be_played_is_told(seat, made, error, words):
    with pytest.raises(error, match=words):
        await begun(seat, 0, **made)


async def test_a_game_that_is_over_before_the_seat_s_first_turn_has_a_reward_and_no_turn():
    env = entry(opponents=lambda move: "nonsense").make()
    first = await env.begin({"seed": 0, "seat": "second"}, seed=0, context=Context())

    assert (first.terminated, (await env.end("env_terminated")).reward) == (True, 1.0)
    alone = ae.make(Nim, opponents=lambda move: "nonsense")
    alone.reset(options={"task": {"seed": 0, "seat": "second"}})
    with pytest.raises(EnvironmentMisuse, match="over before seat second had a turn"):
        alone.step("1")


async def test_a_league_draws_the_same_opponent_for_all_members_of_a_group():
    seen = []
    league = [lambda move, name=name: seen.append(name) or "1" for name in ("one", "two")]

    drawn = set()
    for seed in range(20):
        for _ in range(2):
            env = entry(opponents=league).make()
            await env.begin({"seed": 1, "seat": "second"}, seed=0, context=Context(seed=seed))
        assert seen[0] == seen[1]
        drawn.add(seen[0])
        seen.clear()

    assert drawn == {"one", "two"}


def test_the_league_of_a_run_has_its_checkpoints(tmp_path):
    rng = random.Random(0)
    assert opponents._drawn(f"league:{tmp_path}", rng) == "self"
    for step in ("step-1", "step-2"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "config.json").write_text("{}")

    drawn = {opponents._drawn(f"league:{tmp_path}", rng) for _ in range(20)}

    assert drawn == {f"hf:{tmp_path}/checkpoints/{step}" for step in ("step-1", "step-2")}


@pytest.mark.parametrize("method", ["start", "turn", "observe", "act", "rewards"])
def test_a_missing_method_is_named(method):
    arguments = {"start": ({}, 0), "observe": ("a",), "act": ("a", "b")}

    with pytest.raises(NotImplementedError, match=f"must write {method}"):
        getattr(MultiEnv(), method)(*arguments.get(method, ()))
