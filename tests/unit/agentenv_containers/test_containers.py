"""Code, files, sessions and agents in real containers of podman, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core import SandboxCrashed, SandboxUnavailable, UsageError
from agentenv.sandbox import SandboxLimits, create
from agentenv_containers import PODMAN, Container, ContainerSettings, Shell
from agentenv_containers.runtime import owner
from helpers.containers import IMAGE, left, needs_podman
from helpers.waiting import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.usefixtures("podman")]
LIMITS = SandboxLimits(
    timeout_s=20.0, memory_bytes=128 << 20, max_processes=16, work_bytes=4 << 20, max_output_bytes=1 << 20
)


@pytest.fixture(scope="module")
def podman():
    needs_podman()
    yield
    assert [name for name in left() if owner() in name] == []


@pytest.fixture
async def box(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with create(f"podman:{IMAGE}", limits=LIMITS) as sandbox, sandbox.lease() as lent:
        yield lent
    assert list(tmp_path.iterdir()) == []


async def test_code_commands_and_files(box):
    said = await box.run_code("import sys\nprint(sys.stdin.read(), 1 + 1)", stdin="in")
    assert (said.status, said.stdout, said.stderr, said.exit_code) == ("ok", "in 2\n", "", 0)
    failed = await box.run_code("1/0")
    assert (failed.status, failed.exit_code) == ("error", 1)
    assert failed.stderr.splitlines()[1].strip() == 'File "/work/main.py", line 1, in <module>'
    assert (await box.run_code("40 + 2", echo=True)).stdout == "42\n"
    late = await box.run_code("print('said \\ud800')\nwhile True: pass", timeout_s=1)
    assert (late.status, late.stdout) == ("timeout", "said \\ud800\n")
    assert (await box.run_code("import os; os.kill(os.getpid(), 9)")).exit_code not in (0, None)

    await box.write_file("d/kept.txt", "é")
    await box.exec("cp d/kept.txt made; touch /tmp/here /dev/shm/here")
    assert (await box.read_file("made")).decode() == "é"
    again = await box.exec(
        "ls; ls /tmp /dev/shm; cat d/kept.txt; id -u; echo $SECRET", env={"SECRET": "a b\nc"}
    )
    assert again.stdout.split() == ["d", "/dev/shm:", "/tmp:", "é65534", "a", "b", "c"]
    assert (await box.exec("-c 'echo run'")).exit_code == 127
    with pytest.raises(FileNotFoundError):
        await box.read_file("made")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", "timeout"),
        ("while True: print('x' * 10**5)", "output_limit"),
        ("x = [bytearray(10**6) for _ in range(10**4)]", "error|memory"),
        ("import os\nwhile True: os.fork()", "error|timeout"),
        ("open('f', 'wb').write(bytes(10**8))", "error"),
        ("import socket; socket.create_connection(('1.1.1.1', 53), timeout=3)", "error"),
        ("open('/etc/passwd', 'a')", "error"),
        ("import os\nif os.fork() == 0:\n os.setsid()\n import time; time.sleep(600)", "ok"),
    ],
)
async def test_a_limit_ends_the_execution_and_not_the_next(box, code, status):
    result = await box.run_code(code, timeout_s=5)

    assert result.status in status.split("|"), result
    after = await box.exec("ps -e --no-headers | grep -c python3; ls; echo fine")
    assert after.stdout == "0\nfine\n", after


async def test_a_session_keeps_names_and_files_until_a_limit_ends_it(box):
    async with box.session() as session:
        assert (await session.run_code("x = 20")).ok
        assert (await session.run_code("x + 1", echo=True)).stdout == "21\n"
        assert "ZeroDivisionError" in (await session.run_code("1/0")).stderr
        assert (await session.exec("echo $((x + 1)) > f; ls")).stdout == "f\n"
        assert (await session.run_code("print(open('f').read(), x)")).stdout == "1\n 20\n"
        ended = await session.run_code("while True: pass", timeout_s=1)
        assert (ended.status, session.ended) == ("timeout", True)
        assert "has ended" in (await session.run_code("1")).note


async def test_the_shell_keeps_its_state_and_outlives_a_time_out():
    container = Container(PODMAN.runtime, ContainerSettings(image=IMAGE))
    await container.start()
    try:
        shell = Shell(container, LIMITS)
        assert (await shell.command("cd /tmp; export A='1 2'; f() { echo \"$A\"; }", 20)).ok
        assert (await shell.command("pwd; f; echo err >&2; false", 20)).stdout == "/tmp\n1 2\nerr\n"
        assert (await shell.command("exit 7", 20)).exit_code == 7
        assert (await shell.command('echo "un\'even"; cat', 20)).stdout == "un'even\n"
        assert (await shell.command("yes", 20)).status == "output_limit"
        assert (await shell.command("echo fine", 20)).stdout == "fine\n"
        image = "localhost/agentenv-test-branch"
        await container.run("echo kept > /kept")
        await container.commit(image)
        branch = Container(PODMAN.runtime, ContainerSettings(image=image))
        await branch.start()
        assert await branch.get("/kept") == b"kept\n"
        await branch.stop()
        await container.stop()
        with pytest.raises(SandboxCrashed, match="is gone"):
            await shell.command("true", 20)
    finally:
        await container.stop()
        await PODMAN.runtime.run("rmi", "-f", "localhost/agentenv-test-branch")


async def test_a_command_that_is_cut_ends_with_all_its_processes_and_the_shell_goes_on():
    container = Container(PODMAN.runtime, ContainerSettings(image=IMAGE))
    await container.start()
    try:
        shell = Shell(container, LIMITS)
        assert (await shell.command("cd /tmp; A='1 2'; sleep 500 & setsid sleep 501 &", 20)).ok
        late = await shell.command(
            "(env -i setsid sleep 600; touch late) & setsid sh -c 'sleep 601' & sleep 602", 1
        )
        assert (late.status, shell.alive) == ("timeout", True)
        assert "variables of the shell are kept" in late.note
        rest = await shell.command('echo $PWD $A; ps -e -o args= | grep "^sleep" | sort', 20)
        told = rest.stdout.splitlines()  # bash says that a job was killed whenever it notices
        assert [line for line in told if "Killed" not in line] == [
            "/tmp 1 2",
            "sleep 500",
            "sleep 501",
            "sleep infinity",
        ]

        for line in ("sleep 603 & while :; do :; done", "(sleep 604; touch late) | cat", "X=$(sleep 605)"):
            cut = await shell.command(f"A=3; {line}; touch late", 1)
            assert (cut.status, shell.alive) == ("timeout", True)
        rest = await shell.command('echo $PWD $A; ls; ps -e -o args= | grep "^sleep 60"', 20)
        assert rest.stdout.splitlines() == ["/tmp 3"]

        for line in (
            "f() { sleep 606; }; f",
            "echo 'sleep 607' > s; . ./s",
            "trap '' 54; while :; do :; done",
        ):
            busy = await shell.command(f"cd /tmp; sleep 608 & {line}; touch late", 1)
            assert (busy.status, shell.alive) == ("timeout", False)
        assert "restarted, so its directory and variables are lost" in busy.note
        rest = await shell.command('echo $PWD; ls /tmp; ps -e -o args= | grep -e "^bash" -e "^sleep 60"', 20)
        assert rest.stdout.splitlines() == ["/", "s", "bash --noprofile --norc"]
        assert "restarted" in (await shell.command("exit 3", 20)).note
    finally:
        await container.stop()


class Prober(ae.AgentEnv):
    """An agent that asks the model once, and looks for other ways out."""

    tasks = ({"word": "a"}, {"word": "b"})

    def start(self, word: str) -> None:
        (self.workspace / "word").write_text(word)

    def command(self, probe: str = "") -> list[str]:
        return ["python3", "-c", AGENT]

    def reward(self, answer: str, workspace: Path, word: str) -> float:
        assert sorted(path.name for path in workspace.iterdir()) == ["made", "word"]
        return float(answer.split() == ["/agentenv/work", word, "Hello", "none"])


AGENT = """
import json, os, socket, urllib.request
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hi"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
said = json.load(urllib.request.urlopen(asked, timeout=60))["choices"][0]["message"]["content"]
reached = []
for place in [("1.1.1.1", 53), ("10.88.0.1", 22), ("127.0.0.1", PORT)]:
    try:
        socket.create_connection(place, timeout=2); reached.append(place)
    except OSError:
        pass
