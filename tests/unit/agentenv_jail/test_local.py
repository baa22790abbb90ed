"""The local sandbox: executions, files, sessions, limits, and bad input."""

from __future__ import annotations

import asyncio
import os

import pytest
import pytest_asyncio

from agentenv.core import SandboxUnavailable, UsageError
from agentenv.sandbox import SandboxLimits, create
from helpers.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]

LIMITS = SandboxLimits(memory_bytes=256 << 20, address_space_bytes=256 << 20, max_processes=16)


@pytest_asyncio.fixture(params=["namespace", "landlock"], scope="module", loop_scope="module")
async def pool(request):
    python = "/usr/bin/python3" if request.param == "landlock" and os.geteuid() == 0 else None
    try:
        async with create(request.param, size=2, limits=LIMITS, python=python) as pool:
            yield pool
    except (SandboxUnavailable, UsageError) as error:
        pytest.skip(f"UNTESTED tier {request.param}: {error}")


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(pool):
    async with pool.lease() as lent:
        yield lent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def best_pool():
    async with create("auto", size=2, limits=LIMITS) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def best(best_pool):
    async with best_pool.lease() as lent:
        yield lent


async def test_code_runs_and_its_output_comes_back(sandbox):
    result = await sandbox.run_code("import sys\nprint('out')\nprint('err', file=sys.stderr)")

    assert (result.status, result.exit_code) == ("ok", 0)
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert result.duration_s > 0
    assert result.max_rss_bytes > 1 << 20


async def test_an_exception_shows_its_own_lines_only(sandbox):
    result = await sandbox.run_code("def f():\n    return 1 / 0\nf()")

    assert (result.status, result.exit_code) == ("error", 1)
    assert result.stderr.startswith(
        'Traceback (most recent call last):\n  File "main.py", line 3, in <module>'
    )
    assert "return 1 / 0" in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "program.py" not in result.stderr


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("raise SystemExit(7)", "error", 7),
        ("exit()", "ok", 0),
        ("import sys; sys.exit('bye')", "error", 1),
        ("import os; os._exit(9)", "error", 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed", -11),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "memory", 1),
        ("x = [0] * (1 << 40)", "error", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "killed", -24),
        ("import sys; print('MemoryError', file=sys.stderr); sys.exit(1)", "error", 1),
        ("import sys; sys.stdout = None", "ok", 0),
        ("def f(:", "error", 1),
        ("print('\0')", "error", 1),
        ("print('\ud800')", "error", 1),
    ],
)
async def test_the_status_says_how_the_code_ended(sandbox, code, status, exit_code):
    result = await sandbox.run_code(code)

    assert (result.status, result.exit_code) == (status, exit_code)


async def test_a_time_limit_ends_the_code_and_keeps_what_it_said(sandbox):
    result = await sandbox.run_code("print('before')\nwhile True: pass", timeout_s=1)

    assert result.status == "timeout"
    assert result.stdout == "before\n"
    assert result.duration_s >= 1
    assert (await sandbox.run_code("print(1)")).stdout == "1\n"


async def test_a_flood_of_output_is_ended_and_its_ends_are_kept(sandbox):
    result = await sandbox.run_code("print('first')\nwhile True: print('x' * 10_000)")

    assert result.status == "output_limit"
    assert result.truncated
    assert result.stdout.startswith("first\n")
    assert "bytes left out" in result.stdout
    assert len(result.stdout) < 70_000
    assert result.stdout_bytes > 8 << 20


async def test_every_execution_starts_clean(sandbox):
    first = await sandbox.run_code(
        "import math\nmath.pi = 3\nopen('left.txt', 'w').write('x')\nprint(math.pi)"
    )
    second = await sandbox.run_code("import math, os\nprint(math.pi > 3.1, os.listdir('.'))")

    assert first.stdout == "3\n"
    assert second.stdout == "True []\n"


