"""Habits of the tests themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]

MAY_SLEEP = {
    "e2e/test_kills_of_trainings.py": "ends a process at a random moment",
    "helpers/deadly.py": "waits in one process for a file that another one makes",
    "helpers/waiting.py": "looks again at a condition that no event tells",
    "unit/agentenv_jail/attacks.py": "runs by itself as any user, with nothing but agentenv",
    "unit/core/test_threads.py": "meets a thread at the moment at which its idle time ends",
    "e2e/test_chaos.py": "kills, stops and slows at random moments",
    "helpers/chaotic.py": "is a server and an environment that take their time",
    "unit/agentenv_containers/test_containers.py": "cancels a start at several moments",
    "unit/runner/test_held_up.py": "sleeps in virtual time",
    "unit/tools/test_tool.py": "blocks the event loop, which is what is tested",
}
"""Files whose code sleeps for a time, and why. Programs that a test writes for others are not looked at."""


CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time", "time.time")
MAY_READ_A_CLOCK = {
    "e2e/test_chaos.py": "goes on for a time",
    "helpers/waiting.py": "gives up after a time",
    "unit/agentenv_providers/test_chat_client.py": "says when an answer came",
    "unit/engine/vllm/test_failing_servers.py": "says when an answer came",
    "unit/runner/test_seats.py": "asks a virtual clock",
    "unit/testing/test_checker.py": "an environment whose answers are never the same",
    "unit/workers/test_handshake.py": "dates a file",
}
"""Files whose code asks a clock, and for what. What is tested is never how long something took: on a busy machine
that is chance. Count what the work is made of (`helpers.costs`), or give up after `helpers.waiting.PATIENCE_S`."""


STAMPS = {
    "endpoint/wire/chat.py": "the API's field `created`",
    "endpoint/wire/responses.py": "the API's field `created_at`",
    "engine/vllm/server_weights.py": "since when a training has a server",
    "render/template.py": "templates may print the date",
    "runs/store/runinfo.py": "when a run began",
    "runs/store/writer.py": "the name of a run",
    "workers/reports.py": "when a worker was looked at",
    "workers/servers.py": "when a server was looked at",
    "workers/handshake.py": "compares it with when files were written",
    "workers/usage.py": "when a process was looked at",
}
"""Files of the library that ask for the time of day, and for what. Durations are measured by clocks that never
jump, so that a clock that is set does not end or lengthen an episode."""


def parsed(word: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the files in which a word stands, each with its syntax tree."""
    for file in sorted(TESTS.rglob("*.py")):
        if word in (text := file.read_text()):
            yield file.relative_to(TESTS).as_posix(), ast.parse(text)


def sleeps(tree: ast.Module) -> bool:
    """Whether code sleeps for anything but 0, which only lets other tasks run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "sleep":
            time = node.args[0] if node.args else None
            if not (isinstance(time, ast.Constant) and time.value == 0):
                return True
    return False


def test_no_test_sleeps_where_it_could_wait_for_a_condition():
    assert {name for name, tree in parsed("sleep(") if sleeps(tree)} == set(MAY_SLEEP)


def test_no_test_judges_by_a_clock():
    def asks(tree: ast.Module) -> bool:
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        return any(call.removesuffix("_ns").endswith(CLOCKS) for call in calls)

    assert {name for clock in CLOCKS for name, tree in parsed(clock) if asks(tree)} == set(MAY_READ_A_CLOCK)


def test_names_of_tests_are_sentences_without_ids():
    coded = re.compile(
        r"^ *(?:async )?def test_(?:[a-d]\d+b?|check_\d+b?)_\w+|\"\"\"Acceptance \w+", re.MULTILINE
    )
    found = [name for file in TESTS.rglob("test_*.py") for name in coded.findall(file.read_text())]

    assert not found, "an id says nothing to a reader who has no list of them"


def test_no_duration_is_measured_by_the_time_of_day():
    asked = re.compile(
        r"\btime\.time(?:_ns)?\(|\bdatetime\.(?:now|utcnow|today)\(|\bfrom time import .*\btime\b"
    )
    library = TESTS.parent / "agentenv"
    found = {
        file.relative_to(library).as_posix()
        for file in library.rglob("*.py")
        if asked.search(file.read_text())
    }

    assert found == set(STAMPS)


def test_no_json_is_cut_into_lines_where_its_texts_may_have_them():
    """`str.splitlines` also splits at U+2028, U+0085 and U+001C, which JSON allows within a text."""
    found: set[str] = set()
    for folder in ("agentenv", "envs", "plugins", "tools"):
        for file in (TESTS.parent / folder).rglob("*.py"):
            if "splitlines" not in (text := file.read_text()) or "json" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    code = ast.unparse(node)
                    if ".splitlines(" in code and re.search(r"\b(?:json\.loads?|from_json)\(", code):
                        found.add(f"{file.name}: {node.name}")

    assert found == set()
