"""Harbor itself on the same tasks: the same rewards are read, and its agents earn what ours do.

`make test-harbor` runs this with Harbor installed, which needs Python 3.12; elsewhere it is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import agentenv as ae
from agentenv_worlds.harbor.format import EnvironmentPart
from agentenv_worlds.harbor.trial import rewards_of
from helpers.agents import call
from helpers.containers import TASKS, needs_podman

pytest.importorskip("harbor", reason="UNTESTED beside Harbor: make test-harbor installs it")
pytestmark = pytest.mark.exhaustive

from helpers.harbor_agent import LINE  # noqa: E402 - it imports Harbor


def theirs(folder: Path, data: bytes | None, text: bytes | None) -> object:
    """What Harbor reads from these files; None if it refuses them."""
    from harbor.verifier.verifier import RewardFileEmptyError, Verifier, VerifierOutputParseError

    paths = SimpleNamespace(reward_json_path=folder / "reward.json", reward_text_path=folder / "reward.txt")
    for path, content in ((paths.reward_json_path, data), (paths.reward_text_path, text)):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
    verifier = object.__new__(Verifier)
    verifier.trial_paths = paths
    try:
        if data is not None:
            return verifier._parse_reward_json()
        return verifier._parse_reward_text() if text is not None else None
    except (RewardFileEmptyError, VerifierOutputParseError):
        return None


TEXTS = [
    b"1",
    b" 0.25\n",
    b"-3e2",
    b"",
    b"nan",
    b"inf",
    b"1e400",
    b"one",
    b"1 2",
    b"\xd9\xa1",  # a digit of another script
    b"1_0",
    b"0x1",
]
JSONS = [
    *(
        json.dumps(value).encode()
        for value in ({"reward": 1, "kept": 0.5}, {"reward": True}, {"speed": 2}, {})
    ),
    *(
        b"",
        b"{",
        b'{"reward": NaN}',
        b'{"reward": 1e400}',
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"a": [1]}',
    ),
]


@pytest.mark.parametrize(("data", "text"), [*((None, t) for t in TEXTS), *((d, b"1") for d in JSONS)])
def test_a_reward_is_read_as_harbor_reads_it(data, text, tmp_path):
    try:
        ours = rewards_of(data, text)
    except ValueError:
        ours = None
    assert ours == theirs(tmp_path, data, text)


HOSTS = [
    *("example.com", " Example.COM. ", "a.b.example.com", "x", "xn--bcher-kva.example", "3com.org", "a" * 63),
    *("-a.com", "a-.com", "a_b.com", "a..b", ".a.com", "b\u00fccher.example", "a" * 64, "", ".", "a b.com"),
    *("https://a.com", "a.com/x", "a.com:443", "*", "*a.com", "a.*.com", "*.1.2.3.4", "1.2.3.4/8", "[::1]"),
]
BEYOND = ["*.example.com", "192.0.2.1", "192.0.2.0/24", "::1", "2001:db8::/32"]
"""Patterns, addresses and networks, which Harbor allows and we refuse by name."""


@pytest.mark.parametrize("host", [*HOSTS, *BEYOND])
def test_an_allowed_host_is_read_as_harbor_reads_it(host):
    from harbor.models.task.config import normalize_allowed_hosts

    def read(reader):
        try:
            return reader([host])
        except ValueError:
            return None

    ours = read(lambda hosts: EnvironmentPart(network_mode="allowlist", allowed_hosts=hosts).allowed_hosts)
    theirs = read(normalize_allowed_hosts)
    assert ours == (None if host in BEYOND else theirs)
    assert (theirs is None) == (host in HOSTS[7:])


def harbors(tasks: Path, jobs: Path, *agent: str) -> dict[str, dict[str, float]]:
    """The rewards of Harbor's own run of a folder of tasks, by task."""
    for settings in tasks.glob("*/task.toml"):  # Harbor refuses to play a task without a network on podman
        text = settings.read_text().replace('network_mode = "no-network"', "")
        settings.write_text(text.replace("allow_internet = false", ""))
    harbor = Path(sys.executable).with_name("harbor")
    own = {
        "HARBOR_TELEMETRY": "off",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PATH": f"{harbor.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [harbor, "run", "-p", tasks, *agent, "-e", "podman", "-o", jobs, "-n", "1", "--yes"]
    subprocess.run(command, env={**os.environ, **own}, check=True, timeout=1500)
    results = [json.loads(path.read_text()) for path in jobs.glob("*/*/result.json")]
    # A task may have another name than its folder.
    scored = {Path(each["task_id"]["path"]).name: each["verifier_result"] for each in results}
    return {name: result["rewards"] if result else {} for name, result in scored.items()}


def ours(tasks: Path, model: str, runs: Path) -> dict[str, dict[str, float | None]]:
    """The rewards of our run of the same tasks."""
    done = ae.evaluate(f"harbor:{tasks}", model, group_size=1, num_tasks=None, runs_dir=str(runs))
    return {summary.task_id: dict(summary.rewards) for summary in done.summaries}


MODELS = {"oracle": "oracle", "nop": "scripted:Done."}
"""Models of ours that do what an agent of Harbor does."""


@pytest.mark.containers
@pytest.mark.parametrize(("agent", "rewards"), [("oracle", {1.0}), ("nop", {0.0, 0.1})])
def test_harbors_own_run_of_our_twelve_tasks_gives_the_same_scores(agent, rewards, tmp_path):
    needs_podman()
    tasks = tmp_path / "tasks"
    for task in TASKS.glob("*/*"):
        shutil.copytree(task, tasks / task.name)

    scores = harbors(tasks, tmp_path / "jobs", "-a", agent)

    assert len(scores) == 12
    assert scores == ours(tasks, MODELS[agent], tmp_path / "runs")
    # Doing nothing keeps the tenth of a mark for what works already in one of them.
    assert {each["reward"] for each in scores.values()} == rewards


OTHERS = os.environ.get("AGENTENV_HARBOR_TASKS", "")
"""A folder of tasks of others, such as Harbor's cookbook."""


@pytest.mark.containers
@pytest.mark.skipif(not OTHERS, reason="UNTESTED on tasks of others: AGENTENV_HARBOR_TASKS names no folder")
@pytest.mark.parametrize("agent", MODELS)
def test_harbors_own_run_of_tasks_of_others_gives_the_same_scores(agent, tmp_path):
    needs_podman()
    shutil.copytree(OTHERS, tmp_path / "tasks")

    played = ours(tmp_path / "tasks", MODELS[agent], tmp_path / "runs")
    scores = harbors(tmp_path / "tasks", tmp_path / "jobs", "-a", agent)

    # Where no reward is named `reward`, ours asks which one counts.
    named = {name: each if "reward" in each else {} for name, each in scores.items() if name in played}
    assert named == played


@pytest.mark.containers
def test_harbors_own_run_of_a_scripted_agent_gives_it_the_scores_that_it_earns_here(tmp_path):
    needs_podman()
    tasks, script = tmp_path / "tasks", tmp_path / "script.json"
    for name in ("count-errors", "fix-median", "pack-folder", "two-steps"):
        shutil.copytree(next(TASKS.glob(f"*/{name}")), tasks / name)
    # A first step that earns something, and not enough for the second one.
    shutil.copytree(TASKS / "test" / "two-steps", tasks / "stops-early")
    (tasks / "stops-early" / "steps" / "first" / "tests" / "test.sh").write_text(
        "#!/bin/sh\necho 0.25 > /logs/verifier/reward.txt\n"
    )
    # Artifacts in the place of what the verifier's image has, and one that no task needs to list.
    shutil.copytree(TASKS / "train" / "count-errors", tasks / "hands-over")
    (tasks / "hands-over" / "task.toml").write_text(
        'artifacts = [{source = "/app", destination = "kept"}]\n[verifier]\nenvironment_mode = "separate"\n'
    )
    (tasks / "hands-over" / "tests" / "test.sh").write_text(
        '#!/bin/sh\necho "{\\"reward\\": 0.5, \\"files\\": $(find /app /logs/artifacts -type f | wc -l)}" '
        "> /logs/verifier/reward.json\n"
    )
    script.write_text(json.dumps([call(json.dumps({"command": LINE}), "bash"), "Done."] * 2))

    scores = harbors(tasks, tmp_path / "jobs", "--agent-import-path", "helpers.harbor_agent:Scripted")

    assert scores == ours(tasks, f"scripted:{script}", tmp_path / "runs")
    assert scores["hands-over"]["files"] == 3
    # Solved, begun, done wrongly before a verifier apart, and the first of two steps.
    assert {name: each["reward"] for name, each in scores.items()} == {
        "count-errors": 1.0,
        "fix-median": 0.1,
        "pack-folder": 0.0,
        "two-steps": 0.5,
        "stops-early": 0.25,
        "hands-over": 0.5,
    }