async def test_files_go_in_and_come_out(sandbox):
    await sandbox.write_file("data/in.txt", "hello")

    result = await sandbox.run_code(
        "text = open('data/in.txt').read() + open('extra.bin').read()\nopen('out.txt', 'w').write(text.upper())",
        files={"extra.bin": b" you"},
    )

    assert result.status == "ok", result.stderr
    assert await sandbox.read_file("out.txt") == b"HELLO YOU"
    assert await sandbox.read_file("data/in.txt") == b"hello"
    assert result.files == {"out.txt": b"HELLO YOU"}
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        await sandbox.read_file("nothing.txt")


async def test_standard_input_environment_and_arguments_reach_the_program(sandbox):
    code = "import os, sys\nprint(sys.stdin.read(), os.environ['COLOUR'], sys.argv)"

    result = await sandbox.run_code(code, stdin="in", env={"COLOUR": "blue"})

    assert result.stdout == "in blue ['main.py']\n"


async def test_a_command_runs_with_its_exit_code(sandbox):
    assert (await sandbox.exec(["/bin/echo", "a b"])).stdout == "a b\n"
    assert (await sandbox.exec("exit 3")).exit_code == 3
    missing = await sandbox.exec(["no-such-program"])
    assert (missing.status, missing.exit_code) == ("error", 127)
    assert "no-such-program" in missing.stderr


async def test_a_session_keeps_names_and_files(sandbox):
    async with sandbox.session() as session:
        await session.run_code("x = 20\nopen('note', 'w').write('kept')")
        result = await session.run_code("x + 1", echo=True)
        await session.write_file("given", b"\x00\xff")

        assert result.stdout == "21\n"
        assert await session.read_file("note") == b"kept"
        assert (await session.run_code("print(open('given', 'rb').read())")).stdout == "b'\\x00\\xff'\n"
        failed = await session.run_code("1/0")
        assert (failed.status, failed.exit_code) == ("error", 1)
        assert (await session.run_code("print(x)")).stdout == "20\n"

    assert (await sandbox.run_code("print('x' in globals())")).stdout == "False\n"


async def test_a_file_of_a_session_may_be_larger_than_a_message(sandbox):
    content = bytes(range(256)) * 1000
    async with sandbox.session() as session:
        await session.write_file("large", content)
        await session.run_code("import os\nos.mkfifo('pipe')")

        assert await session.read_file("large") == content
        with pytest.raises(FileNotFoundError, match="not a regular file"):
            await session.read_file("pipe")
        with pytest.raises(FileNotFoundError, match="No such file"):
            await session.read_file("nothing")


async def test_a_session_that_sends_anything_but_its_reply_is_ended(sandbox):
    async with sandbox.session() as session:
        result = await session.run_code("import os\nos.write(3, b'{\"exit\": NaN}')")

        assert result.status == "killed"
        assert "not the reply" in result.note
        assert not session.alive


async def test_many_files_with_long_names_come_back(sandbox):
    result = await sandbox.run_code("for n in range(500): open(f'{n:03}' + 'x' * 250, 'w').write(str(n))")

    assert result.ok, result.stderr
    assert len(result.files) == 500
    assert result.files["007" + "x" * 250] == b"7"


async def test_a_session_ends_with_a_time_out_and_says_so(sandbox):
    async with sandbox.session() as session:
        ended = await session.run_code("while True: pass", timeout_s=0.3)
        after = await session.run_code("print(1)")

        assert ended.status == "timeout"
        assert "state is lost" in ended.note
        assert not session.alive
        assert after.status == "killed"
        assert "open a new one" in after.stderr


async def test_a_session_command_over_its_time_leaves_the_session(best):
    async with best.session() as session:
        await session.run_code("x = 1")
        result = await session.exec("sleep 30", timeout_s=0.2)

        assert result.status == "timeout"
        assert (await session.run_code("print(x)")).stdout == "1\n"


