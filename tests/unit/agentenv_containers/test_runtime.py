"""What can be known of containers without one: owners, digests, archives, names of agents."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import SandboxCrashed, SandboxUnavailable, UsageError
from agentenv_containers import PODMAN, ContainerSettings, Runtime, known_agent, tar_of
from agentenv_containers.container import untar
from agentenv_containers.runtime import _has_died, _lock, digest_of, end, owner
from agentenv_containers.runtime_check import lacks
from agentenv_containers.seccomp import narrowed


def test_only_the_containers_of_dead_processes_of_this_machine_are_swept():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    name = owner(ended.pid) or owner()
    ended.wait()
    mine = owner()
    machine, pid, started = mine.split("-")

    assert not _has_died(f"agentenv-{mine}-0a0b")
    assert _has_died(f"agentenv-{name}-0a0b")
    assert _has_died(f"agentenv-{machine}-{pid}-{int(started) - 1}-0a0b")  # the number was used again
    for foreign in (
        f"agentenv-ffffffff-{ended.pid}-1-0a",
        f"other-{name}-0a",
        f"agentenv-{name}",
        "agentenv",
        "",
    ):
        assert not _has_died(foreign)


async def test_a_build_waits_for_no_lock_of_another_user_and_says_for_which_it_waits(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    waiting = asyncio.Event()

    async def second():
        waiting.set()
        async with _lock("image"):
            return "built"

    async with _lock("image"):
        task = asyncio.create_task(second())
        await waiting.wait()
        await asyncio.sleep(0)
        (file,) = (tmp_path / "agentenv" / "locks").iterdir()
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    assert await task == "built"
    assert "image is being built already" in caplog.text


def test_a_build_is_known_by_all_that_it_reads(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    seen = {digest_of(tmp_path)}
    (tmp_path / "a").write_text("1")
    seen.add(digest_of(tmp_path))
    (tmp_path / "a").chmod(0o755)
    seen.add(digest_of(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    seen.add(digest_of(tmp_path))
    (tmp_path / "l").symlink_to("b")
    os.mkfifo(tmp_path / "pipe")  # which nobody writes into
    seen.add(digest_of(tmp_path))
    seen.add(digest_of(tmp_path, "FROM y\n"))
    assert len(seen) == 6
    assert digest_of(tmp_path) in seen


@given(st.dictionaries(st.text("abc", min_size=1, max_size=5), st.binary(max_size=50), max_size=5))
def test_files_come_back_as_they_were(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("back")
    untar(tar_of(files), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_an_archive_of_an_enemy_stays_in_its_folder(tmp_path):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, kind, link in (
            ("../out", tarfile.REGTYPE, ""),
            ("/abs", tarfile.REGTYPE, ""),
            ("link", tarfile.SYMTYPE, "/etc/passwd"),
            ("up", tarfile.SYMTYPE, ".."),
            ("up/through", tarfile.REGTYPE, ""),
            ("device", tarfile.CHRTYPE, ""),
            ("fine", tarfile.REGTYPE, ""),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, link
            tar.addfile(entry, io.BytesIO())
    inner = tmp_path / "inner"
    inner.mkdir()
    untar(data.getvalue(), inner)

    assert [path.name for path in tmp_path.iterdir()] == ["inner"]
    assert "fine" in {path.name for path in inner.iterdir()}
    assert not [path for path in inner.iterdir() if path.is_symlink()]


def test_the_profile_of_system_calls_loses_what_reaches_beyond_a_container():
    allow = {"action": "SCMP_ACT_ALLOW"}
    podman = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}],
        "syscalls": [{"names": ["read", "clone", "setns", "socket"], **allow}, {"names": ["mount"], **allow}],
    }
    profile = narrowed(podman)
    free = [name for rule in profile["syscalls"] if not rule.get("args") for name in rule["names"]]
    assert free == ["read"]
    assert [rule["args"][0]["value"] for rule in profile["syscalls"] if rule["names"] == ["socket"]] == [
        1,
        2,
        10,
        16,
    ]
    assert profile["archMap"] == [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []}]
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"


def test_an_image_of_a_stranger_is_no_option_of_the_runtime():
    with pytest.raises(UsageError, match="'--privileged' is no name of an image"):
        ContainerSettings(image="--privileged")


def test_agents_are_known_by_name_or_are_commands():
    assert known_agent("codex").command[0] == "codex"
    assert known_agent("mine --do {instruction}").command == ("mine", "--do", "{instruction}")
    with pytest.raises(UsageError, match="no agent that is known"):
        known_agent("codecs")


async def test_a_runtime_that_is_not_there_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="podman cannot be started: No such file"):
        await Runtime("podman").run("ps")
    assert lacks(Runtime("podman")) == "podman is not installed; install podman"
    (finding,) = (await PODMAN.diagnose()).findings
    assert finding.detail == "podman is not installed; install podman"


async def test_a_failed_build_shows_what_its_step_printed(tmp_path, monkeypatch):
    fake = tmp_path / "podman"
    fake.write_text(
        "#!/bin/sh\n[ $1 = build ] && echo no compiler found && echo step 2: exit 1 >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "context").mkdir()

    with pytest.raises(SandboxCrashed, match="step 2: exit 1\nno compiler found"):
        await Runtime("podman").build(tmp_path / "context")


async def test_a_command_of_the_runtime_that_is_killed_is_killed_without_a_complaint(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "podman").symlink_to("/bin/sleep")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    for _ in range(60):  # asyncio's watcher and we are at the same process, and who is first is chance
        process = await Runtime("podman").spawn("60")
        await end(process)
        assert process.returncode == -9

    assert [record.getMessage() for record in caplog.records] == []


async def test_what_a_runtime_leaves_where_it_works_is_not_in_the_users_folder(tmp_path, monkeypatch):
    work, temp, fake = tmp_path / "work", tmp_path / "temp", tmp_path / "podman"
    work.mkdir()
    temp.mkdir()
    fake.write_text("#!/bin/sh\ntouch oom\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    monkeypatch.chdir(work)

    assert lacks(Runtime("podman")) == ""
    (temp / "oom").unlink()
    await Runtime("podman").run("ps")

    assert [path.name for path in temp.iterdir()] == ["oom"]
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("told", "mend"),
    [
        ("crun: setrlimit `RLIMIT_NOFILE`: Operation not permitted", 'runtime = "runc"'),
        ("crun: cgroups in hybrid mode not supported, drop all controllers", "install runc"),
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", "needs no daemon"),
        ("something new", ""),
    ],
)
def test_the_doctor_says_what_mends_a_runtime(tmp_path, monkeypatch, told, mend):
    fake = tmp_path / "podman"
    fake.write_text(f"#!/bin/sh\n[ $1 = run ] && echo 'Error: {told}' >&2 && exit 126\nexit 0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    said = lacks(Runtime("podman"))

    assert told.replace("`", "") in said.replace("`", "")
    assert mend in said


def test_the_doctor_names_a_slow_storage_driver(tmp_path, monkeypatch):
    fake = tmp_path / "podman"
    fake.write_text("#!/bin/sh\n[ $1 = info ] && echo vfs\nexit 0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert 'driver = "overlay"\'' in lacks(Runtime("podman"))
