"""Harbor itself on the same tasks: the same rewards are read, and its oracle earns what ours does.

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
from agentenv_worlds.harbor.trial import rewards_of
from helpers.containers import TASKS, needs_podman

pytest.importorskip("harbor", reason="UNTESTED beside Harbor: make test-harbor installs it")
pytestmark = pytest.mark.exhaustive


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


@pytest.mark.containers
def test_harbors_own_run_of_our_tasks_gives_its_oracle_the_same_scores(tmp_path):
    needs_podman()
    folder = tmp_path / "tasks"
    shutil.copytree(TASKS / "test", folder)
    for settings in folder.glob("*/task.toml"):  # Harbor refuses to play a task without a network on podman
        settings.write_text(settings.read_text().replace('network_mode = "no-network"', ""))
    harbor = Path(sys.executable).with_name("harbor")
    command = [
        harbor,
        "run",
        "-p",
        folder,
        "-a",
        "oracle",
        "-e",
        "podman",
        "-o",
        tmp_path / "jobs",
        "-n",
        "1",
        "--yes",
    ]
    own = {
        "HARBOR_TELEMETRY": "off",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PATH": f"{harbor.parent}:{os.environ['PATH']}",
    }
    subprocess.run(command, env={**os.environ, **own}, check=True, timeout=1500)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("jobs/*/*/result.json")]
    scores = {Path(each["task_name"]).name: each["verifier_result"]["rewards"] for each in results}

    done = ae.evaluate(f"harbor:{folder}", "oracle", group_size=1, runs_dir=str(tmp_path / "runs"))
    assert scores == {summary.task_id: {"reward": summary.reward} for summary in done.summaries}
