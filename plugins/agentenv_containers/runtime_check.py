"""Say whether a runtime can run a container on this machine, and the lines that mend it."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from agentenv.core import SandboxUnavailable
from agentenv_containers.runtime import Runtime

__all__ = ["check", "lacks", "mend_of"]

_IMAGE = "localhost/agentenv-probe"
_RUNC = (
    """printf '%s\\n' '[engine]' 'runtime = "runc"' '[containers]' """
    """'default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]' > ~/containers.conf; """
    "export CONTAINERS_CONF=~/containers.conf"
)
_OVERLAY = (
    """printf '%s\\n' '[storage]' 'driver = "overlay"' > ~/.config/containers/storage.conf; """
    "podman system reset"
)
MENDS = (
    ("rlimit", f"this machine grants fewer open files or processes: install runc, then {_RUNC}"),
    ("cgroups in hybrid mode", f"crun does not work with this machine's cgroups: install runc, then {_RUNC}"),
    ("executable file `runc` not found", "install runc"),
    ("no subuid ranges", "add a line USER:100000:65536 to /etc/subuid and to /etc/subgid"),
    ("newuidmap", "install uidmap, and add a line USER:100000:65536 to /etc/subuid and to /etc/subgid"),
    ("Cannot connect to the Docker daemon", "start dockerd, or use podman, which needs no daemon"),
    ("permission denied while trying to connect", "add your user to the group docker, or use podman"),
)
"""Part of a runtime's error, and what to do about it."""


def lacks(runtime: Runtime) -> str:
    """Return what keeps the runtime from running containers well, with the remedy; empty if nothing does."""
    try:
        check(runtime)
        if runtime.is_podman:
            driver = _said("podman", "info", "-f", "{{.Store.GraphDriverName}}").stdout.strip()
            if driver == "vfs":
                return f"works, but storage driver vfs copies the image for each container (10 s): {_OVERLAY}"
    except SandboxUnavailable as problem:
        return str(problem)
    return ""


def check(runtime: Runtime) -> None:
    """Run one container, on an image without files in which the machine's own `true` stands.

    Raises:
        SandboxUnavailable: It cannot be run; the remedy says what to do.
    """
    program = runtime.program
    if shutil.which(program) is None:
        raise SandboxUnavailable(f"{program} is not installed", remedy=f"install {program}")
    try:
        problem = _run_one(program)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f"{program} does not answer: {error}") from error
    if problem:
        raise SandboxUnavailable(f"{program} cannot run a container: {problem}", remedy=mend_of(problem))


def mend_of(problem: str) -> str:
    """Return what to do about a runtime's error; empty if it is not known."""
    return next((mend for part, mend in MENDS if part in problem), "")


def _run_one(program: str) -> str:
    if _said(program, "image", "inspect", _IMAGE).returncode:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "empty.tar")
            with tarfile.open(path, "w") as tar:
                for name in ("usr", "bin", "lib", "lib64"):
                    entry = tarfile.TarInfo(name)
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(entry, io.BytesIO())
            made = _said(program, "import", str(path), _IMAGE)
        if made.returncode:
            return _problem(made)
    mounts = [
        f"--volume={path}:{path}:ro" for path in ("/usr", "/bin", "/lib", "/lib64") if Path(path).exists()
    ]
    ran = _said(program, "run", "--rm", "--network=none", "--pids-limit=64", *mounts, _IMAGE, "/usr/bin/true")
    return _problem(ran) if ran.returncode else ""


def _problem(said: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in said.stderr.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else f"exit code {said.returncode}"


def _said(*command: str) -> subprocess.CompletedProcess[str]:
    where = tempfile.gettempdir()  # podman leaves a file named `oom` where it works
    return subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=60, check=False, errors="replace", cwd=where
    )