os.symlink("/etc/passwd", "evil")
open("made", "w").write("x")
print(os.getcwd(), open("word").read(), said, reached or "none")
"""


async def test_an_agent_in_a_container_reaches_the_model_alone_and_its_tokens_are_exact(tmp_path):
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = AGENT.replace("PORT", str(port))
    kind = type(
        "Probing", (Prober,), {"command": lambda self: ["python3", "-c", code], "__module__": __name__}
    )
    spec = ae.EnvSpec.of("test/Prober-v0", kind, tasks=list(Prober.tasks), sandbox=f"podman:{IMAGE}")
    async with server:
        result = await asyncio.to_thread(
            ae.evaluate, spec, "scripted:Hello", runs_dir=str(tmp_path), group_size=1
        )

    assert [summary.reward for summary in result.summaries] == [1.0, 1.0], result.summaries
    for summary in result.summaries:
        assert (summary.stop_reason, summary.untrainable_reason) == ("final_answer", "")
        assert summary.trained_tokens == summary.sampled_tokens > 0


KILLED = """
import asyncio, sys
from agentenv.sandbox import create
async def main():
    async with create("podman:{image}") as sandbox, sandbox.lease() as lent:
        print("started", flush=True)
        await lent.run_code("import time; time.sleep(600)", timeout_s=600)
