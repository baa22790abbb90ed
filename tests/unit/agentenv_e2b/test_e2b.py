"""The e2b backend with E2B's own SDK, against our server of its protocol, on loopback."""

from __future__ import annotations

import pytest
import pytest_asyncio

from agentenv.core import SandboxCrashed, SandboxUnavailable
from agentenv.sandbox import SandboxLimits, create
from agentenv_e2b import new_key, serve

pytest.importorskip("e2b_code_interpreter", reason="UNTESTED: e2b-code-interpreter is not installed")
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    async with serve(size=2) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def cloud(server, monkeypatch):
    for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
        monkeypatch.setenv(name, server.url)
    monkeypatch.setenv("E2B_API_KEY", server.token)
    monkeypatch.setenv("E2B_HTTP_VERSION", "1.1")
    async with create("e2b", size=2, limits=SandboxLimits(max_output_bytes=100_000)) as sandbox:
        yield sandbox


async def test_code_runs_afresh_with_its_output_and_errors(cloud):
    good = await cloud.run_code("import sys\nx = 1\nprint('out')\nprint('err', file=sys.stderr)")
    bad = await cloud.run_code("print('x' in globals())\n1/0")

    assert (good.status, good.stdout, good.stderr, good.stderr_bytes) == ("ok", "out\n", "err\n", 4)
    assert (bad.status, bad.exit_code, bad.stdout) == ("error", 1, "False\n")
    assert "ZeroDivisionError: division by zero" in bad.stderr


async def test_exits_are_told(cloud):
    assert (await cloud.run_code("raise SystemExit(0)")).exit_code == 0
    assert (await cloud.run_code("raise SystemExit(3)")).exit_code == 3


async def test_a_last_expression_is_shown_when_asked_for(cloud):
    assert "42" in (await cloud.run_code("x = 6\nx * 7", echo=True)).stdout
    assert (await cloud.run_code("6 * 7")).status == "ok"


async def test_files_input_and_environment_reach_the_code(cloud):
    await cloud.write_file("a.txt", "from file")
    code = "import os, sys\nprint(open('a.txt').read(), sys.stdin.read(), os.environ['COLOUR'])"

    result = await cloud.run_code(code, stdin="from input", env={"COLOUR": "blue"})

    assert result.stdout == "from file from input blue\n"
    assert await cloud.read_file("a.txt") == b"from file"
    with pytest.raises(FileNotFoundError):
        await cloud.read_file("none.txt")


async def test_commands_tell_their_exit_code(cloud):
    result = await cloud.exec("echo hi; exit 3")

    assert (result.status, result.exit_code, result.stdout) == ("error", 3, "hi\n")


async def test_a_time_out_and_a_flood_free_the_context(cloud):
    slow = await cloud.run_code("while True: pass", timeout_s=0.3)
    loud = await cloud.run_code("while True: print('x' * 10_000)", timeout_s=5)

    assert slow.status == "timeout"
    assert loud.status in ("output_limit", "error")
    assert len(loud.stdout) < 70_000
    assert (await cloud.run_code("print(1)")).stdout == "1\n"


async def test_a_session_keeps_state_and_ends_with_a_time_out(cloud):
    async with cloud.session() as session:
        await session.run_code("x = 20")
        assert (await session.run_code("print(x + 1)")).stdout == "21\n"
        assert (await session.run_code("while True: pass", timeout_s=0.3)).status == "timeout"
        assert "open a new one" in (await session.run_code("1")).stderr


async def test_leases_reuse_sandboxes_and_leave_them_empty(cloud):
    used = []
    for _ in range(20):  # more than the contexts that a sandbox may have
        async with cloud.lease() as lent:
            used.append(lent.remote)
            assert (await lent.run_code("import os; print(os.listdir())")).stdout == "[]\n"
            await lent.write_file("mine", "1")

    assert all(remote is used[0] for remote in used)


async def test_a_sandbox_that_has_gone_aborts_and_the_next_call_gets_another(cloud):
    await cloud.run_code("1")
    await cloud.remote.box.kill()

    with pytest.raises(SandboxCrashed, match="e2b"):
        await cloud.run_code("1")
    assert (await cloud.run_code("print(1)")).stdout == "1\n"


async def test_a_wrong_key_is_refused(server, monkeypatch):
    monkeypatch.setenv("E2B_API_URL", server.url)
    monkeypatch.setenv("E2B_API_KEY", new_key())

    with pytest.raises(SandboxUnavailable, match=r"401.*the token of this request is wrong"):
        async with create("e2b"):
            pass


@pytest.mark.slow
async def test_a_service_that_cannot_be_reached_is_said(monkeypatch):
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)

    with pytest.raises(SandboxUnavailable, match="e2b: cannot get a sandbox"):
        async with create("e2b"):
            pass