async def test_closing_a_session_ends_the_step_in_flight(best):
    session = best.session()
    await session.run_code("x = 1")
    step = asyncio.ensure_future(session.run_code("while True: pass", timeout_s=2 * PATIENCE_S))
    await until(lambda: session._current)

    await session.close()
    result = await asyncio.wait_for(step, PATIENCE_S)

    assert result.status == "killed"
    assert not session.alive


async def test_a_lease_is_clean_and_ends_alone(best):
    async with best.lease() as first:
        await first.write_file("mine", "1")
        session = first.session()
        await session.run_code("x = 1")
        async with best.lease() as second:
            assert (await second.run_code("import os; print(os.listdir())")).stdout == "[]\n"
        assert (await first.run_code("print(open('mine').read())")).stdout == "1\n"

    assert not session.alive
    with pytest.raises(UsageError, match="closed"):
        await first.run_code("1")
    assert (await best.run_code("print(1)")).ok


async def test_reset_forgets_files_and_sessions(best):
    await best.write_file("a", "1")
    session = best.session()
    await session.run_code("x = 1")

    await best.reset()

    assert not session.alive
    with pytest.raises(FileNotFoundError):
        await best.read_file("a")


async def test_executions_run_side_by_side(best):
    results = await asyncio.gather(*(best.run_code(f"print({n} ** 2)") for n in range(20)))

    assert [result.stdout for result in results] == [f"{n**2}\n" for n in range(20)]
    assert max(result.queue_s for result in results) > 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"code": b"print(1)"}, "code must be text, not bytes"),
        ({"code": None}, "code must be text"),
        ({"code": "1", "timeout_s": 0}, "timeout_s must be more than 0"),
        ({"code": "1", "timeout_s": -1.0}, "timeout_s must be more than 0"),
        ({"code": "1", "timeout_s": float("nan")}, "timeout_s"),
        ({"code": "1", "timeout_s": "5"}, "timeout_s must be a number"),
        ({"code": "1", "files": {"../up": "x"}}, "leads out of the working directory"),
        ({"code": "1", "files": {"/etc/passwd": "x"}}, "leads out of the working directory"),
        ({"code": "1", "files": {"a\0b": "x"}}, "null"),
        ({"code": "1", "files": {"a": 3}}, "text or bytes"),
        ({"code": "1", "env": {"A=B": "x"}}, "A=B"),
        ({"code": "1", "env": {"A": 1}}, "text value"),
    ],
)
async def test_bad_arguments_are_refused_with_the_value(best, call, words):
    with pytest.raises(UsageError, match=words):
        await best.run_code(**call)


async def test_ten_megabytes_of_code_run_and_too_much_is_answered(best):
    large = await best.run_code("x = '" + "a" * 10_000_000 + "'\nprint(len(x))")
    larger = await best.run_code("#" + "a" * 40_000_000)

    assert large.stdout == "10000000\n"
    assert larger.status == "error"
    assert "at most" in larger.stderr


async def test_a_closed_sandbox_says_so():
    sandbox = create("auto", size=1)
    async with sandbox:
        pass
    await sandbox.close()

    with pytest.raises(UsageError, match="closed"):
        await sandbox.run_code("1")
    with pytest.raises(UsageError, match="closed"):
        await sandbox.write_file("a", "b")


async def test_stricter_limits_hold_for_one_call(best):
    strict = SandboxLimits(max_output_bytes=1000, output_bytes=100)

    result = await best.run_code("print('x' * 100_000)", limits=strict)

    assert result.status == "output_limit"
    assert len(result.stdout) < 200


async def test_unknown_backends_options_and_sizes_are_refused():
    with pytest.raises(UsageError, match="unknown sandbox backend 'vm'"):
        create("vm")
    with pytest.raises(UsageError, match="colour"):
        create("local", colour="red")
    with pytest.raises(UsageError, match="size"):
        create("local", size=0)
    with pytest.raises(UsageError, match="max_processes"):
        SandboxLimits(max_processes=0)
    with pytest.raises(UsageError, match="not installed"):
        create("local", packages=["no-such-package"])