asyncio.run(main())
"""


def test_a_sweep_removes_what_a_killed_process_left_and_nothing_else():
    killed = [_start() for _ in range(2)]
    living = _start()
    try:
        for process in killed:
            process.kill()
            process.communicate()
        assert len(left()) >= 3
        done = subprocess.run(
            [sys.executable, "-m", "agentenv", "sandbox", "sweep"], capture_output=True, text=True, check=True
        )
        assert "containers removed" in done.stdout
        rest = {name.split("-")[2] for name in left()}
        assert str(living.pid) in rest
        assert not rest & {str(process.pid) for process in killed}
    finally:
        living.kill()
        living.communicate()
        asyncio.run(PODMAN.sweep())
    assert str(living.pid) not in {name.split("-")[2] for name in left()}


def _start() -> subprocess.Popen[str]:
    code = KILLED.replace("{image}", IMAGE)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


DRIVER = """
import asyncio
from agentenv_containers import PODMAN, Container, ContainerSettings, Shell
async def play():
    while True:
        container = Container(PODMAN.runtime, ContainerSettings(image="{image}"))
        await container.start()
        await Shell(container, {limits}).command("sleep 0.2; true", 20)
        await container.stop()
async def main():
    print("started", flush=True)
    await asyncio.gather(play(), play())
asyncio.run(main())
"""


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_nothing_is_left_of_drivers_that_were_killed_at_any_moment(kills):
    code = DRIVER.replace("{image}", IMAGE).replace(
        "{limits}", "__import__('agentenv.sandbox').sandbox.SandboxLimits()"
    )
    dead: set[str] = set()
    for number in range(kills):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(2.5 * (number * 0.618 % 1))  # from before the first container to its removal
        process.kill()
        process.communicate()
        dead.add(str(process.pid))

    def swept() -> bool:
        subprocess.run(
            [sys.executable, "-m", "agentenv", "sandbox", "sweep"], capture_output=True, check=True
        )
        return not _of(dead)

    # A runtime that was starting a container goes on after its driver, so a sweep may come too early for it.
    wait_until(swept)


def _of(pids: set[str]) -> list[str]:
    """Containers, and processes of the runtime, of drivers with these numbers."""
    ps = subprocess.run(["ps", "-e", "-o", "args"], capture_output=True, text=True, check=True).stdout
    named = {word for word in ps.split() if word.startswith("agentenv-") and word.count("-") == 4}
    return [name for name in {*left(), *named} if name.split("-")[2] in pids]


async def test_a_start_that_is_cancelled_leaves_nothing():
    for delay in (0.0, 0.2, 0.6):
        container = Container(PODMAN.runtime, ContainerSettings(image=IMAGE))
        starting = asyncio.create_task(container.start())
        await asyncio.sleep(delay)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if not starting.cancelled():
            await container.stop()
        assert container.name not in left()


async def test_what_is_missing_is_told():
    with pytest.raises(SandboxUnavailable, match="has no image 'localhost/none'"):
        await create("podman:localhost/none").start()
    with pytest.raises(UsageError, match="needs an image"):
        create("podman")
    with pytest.raises(UsageError, match="network must be none or open"):
        create(f"podman:{IMAGE}?network=host")
    with pytest.raises(UsageError, match="unexpected keyword"):
        create(f"podman:{IMAGE}?colour=red")
