"""The checker: it passes what is right, and finds each thing that is wrong with the right words."""

import asyncio
import json
import random
import re
import time
from types import SimpleNamespace

import pytest

from agentenv.core import RunLimits, ToolError
from agentenv.envs import AgentEnv, Env, EnvSpec, ToolEnv
from agentenv.runner import FunctionUser, RunnerOptions, UserTurn
from agentenv.testing import check_env, tool_call_message
from agentenv.testing.checks import Subject, check_determinism
from agentenv.tools import tool
from agentenv_jail.pool import Pool

ROWS = [{"x": n, "y": n * n} for n in range(100, 120)]


class Fine(ToolEnv):
    """Adds two numbers."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        if abs(a) + abs(b) > 10**15:
            raise ToolError("too large")
        return a + b

    def reward(self, answer: str) -> float:
        return float(answer.split()[-1:] == [str(self.want)])

    @staticmethod
    def oracle(messages, task, rng):
        if messages[-1]["role"] == "tool":
            return f"It is {messages[-1]['content']}"
        return tool_call_message("add", a=task["x"], b=task["y"])


def fine(name, *bases, **members):
    """A class like `Fine` in which some members are others."""
    return type(name, bases or (Fine,), members)


def saying(text):
    """An oracle that says what a function makes of the numbers."""
    return staticmethod(lambda messages, task, rng: text(task["x"], task["y"]))


def adding(more):
    """A start that shows more than the question."""
    return lambda self, x, y: f"{Fine.start(self, x, y)} ({more(x, y)})"


class Modulo(Fine):
    def start(self, x: int, y: int) -> str:
        self.want = (x + y) % 7
        return f"What is the sum of {x} and {y} modulo seven? ({self.want})"


class Drawing(Fine):
    def start(self, x: int, y: int) -> str:
        self.code = random.random()
        return super().start(x, y)

    @tool
    def code_of_the_day(self) -> float:
        """Return a code."""
        return self.code


def unclosable(self):
    del self.want


def sums(x, y):
    return f"The sum of {x} and {y} is {x + y}"


SHORT = {"oracle": saying(lambda x, y: str((x + y) % 7))}
IN_A_SENTENCE = {"oracle": saying(lambda x, y: f"Together {x + y} apples.")}
Generous = fine("Generous", reward=lambda self, answer: 1.0)
Overpaying = fine("Overpaying", reward=lambda self, answer: 2.0 * Fine.reward(self, answer))
TellingShortly = fine("TellingShortly", Modulo, **SHORT)
# The return is forgotten.
Forgotten = fine("Forgotten", start=lambda self, x, y: Fine.start(self, x, y) and None, oracle=None)
Repeating = fine("Repeating", oracle=saying(sums))


class Undescribed(Fine):
    @tool
    def mystery(self, a: int) -> int:
        return a


class Crashing(Fine):
    @tool
    def divide(self, a: int, b: int) -> float:
        """Divide two numbers."""
        return a / b


class Named(Fine):
    """Fails only behind the check of a name that it has told."""

    @tool
    def look_up(self, name: str) -> str:
        """Look a name up."""
        if name != "What":
            raise ToolError("no such name")
        raise KeyError(name)


class Shared(Fine):
    seen: list = []  # noqa: RUF012 - the fault that is to be found

    def start(self, x: int, y: int) -> str:
        self.seen.append(x)
        return super().start(x, y)

    @tool
    def last(self) -> int:
        """Return the last number."""
        return self.seen[-1]

    @staticmethod
    def oracle(messages, task, rng):
        if messages[-1]["role"] == "tool":
            return f"It is {int(messages[-1]['content']) + task['y']}"
        return tool_call_message("last")


class Bloated(Fine):
    @tool
    def echo(self, text: str) -> str:
        """Say it twice."""
        return 2 * text


class Outside(Env):
    """Begins with a message that is not of its space."""

    tasks = ({"n": 3},)

    def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": "go"}], {}

    def step(self, action: str):
        return "on", 0.0, False, False, {}


class Timed(Outside):
    """Puts the time into its info."""

    def reset(self, *, seed=None, options=None):
        return "go", {}

    def step(self, action: str):
        return "on", 0.0, False, False, {"at": time.perf_counter()}


class SharedList(Fine):
    """Only a tool that the oracle never calls shows the list that all instances share."""

    notes: list = []  # noqa: RUF012 - the fault that is to be found

    @tool
    def note(self) -> int:
        """Take a note and return how many there are."""
        self.notes.append(1)
        return len(self.notes)


class NotReset(Fine):
    def __init__(self):
        self.cart = []

    @tool
    def put(self) -> int:
        """Put something into the cart."""
        self.cart.append(1)
        return len(self.cart)


class Doing(ToolEnv):
    """Pays for what was done, whatever is said."""

    def start(self, x: int, y: int) -> str:
        self.wants, self.pressed = True, False
        return f"Press the button {x}, then say Done."

    @tool
    def press(self) -> str:
        """Press the button."""
        self.pressed = True
        return "pressed"

    def reward(self) -> float:
        return float(self.pressed == self.wants)

    @staticmethod
    def oracle(messages, task, rng):
        return "Done." if messages[-1]["role"] == "tool" else tool_call_message("press")


class Parsing(ToolEnv):
    """Reads every answer as a number."""

    def start(self, x: int, y: int) -> str:
        return f"Say {x}."

    def reward(self, x: int, answer: str) -> float:
        return (
            float(answer.strip(".") == str(x))
            if not answer.startswith("1e")
            else float(int(float(answer)) == x)
        )

    @staticmethod
    def oracle(messages, task, rng):
        return str(task["x"])


class Leaving(Doing):
    """The button must be pressed if the number is odd, and else left alone."""

    def start(self, x: int, y: int) -> str:
        super().start(x, y)
        self.wants = bool(x % 2)
        return f"Press the button if {x} is odd. Then say Done."

    @staticmethod
    def oracle(messages, task, rng):
        return tool_call_message("press") if task["x"] % 2 and len(messages) == 1 else "Done."


def spec_of(kind, rows=ROWS, **options):
    tasks = None if kind.tasks is not None else rows
    given = {"tasks": tasks, "max_turns": 3, **options}
    return EnvSpec.of(f"broken/{kind.__name__}-v0", kind, **given)


async def checked(kind, *only, rows=ROWS, options=None, **settings):
    """Check an environment, and return the report."""
    return await check_env(spec_of(kind, rows, **options or {}), only=only, **settings)


async def test_what_is_right_passes_every_check():
    report = await check_env(spec_of(Fine))

    assert report.ok, str(report)
    assert report.exit_code == 0
    assert len(report.findings) == 17
    assert {one.name for one in report.findings if one.status != "ok"} == {"cheats"}  # no code is asked for


BROKEN = [
    (Undescribed, "schema", "no description: mystery"),
    (
        fine("Unseeded", start=adding(lambda x, y: random.random())),
        *("determinism", "differ at message 0.*draw from self.np_random"),
    ),
    (
        fine("WrongOracle", oracle=saying(lambda x, y: "It is 7")),
        "oracle",
        "the oracle gets 0.0 of 1 on task",
    ),
    (Generous, "trivial", "too high: empty 1.00.*all \\d+ episodes have the reward 1: does reward"),
    (Crashing, "fuzz", "divide.*crashed: ZeroDivisionError"),
    (Named, "fuzz", "look_up.*crashed: KeyError"),
    (fine("Telling", start=adding(lambda x, y: f"It is {x + y}")), "leak", "contains the answer"),
    (TellingShortly, "leak", "20 of 20 first observations contain their short answer"),
    (
        fine("TellingInASentence", start=adding(lambda x, y: f"It is {x + y}."), **IN_A_SENTENCE),
        *("leak", "20 of 20 first observations contain what varies in the oracle's answers"),
    ),
    (Parsing, "trivial", "OverflowError"),
    (Overpaying, "oracle", "2.0 of 1.*set full_marks"),
    (Forgotten, "play", "the model is shown nothing before its first turn of task"),
    (SharedList, "determinism", "random policy"),
    (Drawing, "determinism", "random policy"),
    (NotReset, "reuse", "random policy"),
    (fine("NotANumber", reward=lambda self, answer: float("nan")), "oracle", "finite"),
    (Shared, "isolation", "share state"),
    (Bloated, "overflow", "1600000 characters"),
    (fine("Unclosable", close=unclosable), "gym", "AttributeError.*test_checker.py"),
    (Timed, "gym", "Gymnasium's checker"),
    (
        fine("FourTuple", Timed, step=lambda self, action: ("on", 0.0, False, {})),
        *("determinism", "terminated, truncated"),
    ),
    (Outside, "gym", "Gymnasium's checker"),
]


@pytest.mark.parametrize(("kind", "check", "words"), BROKEN, ids=[kind.__name__ for kind, _, _ in BROKEN])
async def test_each_fault_is_found_with_the_right_words(kind, check, words):
    report = await checked(kind, check)

    assert report.exit_code == 1
    assert [one.name for one in report.problems] == [check]
    assert re.search(words, report.problems[0].text, re.DOTALL), report.problems[0].text


@pytest.mark.parametrize(
    ("kind", "checks", "attributes"),
    [
        *((kind, ("oracle",), {}) for kind in (SharedList, Drawing, NotReset, TellingShortly)),
        (Forgotten, ("play",), {"system_prompt": "Add 1 and 1."}),
        (Overpaying, ("oracle",), {"full_marks": 2.0}),
        (Generous, ("trivial",), {"trivial_limit": 1.0}),
        (Repeating, ("leak",), {}),
        (Doing, ("oracle", "leak"), {}),
        (Leaving, ("oracle", "leak"), {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_what_is_no_fault_is_not_told(kind, checks, attributes):
    """Such as a shared list that the oracle does not meet, or words that repeat the question."""
    allows = type(kind.__name__, (kind,), attributes)
    report = await checked(allows, *checks, tasks=8)

    assert report.ok, str(report)
    if "trivial_limit" in attributes:  # the caller's goes before the environment's
        assert not (await checked(allows, *checks, trivial_limit=0.5)).ok


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"x": 1}], "lacks the field 'y'"),
        ([{"x": 1, "y": 2, "z": 3}], "has the field 'z'"),
        ([], "has no tasks"),
        ([{"id": "a", "x": 1, "y": 1}] * 2, "another row also has the id 'a'"),
        (
            {"train": [{"id": f"a{row['x']}", **row} for row in ROWS], "test": ROWS[3:5]},
            "the splits train and test share 2 tasks",
        ),
        ({"train": ROWS, "test": [{"x": 1}]}, "lacks the field 'y'"),
    ],
)
async def test_faults_of_the_tasks_are_found(rows, words):
    report = await checked(Fine, "recipe", "oracle", "play", rows=rows)

    assert any(words in one.text for one in report.problems), str(report)


@pytest.mark.parametrize(("of_turns", "said"), [(0.0, "skipped"), (0.1, "ok")])
async def test_an_environment_that_rewards_nothing_is_told_so(of_turns, said):
    class Silent(ToolEnv):
        def start(self, x, y):
            return f"say {x}"

        @tool
        def look(self) -> str:
            """Look around."""
            self.add_turn_reward(of_turns)
            return "a room"

    report = await checked(Silent, "trivial")

    assert [one.status for one in report.findings] == [said], str(report)
    assert ("write reward()" in str(report)) == (said == "skipped")


async def test_a_check_that_hangs_is_a_problem_and_not_a_hang():
    class Hangs(Fine):
        async def start(self, x, y):
            await asyncio.Event().wait()

    report = await checked(Hangs, "oracle", timeout_s=0.2)

    assert "not done within" in report.problems[0].text


@pytest.mark.parametrize(("seconds", "ok"), [(6.0, True), (11.0, False)])
async def test_each_answer_to_a_megabyte_has_its_own_time(monkeypatch, seconds, ok):
    clock = [0.0]
    monkeypatch.setattr("agentenv.testing.checks.inputs.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Slow(Fine):
        @tool
        def search(self, text: str) -> str:
            """Search for a text."""
            clock[0] += seconds
            return "nothing"

        @tool
        def look(self, text: str) -> str:
            """Look for a text."""
            return self.search(text)

    report = await checked(Slow, "overflow")

    assert report.ok is ok, str(report)


async def test_the_report_is_for_people_and_machines():
    """And what is checked is told meanwhile."""
    told = []
    report = await checked(Generous, "trivial", "speed", told=told.append)
    data = json.loads(report.to_json())

    assert told == ["trivial", report.findings[0], "speed", report.findings[1]]
    assert str(report).splitlines()[0] == "broken/Generous-v0"
    assert " ✗ trivial" in str(report)
    assert str(report).splitlines()[-1] == "1 ok, 1 problem"
    assert [one["status"] for one in data["findings"]] == ["problem", "ok"]
    assert data["ok"] is False
    assert data["summary"] == report.summary == "1 ok, 1 problem"


SPLITS = {"train": ROWS[:12], "test": ROWS[12:]}


async def test_every_split_is_played_and_what_was_not_tried_is_said():
    fine, everything = [await checked(Fine, "recipe", rows=SPLITS, tasks=tasks) for tasks in (10, None)]

    assert "10 tasks of train tried, 2 not tried; all 8 tasks of test tried" in fine.findings[0].text
    assert "all 12 tasks of train tried" in everything.findings[0].text


class Asking(Fine):
    """Its oracle learns the numbers from the simulated user."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return "Help the user."

    @staticmethod
    def oracle(messages, task, rng):
        said = [message["content"] for message in messages if message["role"] == "user"]
        if len(said) == 1:
            return "Which numbers?"
        return f"It is {sum(map(int, said[1].split()))}"


