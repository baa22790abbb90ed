"""MiniGrid, NetHack, Crafter, TextWorldExpress and ARC: what is told, and what is read."""

import gymnasium
import pytest

from agentenv.envs import spec
from agentenv.runs import evaluate
from agentenv.testing import play
from helpers.worlds import world

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.mark.engine
@pytest.mark.parametrize("name", ["nethack:NetHackScore-v0", "crafter:CrafterReward-v1"])
async def test_a_seed_decides_a_game_and_the_next_seed_is_another(name):
    entry = world(name)
    first, second = entry.task_set("test").take(2)

    def wander(messages, task, rng):
        words = ["north", "east", "south", "west", "move left", "move up", "do", "search", "I do not know"]
        return rng.choice(words) if len(messages) < 160 else "nothing"

    env = entry.make()
    once = await play(entry, wander, first, env=env)
    again = await play(entry, wander, first)
    other = await play(entry, wander, second)
    env.close()

    assert once.story == again.story
    assert once.messages[0] != other.messages[0]


@pytest.mark.engine
def test_nethack_is_observed_as_nle_observes_it_because_that_draws_from_its_generator():
    ours = world("nethack:NetHackScore-v0").make()
    own = gymnasium.make("NetHackScore-v0", disable_env_checker=True)

    assert set(ours.inner.observation_space) == set(own.observation_space)

    own.close()
    ours.close()


@pytest.mark.engine
async def test_gymnasiums_ids_are_told_in_words_and_a_level_without_bot_has_no_oracle():
    world("minigrid:BabyAI-GoToLocal-v0")
    entry = spec("gymnasium:MiniGrid-DoorKey-5x5-v0")

    played = await play(entry, lambda *_: "I turn right: turn right", entry.task_set("test").take(1)[0])

    first, second = (message["content"] for message in (played.messages[0], played.messages[2]))
    assert "Your mission: use the key to open the door" in first
    assert "yellow" in first
    assert "grid" not in second
    assert entry.oracle is None
    assert spec("gymnasium:BabyAI-KeyInBox-v0").oracle is None
    assert spec("gymnasium:BabyAI-GoToRedBall-v0").oracle is not None


@pytest.mark.engine
async def test_a_grid_is_read_in_any_form_and_a_wrong_cell_scores_nothing():
    entry = world("arc:arcagi")
    task = entry.task_set("test").take(1)[0]
    right = entry.oracle([], task.data, None)
    rows = [list(line) for line in right.splitlines()]
    forms = {
        f"1 1\n1 1\nNo, rather:\n\n{right}\n": 1.0,
        "\n".join(str([int(cell) for cell in row]) + "," for row in rows): 1.0,
        "\n".join(" ".join(row) for row in rows): 1.0,
        f"{right}\n\n1 1": 0.0,
        right[:-1] + str((int(right[-1]) + 1) % 10): 0.0,
        "": 0.0,
        "²": 0.0,
    }

    for said, reward in forms.items():
        assert (await play(entry, lambda *_, said=said: said, task)).reward == reward, said


@pytest.mark.engine
def test_the_oracles_largest_grids_fit_into_a_turn():
    world("arc:arcagi2")

    report = evaluate("arc:arcagi2", "oracle", num_tasks=None, split="test").report

    assert (report.num_scored, report.reward.mean) == (167, 1.0)
