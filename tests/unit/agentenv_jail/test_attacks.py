"""The attack suite on every tier that this machine offers, as ourselves and as nobody, in a container and by E2B."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.containers import IMAGE, needs_podman

pytestmark = pytest.mark.sandbox

SUITE = Path(__file__).parent / "attacks.py"
ROOT = Path(__file__).parents[3]
SYSTEM = "/usr/bin/python3"


def run(tier: str, *arguments: str, nobody: bool = False) -> str:
    """Run the suite in a process of its own and return what it printed."""
    python = [sys.executable]
    if nobody:
        if os.geteuid() != 0:
            pytest.skip("UNTESTED as nobody: only root can become nobody")
        if not Path(SYSTEM).exists() or shutil.which("setpriv") is None:
            pytest.skip(f"UNTESTED as nobody: needs {SYSTEM} and setpriv")
        python = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", SYSTEM]
    elif tier == "landlock" and os.geteuid() == 0:
        arguments = (*arguments, "--python", SYSTEM)
    done = subprocess.run(
        [*python, str(SUITE), "--tier", tier, *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env={
            **{name: os.environ[name] for name in ("PATH", "CONTAINERS_CONF") if name in os.environ},
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "plugins"))),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("tier", ["namespace", "landlock"])
def test_the_quick_attacks_do_no_harm(tier):
    assert " cases held" in run(tier, "--quick")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "nobody"),
    [
        pytest.param("namespace", True, id="namespace-as-nobody"),
        pytest.param("landlock", False, id="landlock-as-ourselves"),
        pytest.param("namespace", False, marks=pytest.mark.exhaustive, id="namespace-as-ourselves"),
        pytest.param("landlock", True, marks=pytest.mark.exhaustive, id="landlock-as-nobody"),
    ],
)
def test_all_attacks_do_no_harm(tier, nobody):
    assert " cases held" in run(tier, nobody=nobody)


@pytest.mark.exhaustive  # six runs of a minute each
@pytest.mark.parametrize("nobody", [False, True], ids=["as-ourselves", "as-nobody"])
@pytest.mark.parametrize(("tier", "version"), [("namespace", "0"), ("namespace", "4"), ("landlock", "1")])
def test_all_attacks_do_no_harm_with_the_landlock_of_an_old_kernel(tier, version, nobody):
    assert " cases held" in run(tier, "--abi", version, nobody=nobody)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--quick"], pytest.param([], marks=pytest.mark.exhaustive)])
def test_attacks_through_e2bs_protocol_do_no_harm(arguments):
    pytest.importorskip("e2b_code_interpreter", reason="UNTESTED: e2b-code-interpreter is not installed")
    assert " cases held" in run("e2b", *arguments)


@pytest.mark.containers
@pytest.mark.parametrize(
    "arguments", [["--quick"], pytest.param([], marks=[pytest.mark.exhaustive, pytest.mark.timeout(1900)])]
)
def test_attacks_in_a_container_do_no_harm(arguments):
    needs_podman()
    assert " cases held" in run(f"podman:{IMAGE}", *arguments)
