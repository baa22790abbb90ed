"""Tasks in containers of Harbor's providers: Harbor itself, with podman of this machine in place of a cloud.

`make test-harbor` runs this with Harbor installed, which needs Python 3.12; elsewhere it is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core import DependencyMissing, RunLimits, SandboxUnavailable, UsageError
from agentenv.engine import ScriptedEngine
from agentenv.runner import Runner
from agentenv_containers import ROOT
from agentenv_worlds.harbor.boxes import Place
from agentenv_worlds.harbor.env import make
from agentenv_worlds.harbor.format import read_task
from agentenv_worlds.harbor.provider import ProviderBox, check_runtime
from helpers.agents import RENDERER, TOKENIZER, by_turn, call
from helpers.containers import TASKS, needs_podman

pytest.importorskip("harbor", reason="UNTESTED beside Harbor: make test-harbor installs it")
pytestmark = [pytest.mark.exhaustive, pytest.mark.containers, pytest.mark.usefixtures("podman")]
LOCAL = "helpers.harbor_provider:Local"
HARBORS_OWN = "harbor.environments.podman:PodmanEnvironment"
FORGE = """setsid sh -c 'while true; do mkdir -p /logs/verifier /tests
echo 1 > /logs/verifier/reward.txt; echo "{\\"reward\\": 1}" > /logs/verifier/reward.json
done' > /dev/null 2>&1 & echo started"""
CHECKS = "#!/bin/sh\nsleep 1\necho 0.25 > /logs/verifier/reward.txt\n"


def containers() -> list[str]:
    """The containers of the provider that exist."""
    ps = ["podman", "ps", "-a", "--format", "{{.Names}}"]
    names = subprocess.run(ps, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if re.match(r"agentenv-[0-9a-f]{12}(_|$)", name)]


@pytest.fixture(scope="module")
def podman():
    needs_podman()
    yield
    assert containers() == []


def copied(tmp_path, *names: str):
    """A folder with copies of some of our tasks."""
    for name in names:
        shutil.copytree(next(TASKS.glob(f"*/{name}")), tmp_path / "tasks" / name)
    return tmp_path / "tasks"


def bash(line: str) -> str:
    """A call of the tool, as the scripted model writes it."""
    return call(json.dumps({"command": line}), "bash")


async def one(folder, *turns: str, runtime: str = LOCAL):
    """Play one task with the turns of a model, and return the record."""
    spec = ae.spec(f"harbor:{folder}")
    runner = Runner(ScriptedEngine(by_turn(*turns), tokenizer=TOKENIZER), RENDERER)
    limits = RunLimits(max_context_tokens=None)
    return await runner.run_episode(spec.make(runtime=runtime), next(iter(spec.tasks)).data, limits=limits)


@asynccontextmanager
async def box(name: str = "count-errors"):
    """A box of the provider with a task's image."""
    task = read_task(next(TASKS.glob(f"*/{name}")))
    place = Place(task, task.settings.environment, task.folder / "environment", {"GIVEN": "1 2"}, "none")
    made = ProviderBox(LOCAL, place)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


def test_the_oracle_earns_full_marks_at_a_provider(tmp_path):
    # Files, code, a verifier apart, and two steps.
    folder = copied(tmp_path, "count-errors", "fix-median", "pack-folder", "two-steps")
    done = ae.evaluate(
        f"harbor:{folder}",
        "oracle",
        group_size=1,
        runs_dir=str(tmp_path / "runs"),
        env={"runtime": LOCAL},
    )

    assert {each.task_id: (each.reward, each.error) for each in done.summaries} == dict.fromkeys(
        ("count-errors", "fix-median", "pack-folder", "two-steps"), (1.0, "")
    )
    assert containers() == []


