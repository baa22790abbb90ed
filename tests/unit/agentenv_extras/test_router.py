"""The router marks what the helper wrote."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from agentenv.core import RunLimits, UsageError
from agentenv.engine import Completion, Features, Sampling, ScriptedEngine, ScriptedTurn
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv_extras import LessSureThan, RouterEngine


def pair(logprob, **options):
    policy = ScriptedEngine([[1, 2]], logprob=logprob, weights_version=4, max_context_tokens=50)
    helper = ScriptedEngine([[8, 9]], max_context_tokens=40)
    return RouterEngine(policy, helper, **options), policy, helper


async def ask(engine, **sampling):
    return await engine.generate([3], Sampling(**sampling), stop_token_ids=(), session_id="a", deadline_s=5)


async def test_a_sure_policy_answers_itself():
    router, _, helper = pair(-0.1)

    done = await ask(router)

    assert (done.token_ids, done.sampled_by_policy, helper.requests) == ((1, 2), True, [])


async def test_an_unsure_policy_is_helped_and_the_tokens_are_marked():
    router, policy, helper = pair(-3.0, helper_sampling=Sampling(temperature=0.2))

    done = await ask(router, seed=6, max_tokens=7, adapter="policy")
    await router.release("a")

    assert (done.token_ids, done.sampled_by_policy, router.routed) == ((8, 9), False, 1)
    drawn = helper.requests[0].sampling
    assert (drawn.temperature, drawn.seed, drawn.max_tokens, drawn.adapter) == (0.2, 6, 7, "")
    assert policy.released == helper.released == ["a"]
    assert (router.weights_version, router.max_context_tokens) == (4, 40)


@pytest.mark.parametrize(
    ("settings", "adapter"),
    [(None, ""), (Sampling(adapter="teacher"), "teacher"), (Sampling(adapter=None), None)],
)
async def test_the_helper_gets_the_adapter_of_its_own_settings_and_not_the_policys(settings, adapter):
    router, policy, helper = pair(-3.0, helper_sampling=settings)

    await ask(router, adapter="policy")

    assert [engine.requests[0].sampling.adapter for engine in (policy, helper)] == ["policy", adapter]


async def test_the_policys_answer_stands_where_the_helper_gives_up():
    policy, helper = (
        ScriptedEngine([[1, 2]], logprob=-3.0),
        ScriptedEngine([ScriptedTurn(token_ids=[], finish_reason="abort")]),
    )
    router = RouterEngine(policy, helper)

    done = await ask(router)

    assert (done.token_ids, done.finish_reason, done.sampled_by_policy) == ((1, 2), "length", True)
    assert router.routed == 0


class Late(ScriptedEngine):
    """An engine that gives every request up at its deadline."""

    async def generate(self, prompt_ids, sampling, *, deadline_s=None, **settings):
        self.deadline_s = deadline_s
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await asyncio.Event().wait()
        return Completion((), (), "abort")


async def test_in_an_episode_the_policys_answer_stands_where_the_helper_runs_late():
    tokenizer = byte_tokenizer()
    router = RouterEngine(ScriptedEngine(["42"], tokenizer=tokenizer, logprob=-3.0), Late([[1]]))
    runner = Runner(router, Renderer(tokenizer), RunLimits(turn_timeout_s=3.0))

    spec = EnvSpec.of("test/Ask-v0", Ask, tasks=[{"n": 1}])
    (played,) = [each async for group in runner.run_groups(spec, spec.task_set()) for each in group]

    assert (played.stop_reason.value, played.reward) == ("final_answer", 1.0)


async def test_the_helper_is_not_asked_where_no_time_is_left():
    helper = Late([[1]])
    router = RouterEngine(ScriptedEngine([[1, 2]], logprob=-3.0), helper)

    done = await router.generate([3], Sampling(), stop_token_ids=(), deadline_s=0.0)

    assert done.token_ids == (1, 2)
    assert not hasattr(helper, "deadline_s")


class Ask(ToolEnv):
    def start(self, n: int) -> str:
        return "What is 6 times 7?"

    def reward(self, answer: str) -> float:
        return float(answer == "42")


class Raw(ScriptedEngine):
    """An engine whose log-probabilities are not at the sampling temperature."""

    features = Features(untrainable="raw log-probabilities")


def test_a_router_is_no_more_trainable_than_its_policy():
    raw, exact = Raw([[1]]), ScriptedEngine([[1]])

    assert RouterEngine(raw, exact).features.untrainable == "raw log-probabilities"
    assert RouterEngine(exact, raw).features.untrainable == ""


def test_sureness_is_the_mean_logprob_and_one_engine_cannot_be_both():
    assert LessSureThan(-1.0)(Completion((1, 2), (-0.5, -2.0), "stop"))
    assert not LessSureThan(-1.0)(Completion((1, 2), (-0.5, -1.0), "stop"))
    engine = ScriptedEngine([[1]])
    with pytest.raises(UsageError, match="two different engines"):
        RouterEngine(engine, engine)
