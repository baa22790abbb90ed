"""Seeds that reach other people's code: each is one that NumPy's older generators take."""

import numpy as np
import pytest

import agentenv as ae
from agentenv.core import Context
from agentenv.envs import Env, EnvSpec, ToolEnv
from agentenv.runs import evaluate
from agentenv.tools import tool


class Foreign(Env):
    """Wraps an environment that seeds NumPy's global generator, as GEM's does."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        np.random.RandomState(seed)
        return "Go.", {}

    def step(self, action: str):
        return "", 1.0, True, False, {}


class Wanting(ToolEnv):
    """Passes its seeds on wherever it gets one."""

    def start(self, seed: int) -> str:
        np.random.RandomState(seed)
        return "Go."

    @tool
    def draw(self, context: Context) -> int:
        """Draw a number."""
        return int(np.random.RandomState(context.seed).randint(10))

    def reward(self, seed: int) -> float:
        return float(np.random.RandomState(seed).randint(10) >= 0)


class Guest(ae.User):
    """A user that draws what it says."""

    async def start(self, task, *, seed):
        np.random.RandomState(seed)
        return

    async def respond(self, messages):
        return ae.UserTurn("Bye.", done=True)


@pytest.mark.parametrize(("env", "user"), [(Foreign, None), (Wanting, None), (Wanting, Guest())])
def test_every_episode_of_a_run_gets_seeds_that_numpy_takes(env, user):
    entry = EnvSpec.of("test/Seeds-v0", env, tasks=[{"id": str(n)} for n in range(20)], user=user)
    result = evaluate(entry, "mock", num_tasks=20, stop_after_failures=0)

    episodes = [episode for group in result.groups for episode in group]
    assert [episode.error for episode in episodes] == [None] * 20
    assert all(0 <= episode.seed < 2**31 for episode in episodes)
    assert len({episode.seed for episode in episodes}) == 20


async def test_a_larger_seed_of_a_caller_is_made_smaller():
    env, context = Foreign(), Context(seed=2**62 + 5)
    await env.begin({}, seed=2**62 + 5, context=context)

    assert context.seed == 5
