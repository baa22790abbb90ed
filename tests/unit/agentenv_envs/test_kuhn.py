"""Kuhn poker and its exact measure of play."""

import pytest

import agentenv as ae
from agentenv.core import Action, Context
from agentenv.envs import spec
from agentenv_envs.kuhn import SITUATIONS, exploitability, messages_at

KUHN = "agentenv/KuhnPoker-v0"


def best_play(bluff: float) -> dict[str, float]:
    """One of the equilibria that Kuhn (1950) gives, by the probability of a bluff with the jack."""
    first = {"J": bluff, "Q": 0.0, "K": 3 * bluff, "Jpb": 0.0, "Qpb": bluff + 1 / 3, "Kpb": 1.0}
    return {**first, "Jp": 1 / 3, "Qp": 0.0, "Kp": 1.0, "Jb": 0.0, "Qb": 1 / 3, "Kb": 1.0}


@pytest.mark.parametrize("bluff", [0.0, 0.2, 1 / 3])
def test_the_best_possible_play_cannot_be_exploited(bluff):
    assert exploitability(best_play(bluff)) == pytest.approx(0.0)


def test_known_ways_to_play_are_exploited_as_is_known():
    assert exploitability(dict.fromkeys(SITUATIONS, 0.5)) == pytest.approx(11 / 24)  # as OpenSpiel has it
    assert exploitability(dict.fromkeys(SITUATIONS, 0.0)) == pytest.approx(1.0)  # who always passes
    assert exploitability({**best_play(0.2), "Jp": 1.0}) > 0.05


@pytest.mark.parametrize(
    ("deal", "moves", "won"),
    [("JK", ["pass", "pass"], -1), ("KJ", ["bet", "bet"], 2), ("JK", ["bet", "pass"], 1)],
)
async def test_the_rewards_are_the_chips_of_the_game(deal, moves, won):
    tasks = {each.id: each.data for each in spec(KUHN).task_set()}
    env = ae.make(KUHN, opponents=lambda move: moves[1]).unwrapped
    told = await env.begin(tasks[f"{deal}-first"], seed=0, context=Context())

    last = await env.advance(Action.of(moves[0]))

    assert told.messages[-1]["content"] == f"You have {deal[0]}."
    assert (last.reward, last.terminated) == (won, True)


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_the_conversation_of_a_situation_is_that_of_the_game(situation):
    seat = "second" if len(situation) == 2 else "first"
    task = next(
        each
        for each in spec(KUHN).task_set()
        if each.data["seat"] == seat and each.id[0 if seat == "first" else 1] == situation[0]
    )
    words = {"p": "pass", "b": "bet"}
    env = ae.make(KUHN, opponents=lambda move: words[situation[-1]]).unwrapped

    messages = list((await env.begin(task.data, seed=0, context=Context())).messages)
    if situation.endswith("pb"):
        said = Action.of("pass")
        messages += [said.message, *(await env.advance(said)).messages]

    assert messages == messages_at(situation)


async def test_what_is_no_move_loses_as_much_as_a_game_can_cost():
    env = ae.make(KUHN).unwrapped
    await env.begin({"seed": 0, "seat": "first"}, seed=0, context=Context())

    last = await env.advance(Action.of("all in"))

    assert (last.reward, last.terminated) == (-2.0, True)
