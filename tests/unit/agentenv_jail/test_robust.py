"""What is killed is replaced, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from agentenv.core import SandboxUnavailable, UsageError
from agentenv.sandbox import SandboxLimits, create
from helpers.waiting import PATIENCE_S, until, wait_until

pytestmark = pytest.mark.sandbox

TIERS = ["namespace", "landlock"]


def options(tier: str) -> dict[str, object]:
    return {"python": "/usr/bin/python3"} if tier == "landlock" and os.geteuid() == 0 else {}


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def jail_of_this_process() -> list[psutil.Process]:
    return [process for process in descendants(os.getpid()) if is_of_a_jail(process)]


def is_of_a_jail(process: psutil.Process) -> bool:
    try:
        return any("jail" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def spent(process: psutil.Process) -> float:
    try:
        return process.cpu_times().user
    except psutil.NoSuchProcess:
        return 0.0


def wait_until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("agentenv-sandbox-*"))


@pytest.fixture(autouse=True)
def _own_temporary_folder(monkeypatch: pytest.MonkeyPatch):
    """Let `folders` see nothing of sandboxes that other processes make at the same time."""
    with tempfile.TemporaryDirectory(prefix="robust-") as folder:
        Path(folder).chmod(0o755)  # a jail may run as another user
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(params=TIERS)
def tier(request):
    async def probe() -> None:
        async with create(request.param, size=1, **options(request.param)):
            pass

    try:
        asyncio.run(probe())
    except SandboxUnavailable as error:
        pytest.skip(f"UNTESTED tier {request.param}: {error}")
    return request.param


async def test_closing_leaves_no_process_descriptor_or_folder(tier):
    before, known = descriptors(), folders()

    async with create(tier, size=3, **options(tier)) as sandbox:
        await sandbox.run_code("print(1)")
        session = sandbox.session()
        await session.run_code("x = 1")
        running = jail_of_this_process()
        assert len(running) > 3
        hung = asyncio.create_task(sandbox.run_code("while True: pass", timeout_s=30))
        await until(lambda: any(spent(process) > 0.05 for process in jail_of_this_process()))

    with pytest.raises(UsageError, match="closed"):
        await asyncio.wait_for(hung, PATIENCE_S)
    assert not wait_until_gone(running)
    assert descriptors() == before
    assert folders() == known


async def test_a_cancelled_execution_is_ended(tier):
    def spinning() -> list[psutil.Process]:  # to start a jail takes less than that
        return [process for process in jail_of_this_process() if spent(process) > 0.5]

    async with create(tier, size=1, **options(tier)) as sandbox:
        endless = asyncio.create_task(sandbox.run_code("while True: pass", timeout_s=120))
        found = await until(spinning, seconds=60)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless

        assert (await sandbox.run_code("print(1)")).stdout == "1\n"
        assert not wait_until_gone(found)


@pytest.mark.slow
async def test_killed_workers_and_zygotes_are_replaced(tier):
    async with create(tier, size=2, **options(tier)) as sandbox:
        for _ in range(3):
            for process in jail_of_this_process():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.ppid() != os.getpid():
                        process.send_signal(signal.SIGKILL)
            assert (await sandbox.run_code("print(6 * 7)")).stdout == "42\n"


@pytest.mark.slow
async def test_the_death_of_the_guardian_is_survived(tier):
    async with create(tier, size=2, **options(tier)) as sandbox:
        inside = jail_of_this_process()
        top = [process for process in inside if process.ppid() == os.getpid()]
        assert len(top) == 1
        top[0].send_signal(signal.SIGKILL)

        assert (await sandbox.run_code("print(6 * 7)")).stdout == "42\n"
        assert not wait_until_gone([process for process in inside if process not in top])


HOST = """
import asyncio, sys
from agentenv.sandbox import create
async def main():
    async with create(sys.argv[1], size=2, python=sys.argv[2] or None) as sandbox:
        asyncio.create_task(sandbox.run_code("import time\\nwhile True: time.sleep(1)", timeout_s=600))
        session = sandbox.session()
        await session.run_code("x = 1")
        print("ready", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def test_a_killed_host_leaves_nothing(tier):
    known = folders()
    python = str(options(tier).get("python", ""))
    host = subprocess.Popen([sys.executable, "-c", HOST, tier, python], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    try:
        assert host.stdout.readline() == "ready\n"
        inside = descendants(host.pid)
        assert len(inside) >= 3
    finally:
        host.kill()
        host.wait()
        host.stdout.close()

    assert not wait_until_gone(inside)
    wait_until(lambda: folders() == known)


def held_by(processes: list[psutil.Process]) -> int:
    """Return the bytes that processes hold alone; children that have been replaced meanwhile hold none."""
    held = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            held += process.memory_full_info().uss
    return held


@pytest.mark.slow
@pytest.mark.parametrize("each", [500, pytest.param(2500, marks=pytest.mark.exhaustive)])
async def test_thousands_of_executions_leak_nothing(each):
    async with create("auto", size=4, concurrency=4, limits=SandboxLimits(timeout_s=60)) as sandbox:

        async def many(count: int) -> None:
            for number in range(count):
                result = await sandbox.run_code(f"print({number})")
                assert result.stdout == f"{number}\n", result

        await asyncio.gather(*(many(100) for _ in range(4)))
        files, known, me = descriptors(), folders(), psutil.Process()
        memory, jail = me.memory_info().rss, jail_of_this_process()
        inside = held_by(jail)

        await asyncio.gather(*(many(each) for _ in range(4)))

        # The last children are replaced first.
        await until(lambda: len(jail_of_this_process()) <= len(jail) + 2)
        after = jail_of_this_process()
        assert len(descriptors()) <= len(files) + 4
        assert folders() == known
        assert me.memory_info().rss < memory + (10 << 20)
        assert held_by(after) < inside + (10 << 20)


async def test_what_is_very_deep_or_very_many_is_removed_when_a_sandbox_closes():
    sandbox = create("landlock", **options("landlock"))
    await sandbox.start()
    base = Path(sandbox._pool._base)
    deep = os.open(base, os.O_RDONLY)
    for _ in range(2_400):
        os.mkdir("a-name-of-some-length", dir_fd=deep)
        inner = os.open("a-name-of-some-length", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    for number in range(2_000):
        (base / f"link-{number}").symlink_to("nowhere")

    await sandbox.close()

    assert not base.exists()  # noqa: ASYNC240 - the sandbox is closed


BURNS = """
import threading
seen = [0]
def burn():
    while True:
        seen[0] += 1
threading.Thread(target=burn, daemon=True).start()
"""
LEAVES = (
    "import subprocess; subprocess.Popen(['/bin/sh', '-c', 'while :; do :; done'], start_new_session=True)"
)


def states(session) -> list[str]:
    """Return the states of the processes of a session, without its init."""
    told = Path(f"/proc/self/fdinfo/{session._worker.init}").read_text()
    init = next(int(line.split()[1]) for line in told.splitlines() if line.startswith("Pid:"))
    return [process.status() for process in descendants(init)]


async def test_a_session_uses_no_processor_time_between_its_steps(tier):
    async with create(tier, size=1, **options(tier)) as sandbox, sandbox.session() as session:
        await session.run_code(BURNS)
        if tier == "namespace":
            await session.run_code(LEAVES)
            assert len(states(session)) == 2
        await until(lambda: set(states(session)) == {psutil.STATUS_STOPPED})

        went_on = await session.run_code("before = seen[0]\nwhile seen[0] == before: pass\nprint('on')")

        assert went_on.stdout == "on\n"
        await session.write_file("a", "1")
        assert await session.read_file("a") == b"1"
        await until(lambda: set(states(session)) == {psutil.STATUS_STOPPED})
        stopped = jail_of_this_process()
    assert not wait_until_gone(stopped)


async def test_what_a_session_started_runs_on_between_its_steps_if_it_is_asked_to(tier):
    async with create(tier, size=1, **options(tier)) as sandbox, sandbox.session(background=True) as session:
        await session.run_code(BURNS)
        init = next(process for process in jail_of_this_process() if spent(process) > 0)
        before = spent(init)
        await until(lambda: sum(map(spent, jail_of_this_process())) > before + 0.3)

        assert psutil.STATUS_STOPPED not in states(session)


def with_open_files(limits: tuple[int, int], code: str) -> subprocess.CompletedProcess[str]:
    """Run a program under a limit of open files."""
    code = f"import asyncio, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n{code}"
    words = [sys.executable, "-c", code]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)


def test_a_limit_of_open_files_that_no_sandbox_can_live_with_is_refused_at_once():
    start = "from agentenv.sandbox import create\nasyncio.run(create('auto').start())"

    done = with_open_files((64, 64), start)

    assert "needs 96 open files here, and the limit is 64; raise it (ulimit -n 1024)" in done.stderr


MANY = """
from agentenv.sandbox import create
async def main():
    async with create("auto", size=64, concurrency=64) as box:
        found = await asyncio.gather(*(box.run_code(f"print({n} + 1)") for n in range(40)))
        print(sum(int(one.stdout) for one in found))
asyncio.run(main())
"""


def test_a_sandbox_has_as_many_workers_as_the_limit_of_open_files_allows():
    done = with_open_files((128, 128), MANY)

    assert done.stdout == f"{sum(range(41))}\n", done.stderr
    assert "workers instead of 64: this process may open" in done.stderr
    assert with_open_files((64, 1024), MANY).stdout == done.stdout  # the limit is raised to what is allowed


FULL = """
import os
from agentenv.sandbox import create
async def main():
    async with create("auto", size=2, concurrency=2) as box:
        await box.run_code("print(1)")
        held = []
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            os.close(held.pop())
        full = await box.run_code("print(2)")
        for one in held:
            os.close(one)
        print(full.stdout, (await box.run_code("print(3)")).stdout, len(os.listdir("/dev/fd")))
asyncio.run(main())
"""


def test_verdicts_are_read_where_the_next_pipes_find_no_room():
    done = with_open_files((128, 128), FULL)

    assert done.stdout.split()[:2] == ["2", "3"], done.stderr
    assert int(done.stdout.split()[2]) < 30  # what found room beside others is closed


CROWDED = """
import os, socket, threading
from agentenv_jail.jail.messages import send_descriptors
near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.geteuid() == 0:
    os.setuid(65534)
held = []
try:
    while True:
        held.append(socket.socketpair())
        socket.send_fds(held[-1][0], [b"x"], [0] * 50)
except OSError as error:
    print(error.errno)
threading.Timer(0.05, held.clear).start()
send_descriptors(near, b"m", [0, 1])
print(len(socket.recv_fds(far, 9, 2)[1]))
"""


def test_descriptors_wait_until_those_of_other_processes_have_arrived():
    done = with_open_files((96, 96), CROWDED)

    assert done.stdout.split() == [str(errno.ETOOMANYREFS), "2"], done.stderr
