"""Skip tests in containers where podman cannot run one; `.ci/install-podman` installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

IMAGE = "localhost/agentenv-base"
TASKS = Path(__file__).parents[2] / "examples" / "harbor_tasks"


@cache
def why_not() -> str:
    """Return why no container can be run here; empty if it can."""
    own = Path(sys.prefix) / "containers.conf"
    if own.exists():
        os.environ.setdefault("CONTAINERS_CONF", str(own))
    if shutil.which("podman") is None:
        return "podman is not installed"
    done = subprocess.run(
        ["podman", "run", "--rm", "--network=none", "--pull=never", IMAGE, "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tempfile.gettempdir(),  # podman leaves a file named `oom` where it works
    )
    return done.stderr.strip()[-300:] if done.returncode else ""


def needs_podman() -> None:
    """Skip the test, and say why, unless podman runs a container of the base image."""
    if reason := why_not():
        pytest.skip(
            f"UNTESTED in containers: {reason}; .ci/install-podman installs podman and its base image"
        )


def left() -> list[str]:
    """Return the containers of ours that exist."""
    ps = ["podman", "ps", "-a", "--filter", "label=agentenv", "--format", "{{.Names}}"]
    return subprocess.run(ps, capture_output=True, text=True, check=True).stdout.split()
