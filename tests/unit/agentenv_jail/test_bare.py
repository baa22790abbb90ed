"""The local sandbox runs in an interpreter that has none of our dependencies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import agentenv
import agentenv_jail


def test_the_local_sandbox_needs_no_package_of_others():
    """Where a sandbox is tried as another user, the system's interpreter has none of our dependencies."""
    paths = [str(Path(package.__file__).parents[1]) for package in (agentenv, agentenv_jail)]
    code = f"import sys; sys.path[:0] = {paths}; import agentenv_jail.backend; print('ok')"

    shown = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )

    assert shown.stdout == "ok\n", shown.stderr
