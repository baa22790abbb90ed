"""Chromium is installed where that is possible; elsewhere its absence is said, and nothing fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "install-chromium"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the few programs that the script finds."""
    for name in ("sh", "chmod"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    return tmp_path


def program(folder: Path, name: str, does: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


def said(programs: Path, user: int = 0) -> str:
    program(programs, "id", f"echo {user}")
    program(programs, "timeout", 'shift; exec "$@"')
    command = [str(programs / "sh"), str(SCRIPT)]
    done = subprocess.run(command, env={"PATH": str(programs)}, capture_output=True, text=True, check=True)
    return done.stdout


def test_nothing_is_done_where_chromium_is_there(programs: Path):
    program(programs, "chromium-browser", "exit 1")

    assert said(programs) == ""


@pytest.mark.parametrize(
    ("apt", "user", "why"),
    [
        ("", 0, "this machine has no apt-get"),
        ("exit 0", 1000, "installing it needs root"),
        ("exit 100", 0, "apt-get update failed"),
        ('case "$*" in *install*) exit 100;; esac', 0, "no package that can be installed"),
        ("exit 0", 0, "no program of that name"),
    ],
)
def test_a_machine_that_cannot_install_it_says_why(programs: Path, apt: str, user: int, why: str):
    if apt:
        program(programs, "apt-get", apt)

    words = said(programs, user)

    assert why in words
    assert "browser tests skip" in words


def test_it_is_installed_as_root(programs: Path):
    made = programs / "chromium"
    program(
        programs,
        "apt-get",
        f'case "$*" in *install*) printf "#!/bin/sh\\necho Chromium 156\\n" > {made}; chmod +x {made};; esac',
    )

    assert said(programs) == "installed Chromium 156\n"
