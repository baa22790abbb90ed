"""A second user on the machine reads no secret, holds up no run and reaches no server without its token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from agentenv.runs.store import Run, RunWriter
from agentenv.runs.store.runinfo import RunStatus

NOBODY = 65534
PYTHON = "/usr/bin/python3"
"""An interpreter that others may run; that of the tests is often in a home."""
SERVERS = {
    "an environment": ("serve", "--env", "agentenv/Calculator-v0"),
    "a model's sessions": ("serve", "--capture", "mock"),
    "a sandbox": ("sandbox", "serve"),
}
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not Path(PYTHON).exists(),
    reason="UNTESTED: only root can become another user, who needs a Python of the system",
)

LOOK = """
import fcntl, json, os, sys
places, hold = json.loads(sys.argv[1]), sys.argv[2]
found = {"lines": [], "files": [], "held": False, "written": []}
for pid in filter(str.isdecimal, os.listdir("/proc")):
    for name in ("cmdline", "environ"):
        try:
            found["lines"].append(open(f"/proc/{pid}/{name}", "rb").read().decode(errors="replace"))
        except OSError:
            pass
for place in places:
    for folder, folders, files in os.walk(place):
        for name in files:
            path = os.path.join(folder, name)
            for way, kind in (("rb", "files"), ("ab", "written")):
                try:
                    with open(path, way) as file:
                        found[kind].append([path, file.read(99999).decode(errors="replace") if way == "rb" else ""])
                except OSError:
                    pass
try:
    descriptor = os.open(hold, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    found["held"] = True
except OSError:
    pass
print(json.dumps(found), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder into which everybody can look, as a home often is."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_nobody(*words: str) -> subprocess.Popen[str]:
    """Start the system's Python as another user."""
    return subprocess.Popen(
        [PYTHON, "-I", "-c", *words],
        env={},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_run_is_resumed_although_another_user_wants_to_hold_its_lock(shared: Path):
    with RunWriter.create("run", runs_dir=shared) as writer:
        path = writer.path
    with as_nobody(LOOK, json.dumps([str(shared)]), str(path / "run.lock")) as other:
        assert other.stdout is not None
        found = json.loads(other.stdout.readline())
        with RunWriter.resume(path):
            assert Run(path).status is RunStatus.RUNNING
        assert other.stdin is not None
        other.stdin.close()

    assert not found["held"]
    assert found["written"] == []


@pytest.mark.parametrize("words", SERVERS.values(), ids=SERVERS)
def test_a_server_tells_its_token_to_nobody_else(words, shared: Path):
    places = [str(shared), tempfile.gettempdir(), "/dev/shm"]
    environ = {**os.environ, "HOME": str(shared), "XDG_CACHE_HOME": ""}
    server = subprocess.Popen(
        [sys.executable, "-m", "agentenv", *words, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=shared,
        env=environ,
    )
    try:
        assert server.stderr is not None
        said = ""
        while "token: " not in said:
            said += (line := server.stderr.readline())
            assert line, f"the server ended: {said}"
        token = said.partition("token: ")[2].split()[0]
        url = "http://" + said.partition("http://")[2].split()[0].rstrip(";")
        # What it made, and not what others have there.
        roots = (Path(tempfile.gettempdir()), Path("/dev/shm"))
        places = [str(shared), *(str(path) for root in roots for path in root.glob("agentenv*"))]
        with as_nobody(LOOK, json.dumps(places), "/none") as other:
            seen, _ = other.communicate("")
        with pytest.raises(HTTPError) as refused:
            build_opener(ProxyHandler({})).open(Request(url + "/sessions", data=b"{}"), timeout=30)
    finally:
        server.terminate()
        server.communicate(timeout=30)

    refused.value.close()
    assert token not in seen
    assert refused.value.code in {401, 404}
