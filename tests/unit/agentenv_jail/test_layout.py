"""What a jail shows of an interpreter that lies among other files, as those of conda and pyenv do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.core import SandboxUnavailable
from agentenv.sandbox import create

pytestmark = pytest.mark.sandbox

STRANGE = ("pkgs/other/secret.py", "etc/secret.cfg", "envs/mine/lib/secret.py", "share/secret.txt")


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """An interpreter in a folder of its own, which every user may read, beside files that are no part of it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield interpreter_in(Path(folder))


def interpreter_in(home: Path) -> str:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = home / "lib" / version
    shutil.copytree(
        sysconfig.get_path("stdlib"),
        library,
        ignore=shutil.ignore_patterns("site-packages", "test*", "config-*"),
    )
    for shared in Path(sys.base_prefix, "lib").glob("libpython*"):
        shutil.copy(shared, home / "lib", follow_symlinks=False)
    (home / "bin").mkdir()
    executable = home / "bin" / version
    shutil.copy(os.path.realpath(sys.executable), executable)
    inside = (
        f"lib/{version}/site-packages/secret/__init__.py",
        f"lib/{version}/secret.pth",
        "lib/secret/data.json",
    )
    for name in (*STRANGE, *inside):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("secret")
    if subprocess.run([executable, "-c", "import json"], check=False, capture_output=True).returncode:
        pytest.skip("UNTESTED: this interpreter does not run from another folder")
    return str(executable)


@pytest.mark.parametrize("tier", ["namespace", "landlock"])
async def test_the_jail_shows_an_interpreter_without_what_lies_beside_it(tier, python):
    code = (
        "import os, sys, csv, sqlite3, wave\n"
        "for top, _, names in os.walk(HOME):\n"
        "    for name in names:\n"
        "        try: text = open(os.path.join(top, name), errors='replace').read(6)\n"
        "        except OSError: continue\n"
        "        if text == 'secret': print('BREACH', top, name)\n"
        "print('done')"
    )
    home = str(Path(python).parents[1]) if tier == "landlock" else "/"
    try:
        async with create(tier, size=1, python=python) as sandbox:
            result = await sandbox.run_code(f"HOME = {home!r}\n{code}", timeout_s=30)
    except SandboxUnavailable as error:
        pytest.skip(f"UNTESTED tier {tier}: {error}")

    assert result.stdout == "done\n", result.stderr
