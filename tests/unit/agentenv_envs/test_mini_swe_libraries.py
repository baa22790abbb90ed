"""`agentenv/MiniSWE-v0` with the published libraries, which the extra `miniswe` installs."""

import pytest

from agentenv.core import Action, Context, SandboxUnavailable
from agentenv.envs import spec
from agentenv.sandbox import create
from agentenv.testing import oracle_of
from agentenv_envs.mini_swe.changes import changed
from agentenv_envs.mini_swe.libraries import libraries
from agentenv_envs.mini_swe.repair import rows

pytestmark = pytest.mark.sandbox

LIBRARIES = libraries()
MISSING = [library.missing for library in LIBRARIES.values() if library.missing]
ENTRY = spec("agentenv_envs.mini_swe:MiniSWE")


@pytest.fixture(autouse=True)
def libraries_installed():
    if MISSING:
        pytest.skip(f"UNTESTED: {', '.join(MISSING)}; pip install 'agentenv-rl[miniswe]'")


@pytest.fixture
async def sandbox():
    try:
        async with create("auto", size=1) as opened:
            yield opened
    except SandboxUnavailable as error:
        pytest.skip(f"UNTESTED: no sandbox on this machine: {error}")


async def reward_of(task, sandbox, message=None):
    """Play an episode of at most one turn."""
    env = ENTRY.make()
    await env.begin(task, seed=0, context=Context(task=task, sandbox=sandbox))
    if message is not None:
        await env.advance(Action.of(message))
    outcome = await env.end("final_answer")
    await env.shutdown()
    return outcome.reward


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=list(LIBRARIES))
def test_every_change_of_the_index_changes_the_installed_file(library):
    for path, part in library.parts.items():
        source = library.sources[path]
        texts = {changed(source, fault.change) for fault in part.faults}

        assert source not in texts
        assert len(texts) == len(part.faults), f"two changes of {path} are the same"
        compile(changed(source, part.faults[0].change), path, "exec")


@pytest.mark.parametrize("name", LIBRARIES)
async def test_the_original_line_gets_full_marks_and_the_mistake_none(name, sandbox):
    library = LIBRARIES[name]
    tasks = [task for task in rows(library.split) if task["library"] == name]
    of_each_file = {task["path"]: task for task in tasks}
    some = [*of_each_file.values(), *tasks[:: len(tasks) // 4]]

    for task in some:
        repaired = await reward_of(task, sandbox, oracle_of(ENTRY)([], task, None))
        broken = await reward_of(task, sandbox)
        assert (task["id"], repaired, broken) == (task["id"], 1.0, 0.0)
