"""Environments and tools of others, driven through the packages themselves where they are installed."""

import subprocess
import sys
import types

import pytest

from agentenv.core import Action, Context, DependencyMissing, UnknownEnvironment, UsageError
from agentenv.envs import EnvSpec, spec
from agentenv.testing import check_env, oracle_of, play


def test_what_is_no_environment_is_refused():
    with pytest.raises(UsageError, match=r"not an environment; subclass ae\.Env"):
        EnvSpec.of("x/List-v0", list).make()


@pytest.mark.parametrize(
    ("id", "package"), [("reasoning_gym:countdown", "reasoning_gym"), ("textarena:Wordle-v0", "textarena")]
)
def test_a_peer_that_is_not_installed_says_what_to_install(monkeypatch, id, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DependencyMissing, match="pip install"):
        spec(id)


def needs(package):
    pytest.importorskip(package, reason=f"UNTESTED: {package} is not installed")


@pytest.mark.engine
async def test_reasoning_gym_is_played_and_scored_by_its_verifier():
    needs("reasoning_gym")
    entry = spec("reasoning_gym:spell_backward")
    task = entry.task_set("test")[0]

    right = await play(entry, oracle_of(entry), task)
    wrong = await play(entry, lambda messages, task, rng: "<answer>x</answer>", task)

    assert right.reward == 1.0
    assert wrong.reward < 0.5
    assert EnvSpec.from_json(entry.to_json()).task_set("test")[0] == task
    with pytest.raises(UnknownEnvironment, match="did you mean 'countdown'"):
        spec("reasoning_gym:countdwn")


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "seats"),
    [
        ("reasoning_gym:spell_backward", 0),
        ("textarena:FrozenLake-v0", 0),
        *((f"textarena:{game}-v0", 2) for game in ("TicTacToe", "KuhnPoker", "IteratedPrisonersDilemma")),
    ],
)
async def test_the_checker_passes_from_each_seat(name, seats):
    needs(name.partition(":")[0])
    entry = spec(name)
    # A single move that a trivial policy happens to play may win a game against chance.
    report = await check_env(entry, tasks=4, **({"trivial_limit": 1.0} if seats else {}))

    assert report.ok, str(report)
    if seats:
        played = [task.data["seat"] for task in entry.task_set("test").take(3)]
        assert played == ["player-0", "player-1", "player-0"]
        assert EnvSpec.from_json(entry.to_json()).task_set("test")[1] == entry.task_set("test")[1]


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
async def test_the_opponent_of_a_textarena_game_moves_first_if_it_has_the_first_seat():
    needs("textarena")
    env = spec("textarena:TicTacToe-v0").make(opponents=lambda move: move.choices[0])

    first = await env.begin({"seed": 1, "seat": "player-1"}, seed=0, context=Context())
    rewards = []
    for move in ("[3]", "[4]"):
        step = await env.advance(Action.of(move))
        rewards.append((step.terminated, step.reward))

    assert "You are Player 1" in first.messages[-1]["content"]
    assert "Player 0: [0]" in first.messages[-1]["content"]
    assert rewards == [(False, 0.0), (True, -1.0)]  # the opponent plays 0, 1 and 2
    assert step.info["seat_rewards"] == {"player-0": 1.0, "player-1": -1.0}
    with pytest.raises(UsageError, match="cannot be played"):
        spec("textarena:Chess-v0")
    with pytest.raises(UnknownEnvironment, match="no game"):
        spec("textarena:Nothing-v9")


def test_a_textarena_game_that_cannot_start_is_told_before_any_episode(monkeypatch):
    class Game:
        def reset(self, **arguments):
            raise AssertionError("this game needs 2 players")

    registration = types.ModuleType("textarena.envs.registration")
    registration.ENV_REGISTRY = {"Duel-v0": None}
    package = types.ModuleType("textarena")
    package.make = lambda game: Game()
    for name, module in [
        ("textarena", package),
        ("textarena.envs", types.ModuleType("textarena.envs")),
        ("textarena.envs.registration", registration),
    ]:
        monkeypatch.setitem(sys.modules, name, module)

    with pytest.raises(UsageError, match=r"textarena:Duel-v0 cannot be played: .* needs 2 players"):
        spec("textarena:Duel-v0")


def test_adapters_import_no_peer():
    adapters = "agentenv_worlds.reasoning_gym.env agentenv_worlds.textarena.env agentenv_mcp.tools"
    code = (
        f"import sys, {', '.join(adapters.split())}, agentenv.envs.adapters.trl;"
        "print({'reasoning_gym', 'textarena', 'mcp', 'trl', 'torch'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert shown.stdout.strip() == "set()"
