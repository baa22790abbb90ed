"""Gymnasium's toy texts in words."""

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from agentenv.core import Action, Context, UsageError
from agentenv.envs import Text, make, spec
from agentenv.envs.adapters import GymnasiumText

TOYS = {
    "FrozenLake-v1": "I choose: right",
    "Taxi-v4": "south!",
    "CliffWalking-v1": "Up",
    "Blackjack-v1": "stick",
}


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")
@pytest.mark.parametrize("id", TOYS)
def test_gymnasiums_own_checker_passes_and_the_rewards_are_those_of_the_game(id):
    told, plain = make(f"gymnasium:{id}"), gymnasium.make(id)
    check_env(told, skip_render_check=True)
    told.reset(options={"task": {"seed": 5}})
    plain.reset(seed=5)

    _, reward, terminated, truncated, _ = told.step(TOYS[id])
    action = told.unwrapped.view.read(TOYS[id])

    assert (reward, terminated, truncated) == plain.step(action)[1:4]
    told.close()


def test_the_same_task_starts_the_same_game_and_held_out_seeds_are_others():
    tasks = spec("gymnasium:Taxi-v4").task_set()
    train, test = ({t.data["seed"] for t in tasks.split(name).take(50)} for name in ("train", "test"))
    starts = [
        [make("gymnasium:Taxi-v4").reset(options={"task": task})[0] for task in tasks.split("train").take(8)]
        for _ in range(2)
    ]

    assert not train & test
    assert starts[0] == starts[1]
    assert len(set(starts[0])) > 1


@pytest.mark.parametrize(
    ("text", "action"),
    [
        *(("left", 0), ("Not left, but RIGHT.", 2), ("<up>", 3)),
        *((text, None) for text in ("upright", "", "go up-down")),
    ],
)
def test_the_last_action_named_counts(text, action):
    assert make("gymnasium:FrozenLake-v1").unwrapped.view.read(text) == action


async def test_a_message_without_an_action_changes_nothing():
    env = make("gymnasium:FrozenLake-v1").unwrapped
    await env.begin({"seed": 1}, seed=1, context=Context())
    result = await env.advance(Action.of({"role": "assistant", "content": "Hm, let me think."}))

    assert "left, down, right, up" in result.messages[0]["content"]
    assert (result.reward, result.terminated) == (0.0, False)
    assert env.inner.unwrapped.s == 0


async def test_a_lake_that_does_not_slip_is_walked_to_the_goal():
    env = make("gymnasium:FrozenLake-v1", is_slippery=False).unwrapped
    first = await env.begin({"seed": 1}, seed=1, context=Context())
    results = [
        await env.advance(Action.of({"role": "assistant", "content": word}))
        for word in ("down", "down", "right", "right", "down", "right")
    ]

    assert "slippery" not in first.messages[0]["content"]
    assert "P F F F" in first.messages[0]["content"]
    assert results[-1].terminated
    assert results[-1].reward == 1.0
    assert results[-1].messages[0]["content"] == "You reached the goal."


def test_text_on_both_sides_passes_through_and_actions_that_no_word_can_name_are_refused():
    class Echo(gymnasium.Env):
        observation_space = action_space = Text()

        def reset(self, *, seed=None, options=None):
            return "say", {}

        def step(self, action):
            return action.upper(), 1.0, False, False, {}

    env = GymnasiumText(Echo())
    assert env.reset(seed=1)[0] == "say"
    assert env.step("hello")[:2] == ("HELLO", 1.0)
    with pytest.raises(UsageError, match="Box"):
        GymnasiumText(gymnasium.make("Pendulum-v1"))