class TellingTheUser(Asking):
    """Tells in its first observation what the model should learn from the user."""

    def start(self, x: int, y: int) -> str:
        super().start(x, y)
        return f"Help the user. It is {x + y}"


def telling(messages, task):
    return f"{task['x']} {task['y']}" if len(messages) == 2 else UserTurn(done=True)


@pytest.mark.parametrize(("env", "leaks"), [(Asking, False), (TellingTheUser, True)])
async def test_the_simulated_user_takes_part_and_leaks_are_looked_for_where_it_talks(env, leaks):
    report = await checked(
        env, "play", "oracle", "leak", options={"max_turns": 4, "user": FunctionUser(telling)}
    )

    assert [one.name for one in report.problems] == ["leak"] * leaks, str(report)
    assert "with the simulated user" in report.findings[0].text


async def test_an_environment_without_a_last_text_is_not_said_to_lack_an_oracle():
    report = await checked(type("Served", (Fine,), {"ends_on_text": False}), "leak")

    assert "the model's text does not end an episode" in report.findings[0].text


async def test_one_cause_is_told_once_and_not_as_gymnasiums():
    report = await checked(type("Forgetful", (Timed,), {"step": lambda self, action: None}))

    assert [one.name for one in report.problems] == ["play"]
    assert "Forgetful.step() returned None" in report.problems[0].text
    assert "the same problem as in play" in next(one.text for one in report.findings if one.name == "gym")


