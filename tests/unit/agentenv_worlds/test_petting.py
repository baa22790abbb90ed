"""PettingZoo's games, driven through the package where it is installed."""

import pytest

from agentenv.core import Action
from agentenv.testing import play
from agentenv_worlds.pettingzoo import env as petting
from helpers.worlds import begun, world
from scenes import groups_of, runner

# rlcard's spaces have bounds of another precision, of which Gymnasium warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered", "ignore::DeprecationWarning")


@pytest.mark.parametrize("game", petting.GAMES)
async def test_a_game_is_played_to_its_end_by_chance_and_its_rewards_sum_to_zero(game):
    entry = world(f"pettingzoo:{game}")
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


async def test_a_position_is_told_in_text_and_a_wrong_move_loses():
    entry = world("pettingzoo:tictactoe_v3")
    env, told = await begun(entry, {"seed": 0, "seat": "player_2"}, opponents=lambda move: "4")
    last = await env.advance(Action.of("Cell 4 is mine."))

    assert told == "You are O.\n0 1 2\n3 X 5\n6 7 8\nActions: 0, 1, 2, 3, 5, 6, 7, 8."
    assert (last.terminated, last.reward, last.info["seat_rewards"]["player_1"]) == (True, -1.0, 1.0)


async def test_each_player_of_a_card_game_is_told_its_own_hand():
    entry = world("pettingzoo:leduc_holdem_v4")
    hands = set()
    for seat in petting.seats_of("leduc_holdem_v4"):
        _, told = await begun(entry, {"seed": 1, "seat": seat}, opponents=lambda move: "call")
        assert told.count("hand") == 1
        hands.add(told.partition(".")[0])

    assert len(hands) == 2


async def test_the_policy_plays_both_agents_of_a_game():
    entry = world("pettingzoo:rps_v2").with_kwargs({"opponents": "self"})
    playing = runner(lambda request: "rock" if request.sampling.seed % 2 else "paper")

    groups = await groups_of(playing, entry, entry.task_set().take(1), 2)

    assert [group[0].task["seat"] for group in groups] == ["player_1", "player_0"]
    for first, second in zip(*groups, strict=True):
        assert (first.error, len(first.turns), first.reward + second.reward) == (None, 15, 0.0)