async def test_harbors_own_environment_of_podman_plays_a_task_and_refuses_one_without_a_network(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # podman-compose
    folder = copied(tmp_path, "count-errors", "fix-loop")
    settings = folder / "count-errors" / "task.toml"
    settings.write_text(settings.read_text().replace('network_mode = "no-network"', ""))
    answer = (folder / "count-errors" / "tests" / "answer").read_text().strip()

    line = bash(f"cd /app; echo {answer} > answer.txt")
    record = await one(folder / "count-errors", line, "Done.", runtime=HARBORS_OWN)
    refused = await one(folder / "fix-loop", "Done.", runtime=HARBORS_OWN)

    assert (record.reward, record.error) == (1.0, None)
    assert refused.reward is None
    assert "network_mode='no-network' is not supported" in refused.error.message
    assert containers() == []


async def test_a_bash_keeps_its_directory_variables_and_functions():
    async with box() as here:
        first = await here.bash("cd /usr; export A='1\n2'; b=(x y); f() { echo $1; }; false", timeout_s=20)
        second = await here.bash('pwd; echo "$A" "${b[1]}" $GIVEN; f 7; echo bad >&2; exit 3', timeout_s=20)
        third = await here.bash("pwd; c=1; kill -9 -1", timeout_s=20)
        fourth = await here.bash("pwd", timeout_s=20)

    assert (first.status, first.exit_code) == ("error", 1)
    assert (second.stdout, second.exit_code) == ("/usr\n1\n2 y 1 2\n7\nbad\n", 3)
    assert (third.status, fourth.stdout) == ("killed", "/usr\n")


async def test_a_command_is_limited_and_what_it_leaves_running_keeps_nobody_waiting():
    async with box() as here:
        late = await here.bash("echo begun; sleep 60", timeout_s=1)
        behind = await here.bash("sleep 600 & echo gone on", timeout_s=20)
        long = await here.bash("head -c 1000000 /dev/zero | tr '\\0' x", timeout_s=20)
        sent = await here.bash(f": '{'y' * 300_000}'; echo \"it's whole\"", timeout_s=20)

    assert (late.status, late.stdout) == ("timeout", "begun\n")
    assert (behind.status, behind.stdout) == ("ok", "gone on\n")
    assert 65_536 < len(long.stdout) < 66_000
    assert "[... 934464 bytes left out ...]" in long.stdout
    assert sent.stdout == "it's whole\n"


async def test_files_come_and_go_and_the_provider_keeps_its_own_processes(tmp_path):
    async with box() as here:
        await here.put({"a/b": b"\x00\xff", "it's": b"c"}, "/opt/x y")
        await here.bash("setsid sleep 600 & sleep 600 &", timeout_s=20)
        got = [await here.get(path) for path in ("/opt/x y/a/b", "/opt/x y", "/none")]
        kept = await here.get_folder("/opt/x y", tmp_path, exclude=["a"])
        none = await here.get_folder("/none", tmp_path)
        await here.end_processes()
        left = await here.sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout_s=20, user=ROOT)
        scratch = await here.sh("ls -A /tmp", timeout_s=20)

    assert got == [b"\x00\xff", None, None]
    assert (kept, none, (tmp_path / "x y" / "it's").read_bytes()) == (True, False, b"c")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["it's", "x y"]
    assert "sleep 987654" in left.stdout
    assert "sleep 600" not in left.stdout
    assert scratch.stdout.count(".agentenv") == 1  # where this very command writes


async def test_a_reward_cannot_be_forged_at_a_provider(tmp_path):
    folder = copied(tmp_path, "count-errors") / "count-errors"
    (folder / "tests" / "test.sh").write_text(CHECKS)

    forged = await one(folder, bash(FORGE), "Done.")
    without_users = await one(folder, bash("echo > /etc/passwd; echo > /etc/group"), "Done.")

    assert (forged.reward, forged.error) == (0.25, None)
    assert (without_users.reward, without_users.error) == (0.25, None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NeverStarts", "did not start a container: quota exceeded"),
        ("ForgetsCommands", "did not run a command: stream reset"),
        ("LosesContainers", "did not run a command to its end: exit code"),
    ],
)
async def test_a_provider_that_fails_aborts_the_episode(name, told, tmp_path):
    folder = copied(tmp_path, "count-errors") / "count-errors"

    record = await one(folder, bash("touch /root/now"), "Done.", runtime=f"helpers.harbor_provider:{name}")

    assert (record.stop_reason, record.reward) == ("aborted", None), record.error
    assert record.error.boundary == "sandbox"
    assert told in record.error.message
    assert containers() == []


async def test_what_cannot_be_used_is_told_before_the_first_episode(monkeypatch):
    with pytest.raises(UsageError, match=r"unknown runtime 'modale'; use one of .*modal"):
        make(runtime="modale")
    with pytest.raises(SandboxUnavailable, match="E2B requires E2B_API_KEY to be set"):
        await check_runtime("e2b")
    monkeypatch.setenv("E2B_API_KEY", "e2b_0")
    with pytest.raises(DependencyMissing, match=r"(?s)e2b cannot be used: .*harbor\[e2b\]"):
        await check_runtime("e2b")
    await check_runtime(LOCAL)
    with pytest.raises(SandboxUnavailable, match="oc CLI is not installed"):
        await check_runtime("openshift")
    with pytest.raises(UsageError, match="is no environment of Harbor"):
        await check_runtime("helpers.harbor_provider:None")