def no_user(task):
    return None


def rows_of_the_module():
    return ROWS


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"user": FunctionUser(lambda messages, task: None)}, {"user": no_user}),
        ({"tasks": lambda: ROWS}, {"tasks": rows_of_the_module}),
    ],
)
async def test_what_the_recipe_advises_works(wrong, right):
    told, fine = [(await checked(Fine, "recipe", options=each)).findings[0].text for each in (wrong, right)]

    assert "at the top level of a module" in told
    assert "the specification survives JSON" in fine


class Squares(ToolEnv):
    """Is begun as often as it counts."""

    begun = 0

    def start(self, x, y):
        Squares.begun += 1
        return f"What is {x} squared?"

    def reward(self, answer, y):
        return float(answer == str(y))

    @staticmethod
    async def oracle(messages, task, rng):
        return str(task["y"])


async def test_a_slow_environment_is_checked_on_fewer_tasks_and_the_report_says_so(monkeypatch):
    report = await checked(Squares, "determinism", timeout_s=1e6)
    in_a_hurry = Subject(spec_of(Squares), 20, 1, 0, None, RunnerOptions(), RunLimits())
    in_a_hurry.began -= in_a_hurry.check_s

    text = await check_determinism(in_a_hurry)

    assert "would take too long" not in str(report)
    assert text.startswith("1 tasks played twice")
    assert "more would take too long" in text

    monkeypatch.setattr("agentenv.testing.checks.subject.SLOW_S", -1.0)
    Squares.begun = 0
    checks = ("play", "determinism", "oracle", "trivial", "cheats", "reuse", "isolation", "parallel", "leak")
    report = await checked(Squares, *checks, tasks=1)

    assert report.ok, str(report)
    assert "full marks (1) on 1 of 1 tasks" in str(report)
    assert Squares.begun <= 12, "33 if no play stood for others"


async def test_all_checks_of_an_environment_share_the_sandbox_that_it_names(monkeypatch):
    started, start = [], Pool.start

    async def counted(self):
        started.append(self)
        await start(self)

    monkeypatch.setattr(Pool, "start", counted)
    shared = ("play", "schema", "determinism", "trivial", "ends", "fuzz", "reuse", "isolation", "parallel")
    report = await check_env(
        "agentenv/PythonMath-v0", tasks=1, fuzz_calls=10, only=(*shared, "overflow", "leak", "runner")
    )

    assert report.ok, str(report)
    assert len(started) == 1


async def test_an_agent_with_a_loop_of_its_own_is_checked_as_far_as_it_can_be():
    class Silent(AgentEnv):
        def agent(self, url, task):
            return "42"

        def reward(self, answer):
            return 1.0

    report = await checked(Silent, rows=[{"q": "a"}, {"q": "b"}], fuzz_calls=1)

    told = {finding.name: finding for finding in report.findings}
    assert [one.name for one in report.problems] == ["runner"]
    assert "give its SDK the url as the base URL" in told["runner"].text
    assert told["play"].text == "its agent asks the model itself; see runner"
