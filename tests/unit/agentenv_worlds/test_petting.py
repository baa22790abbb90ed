"""PettingZoo's games, driven through the package where it is installed."""

import pytest

from agentenv.core import Action, Context, DependencyMissing, UnknownEnvironment
from agentenv.engine import ScriptedEngine
from agentenv.envs import spec
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.testing import check_env, play
from agentenv_worlds.pettingzoo import env as petting

# rlcard's spaces have bounds of another precision, of which Gymnasium warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered", "ignore::DeprecationWarning")
TOKENIZER = byte_tokenizer()


def needs_pettingzoo():
    for name in ("pettingzoo", "pygame", "rlcard"):
        pytest.importorskip(name, reason=f"UNTESTED: {name} is not installed")


def test_an_unknown_game_is_told_with_the_ones_there_are():
    with pytest.raises(UnknownEnvironment, match=r"did you mean 'connect_four_v3'.*leduc_holdem_v4"):
        spec("pettingzoo:connect_for_v3")


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    def missing(name):
        raise ImportError("No module named 'pygame'")

    monkeypatch.setattr(petting.importlib, "import_module", missing)

    with pytest.raises(DependencyMissing, match=r"pygame.*\[pettingzoo\]"):
        spec("pettingzoo:tictactoe_v3")


@pytest.mark.parametrize("game", petting.GAMES)
async def test_a_game_is_played_to_its_end_by_chance_and_its_rewards_sum_to_zero(game):
    needs_pettingzoo()
    entry = spec(f"pettingzoo:{game}")
    tasks = entry.task_set("test").take(4)

    def first_legal(messages, task, rng):
        actions = messages[-1]["content"].rpartition("Actions: ")[2].rstrip(".").split(", ")
        return f"I play {rng.choice(actions)}."

    for task in tasks:
        env = entry.make()
        episode = await play(entry, first_legal, task, env=env)
        assert episode.stop_reason == "env_terminated"
        assert sum(env.rewards().values()) == 0.0
        assert abs(episode.reward) <= env.full_marks


@pytest.mark.parametrize("game", ["tictactoe_v3", "leduc_holdem_v4"])
async def test_the_checker_passes_on_a_game(game):
    needs_pettingzoo()

    report = await check_env(f"pettingzoo:{game}", tasks=3, fuzz_calls=20, trivial_limit=1.0)

    assert report.ok, str(report)


async def test_a_position_is_told_in_text_and_a_wrong_move_loses():
    needs_pettingzoo()
    env = spec("pettingzoo:tictactoe_v3").make(opponents=lambda move: "4")
    first = await env.begin({"seed": 0, "seat": "player_2"}, seed=0, context=Context())

    told = first.messages[-1]["content"]
    last = await env.advance(Action.of("Cell 4 is mine."))

    assert told == "You are O.\n0 1 2\n3 X 5\n6 7 8\nActions: 0, 1, 2, 3, 5, 6, 7, 8."
    assert (last.terminated, last.reward, last.info["seat_rewards"]["player_1"]) == (True, -1.0, 1.0)


async def test_each_player_of_a_card_game_is_told_its_own_hand():
    needs_pettingzoo()
    entry = spec("pettingzoo:leduc_holdem_v4")
    hands = set()
    for seat in petting.seats_of("leduc_holdem_v4"):
        env = entry.make(opponents=lambda move: "call")
        first = await env.begin({"seed": 1, "seat": seat}, seed=0, context=Context())
        told = first.messages[-1]["content"]
        assert told.count("hand") == 1
        hands.add(told.partition(".")[0])

    assert len(hands) == 2


async def test_the_policy_plays_both_agents_of_a_game():
    needs_pettingzoo()
    entry = spec("pettingzoo:rps_v2").with_kwargs({"opponents": "self"})
    policy = ScriptedEngine(
        lambda request: "rock" if request.sampling.seed % 2 else "paper", tokenizer=TOKENIZER
    )

    task = entry.task_set().take(1)
    groups = [one async for one in Runner(policy, Renderer(TOKENIZER)).run_groups(entry, task, 2)]

    assert [group[0].task["seat"] for group in groups] == ["player_1", "player_0"]
    for first, second in zip(*groups, strict=True):
        assert (first.error, len(first.turns), first.reward + second.reward) == (None, 15, 0.0)
