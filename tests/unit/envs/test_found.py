"""Files of other libraries on the command line: what is found in them, and what is played."""

from pathlib import Path

import pytest

from agentenv.core import UnknownEnvironment
from agentenv.envs import make, spec
from agentenv.runs import evaluate

COIN = """
import gymnasium

class Coin(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        return 0, {}

    def step(self, action):
        return 0, float(action == self.side), True, False, {}
"""
OLD_GYM = """
class Old:
    def seed(self, number):
        self.number = number

    def reset(self):
        return f"Say {self.number % 10}."

    def step(self, action):
        return "Right.", float(str(self.number % 10) in action), True, {"TimeLimit.truncated": False}
"""
GEM = """
import numpy

class Guess:
    def reset(self, seed=None):
        numpy.random.RandomState(seed)
        return "Guess.", {"suffix": ""}

    def step(self, action):
        return "Closer.", 1.0, True, False, {}
"""
ASYNC = """
class Walk:
    class action_space:
        n = 3

    async def reset(self, *, seed=None):
        self.asked = []
        return {"position": 0}

    async def step(self, action):
        self.asked.append(action)
        return {"position": action}, float(action == 2), action == 2

    async def close(self):
        pass
"""
TRL = """
class Counter:
    reward = 0.0

    def reset(self, **fields):
        return "Count."

    def add(self, amount: int) -> int:
        \"\"\"Add.

        Args:
            amount: how much.
        \"\"\"
        return amount
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Return a function that writes a file and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "theirs.py") -> str:
        Path(name).write_text(text)
        return name

    return write


def episodes(name, model, number=5):
    """Play tasks of a file, and return their episodes."""
    result = evaluate(name, model, num_tasks=number, stop_after_failures=0)
    return [episode for group in result.groups for episode in group]


MADE = "\ndef make_env(limit=3):\n    return "
PLAYED = {
    "gymnasium": (COIN, "", "scripted:1", "Coin, a gymnasium.Env"),
    "old gym": (OLD_GYM, "", "scripted:0 1 2 3 4 5 6 7 8 9", "Old, a class with reset() and step()"),
    "GEM": (GEM, "", "scripted:7", "Guess"),
    "async": (ASYNC, "", "scripted:1 or 2", "Walk"),
    "a function that makes gymnasium's": (COIN + MADE + "Coin()\n", ":make_env", "scripted:1", ""),
    "one that wraps it": (
        f"{COIN}{MADE}gymnasium.wrappers.TimeLimit(Coin(), 9)\n", ":make_env", "scripted:1", ""
    ),
    "one that makes GEM's": (GEM + MADE + "Guess()\n", ":make_env", "scripted:1", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAYED)
def test_what_others_write_has_as_many_tasks_as_are_asked_for_and_is_said(name, file, caplog):
    text, part, model, said = PLAYED[name]
    played = episodes(file(text) + part, model)

    assert [episode.error for episode in played] == [None] * 5
    assert len({episode.task_id for episode in played}) == 5
    assert sum(episode.reward for episode in played) >= 1.0
    assert f"theirs.py: plays {said}" in caplog.text or not said
    assert spec(f"theirs.py{part}").task_set().splits == ("train", "test")
    assert spec(f"theirs.py{part}").task_set("test").take(2)[1].data == {"seed": 3}


SAY = """
import agentenv as ae

class Say(ae.ToolEnv):
    tasks = [{"word": "yes"}, {"word": "no"}]

    def __init__(self, polite=False):
        self.polite = polite

    def start(self, word):
        return f"Say {word}."

    def reward(self, answer, word):
        return float(word in answer)

def polite():
    return Say(polite=True)
"""


def test_a_function_of_ours_has_the_tasks_of_its_class_and_may_need_arguments(file):
    assert [one.reward for one in episodes(f"{file(SAY, 'say.py')}:polite", "scripted:yes")] == [1.0, 0.0]

    name = file(COIN + "\ndef make_env(sides):\n    return Coin()\n") + ":make_env"
    (lost,) = episodes(name, "scripted:1")
    result = evaluate(name, "scripted:1", num_tasks=3, env={"sides": 2})

    assert "make_env() missing 1 required positional argument: 'sides'" in lost.error.message
    assert "-o env.NAME=VALUE" in lost.error.message
    assert len(result.summaries) == 3


def test_a_turn_without_a_number_is_told_and_nothing_is_played(file):
    env = make(file(ASYNC))
    env.reset(seed=1)
    told, *_ = env.step("left")
    env.step("then 2")

    assert told == "No action understood. Answer with a number from 0 to 2."
    assert env.unwrapped.inner.asked == [2]


NESTED = """
def main():
    class Inner:
        def reset(self): ...
        def step(self, action): ...
"""
TOOL = "import agentenv as ae\n@ae.tool\ndef add(a: int) -> int:\n    'Add.'\n"
HELP = {
    "nested": (NESTED, r"but it has .*the class Inner inside main\(\): move it to the top level"),
    "tools": (TOOL, r"but it has .*the tools add: give them to an environment, tools = \(add,\)"),
    "verifiers": ("def load_environment(**options): ...", r"but it has .*load_environment\(\) of verifiers"),
    "nothing": (
        "x = 1",
        r"neither registers an environment nor defines an environment class(?!.*but it has)",
    ),
    "several": (
        OLD_GYM + TRL,
        r"theirs.py:Old \(a class with reset.*theirs.py:Counter \(a class with reset\(\) and the tools add",
    ),
}


@pytest.mark.parametrize(("text", "told"), HELP.values(), ids=HELP)
def test_what_cannot_be_played_is_named_with_what_would_help(text, told, file):
    with pytest.raises(UnknownEnvironment, match=told):
        spec(file(text))


def test_a_missing_space_is_blamed_and_an_observation_of_any_kind_is_shown(file):
    without = COIN.replace("    action_space = gymnasium.spaces.Discrete(2)\n", "")
    (episode,) = episodes(file(without), "scripted:1", number=1)
    seen = """
import gymnasium
from gymnasium.spaces import Dict, Text

class Rooms(gymnasium.Env):
    action_space, observation_space = Text(9), Dict({"room": Text(9)})

    def reset(self, *, seed=None, options=None):
        return {"room": "kitchen"}, {}

    def step(self, action):
        return {"room": action}, 1.0, True, False, {}
"""
    (other,) = episodes(file(seen, "rooms.py"), "scripted:hall", number=1)

    assert "Coin has no action_space, which a gymnasium.Env must have" in episode.error.message
    assert other.messages[0]["content"] == '{"room": "kitchen"}'
    assert other.reward == 1.0
