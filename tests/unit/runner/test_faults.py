"""Whatever outside code raises, wherever it does: one failed episode with its boundary, and the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Annotated

import pytest
from pydantic import BeforeValidator

from agentenv.core import StopReason
from agentenv.engine import ChatEngine, ScriptedEngine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.envs.rewards import GroupReward, Judge, score_group
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Condenser, Runner, RunnerOptions, User, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Rude(BaseException):
    """Not an `Exception`."""


class Worse(BaseException):
    def __str__(self) -> str:
        raise Rude("not even that")


class Slippery(str):
    __slots__ = ()

    def __getitem__(self, key):
        raise RuntimeError("a str that breaks when it is cut")


class SlipperyError(Exception):
    def __str__(self) -> str:
        return Slippery("boom")


class Noted(Exception):
    @property
    def __notes__(self):
        raise RuntimeError("no notes")


def cancel_the_caller():
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    raise asyncio.CancelledError


def raising(make):
    def fault():
        raise make()

    return fault


FAULTS = {
    "exception": raising(lambda: ValueError("boom")),
    "unprintable": raising(Unprintable),
    "rude": raising(Rude),
    "unprintable and rude": raising(Worse),
    "slippery text": raising(SlipperyError),
    "broken notes": raising(Noted),
    "cancelled": raising(asyncio.CancelledError),
    "generator exit": raising(GeneratorExit),
    "system exit": raising(lambda: SystemExit(3)),
    "stop iteration": raising(StopIteration),
    "stop async iteration": raising(StopAsyncIteration),
    "timeout": raising(TimeoutError),
    "group": raising(lambda: BaseExceptionGroup("several", [Rude(), ValueError()])),
    "recursion": raising(RecursionError),
    "memory": raising(MemoryError),
    "no message": raising(KeyError),
}


checking: list[tuple[str, str]] = []
"""Place and fault of the case that is played, for code that gets no arguments."""


def checked(value: object) -> object:
    if checking and checking[-1][0] == "argument":
        FAULTS[checking[-1][1]]()
    return value


Size = Annotated[int, BeforeValidator(checked)]


class Result:
    """What a tool returns; it breaks when it is written as text."""

    def __init__(self, place: str, fault: str) -> None:
        self.place, self.fault = place, fault

    def __repr__(self) -> str:
        if self.place == "result":
            FAULTS[self.fault]()
        return "done"

    __str__ = __repr__


class Watched(ToolEnv):
    """Breaks where and how its arguments say."""

    def __init__(self, place: str = "", fault: str = "") -> None:
        self.place, self.fault = place, fault
        self.breaks("constructor")

    def breaks(self, place: str) -> None:
        if self.place == place:
            FAULTS[self.fault]()

    def start(self) -> str:
        self.breaks("start")
        return "go"

    @tool
    def work(self, size: Size) -> Result:
        "Do it."
        self.breaks("tool")
        return Result(self.place, self.fault)

    def is_done(self) -> bool:
        self.breaks("is_done")
        return False

    def reward(self) -> float:
        self.breaks("reward")
        return 1.0

    def close(self) -> None:
        self.breaks("close")


class AsyncWatched(Watched):
    """The same with methods that run on the event loop."""

    async def start(self) -> str:
        self.breaks("start")
        return "go"

    @tool
    async def work(self, size: Size) -> Result:
        "Do it."
        self.breaks("tool")
        return Result(self.place, self.fault)

    async def is_done(self) -> bool:
        self.breaks("is_done")
        return False

    async def reward(self) -> float:
        self.breaks("reward")
        return 1.0

    async def close(self) -> None:
        self.breaks("close")


class Stepping(Watched):
    async def reset(self, *, seed=None, options=None):
        self.breaks("reset")
        return await super().reset(seed=seed, options=options)

    async def step(self, action):
        self.breaks("step")
        return await super().step(action)

    async def finish(self, stop_reason):
        self.breaks("finish")
        return 1.0

    @property
    def tool_schemas(self):
        self.breaks("tool_schemas")
        return super().tool_schemas

    async def shutdown(self):
        self.breaks("shutdown")


class Talker(User):
    def __init__(self, place: str, fault: str) -> None:
        self.place, self.fault = place, fault

    def breaks(self, place: str) -> None:
        if self.place == place:
            FAULTS[self.fault]()

    def fresh(self):
        self.breaks("user.fresh")
        return super().fresh()

    async def start(self, task, *, seed):
        self.breaks("user.start")
        return

    async def respond(self, messages):
        self.breaks("user.respond")
        return UserTurn("bye", done=True)

    async def close(self) -> None:
        self.breaks("user.close")


class Shortening(Condenser):
    def __init__(self, place: str, fault: str) -> None:
        super().__init__(at=0.01)
        self.place, self.fault = place, fault

    def breaks(self, place: str) -> None:
        if self.place == place:
            FAULTS[self.fault]()

    def fresh(self):
        self.breaks("condenser.fresh")
        return super().fresh()

    def due(self, used_tokens, max_tokens):
        self.breaks("condenser.due")
        return True

    async def shorten(self, messages):
        self.breaks("condenser.shorten")
        return


class Pool:
    def __init__(self, place: str, fault: str) -> None:
        self.place, self.fault = place, fault

    @contextlib.asynccontextmanager
    async def lease(self):
        if self.place == "sandbox.take":
            FAULTS[self.fault]()
        yield SimpleNamespace()
        if self.place == "sandbox.give_back":
            FAULTS[self.fault]()


class Engine(ScriptedEngine):
    """Two tool calls at once, then text; breaks where it is told to."""

    max_context_tokens = 100_000

    def __init__(self, place: str, fault: str) -> None:
        super().__init__(work_then_text, tokenizer=TOKENIZER)
        self.place, self.fault = place, fault

    async def generate(self, *args, **kwargs):
        if self.place == "engine.generate":
            FAULTS[self.fault]()
        return await super().generate(*args, **kwargs)

    async def release(self, session_id):
        if self.place == "engine.release":
            FAULTS[self.fault]()
        await super().release(session_id)


class Critic(ChatEngine):
    """A judge's model."""

    name = "critic"
    max_context_tokens = None

    def __init__(self, fault: str) -> None:
        self.fault = fault

    async def chat(self, messages, tools, sampling, *, deadline_s=None):
        FAULTS[self.fault]()


def work_then_text(request):
    return tool_call("work", size=1) + tool_call("work", size=1) if request.turn == 0 else "done"


ENV_PLACES = ["constructor", "start", "is_done", "reward"]
ODD_PLACES = ["reset", "step", "finish", "tool_schemas"]
OF_TOOLS = ["tool", "argument", "result"]
CLOSING = ["user.close", "sandbox.give_back", "engine.release"]
BOUNDARY = {
    "reward": "reward",
    "finish": "reward",
    "reward function": "reward",
    "score": "reward",
    "judge": "reward",
    "user.chosen": "user",
    "user.fresh": "user",
    "user.start": "user",
    "user.respond": "user",
    "condenser.fresh": "render",
    "condenser.due": "render",
    "condenser.shorten": "engine",
    "sandbox.take": "sandbox",
    "engine.generate": "engine",
}
CASES = [
    *((Watched, place) for place in [*ENV_PLACES, *OF_TOOLS, "close"]),
    *((AsyncWatched, place) for place in [*ENV_PLACES, *OF_TOOLS, "close"]),
    *((Stepping, place) for place in [*ODD_PLACES, "shutdown"]),
    *((Watched, place) for place in [*BOUNDARY, *CLOSING] if place not in ENV_PLACES + ODD_PLACES),
]


async def play(entry: type[ToolEnv], place: str, fault: str) -> tuple[list, Runner]:
    """Play a group of two."""

    def breaks(where: str) -> None:
        if place == where:
            FAULTS[fault]()

    def part() -> float:
        breaks("reward function")
        return 0.0

    async def score(record, env, task):
        breaks("score")
        return 0.0, {}

    def choose(task):
        breaks("user.chosen")
        return Talker(place, fault) if place.startswith("user.") else None

    checking.append((place, fault))
    judge = [Judge(Critic(fault), "{answer}")] if place == "judge" else []
    spec = EnvSpec.of(
        "test/Faults-v0",
        entry,
        rewards=[part, *judge],
        user=choose if place.startswith("user.") else None,
        kwargs={"place": place, "fault": fault},
    )
    runner = Runner(
        Engine(place, fault),
        RENDERER,
        options=RunnerOptions(retries=0, concurrency=4),
        sandbox=Pool(place, fault) if place.startswith("sandbox.") else None,
        condenser=Shortening(place, fault) if place.startswith("condenser.") else None,
    )
    return [group async for group in runner.run_groups(spec, [{"id": "a"}], 2, score=score)], runner


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("entry", "place"), CASES, ids=lambda part: getattr(part, "__name__", part))
async def test_a_fault_of_outside_code_is_one_failed_episode_each(entry, place, fault):
    groups, runner = await play(entry, place, fault)

    (group,) = groups
    ledger = runner.ledger
    assert ledger.balanced
    assert (ledger.submitted, ledger.cancelled, ledger.in_flight, len(group)) == (2, 0, 0, 2)
    assert sum(ledger.outcomes.values()) == 2
    if place in [*CLOSING, *OF_TOOLS, "close", "shutdown"]:
        ended = StopReason.USER_DONE if place.startswith("user.") else StopReason.FINAL_ANSWER
        assert ledger.outcomes == {ended: 2}
        broken = [result.is_error for one in group for result in one.turns[0].tool_results]
        assert broken == [place in OF_TOOLS] * 4
    else:
        assert [one.error.boundary for one in group] == [BOUNDARY.get(place, "env")] * 2
        assert all(one.stop_reason.failed and one.reward is None for one in group)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_of_a_group_reward_fails_the_members_that_it_scores(fault):
    (group,), _ = await play(Watched, "", "")

    def compare(trajectories):
        FAULTS[fault]()

    scored = await score_group(group, [GroupReward(compare)])

    assert [(one.error.boundary, one.stop_reason, one.reward) for one in scored] == [
        ("reward", StopReason.ERROR, None)
    ] * 2


@pytest.mark.parametrize(
    "place", ["start", "is_done", "reward", "close", "tool", "user.start", "user.respond"]
)
async def test_code_that_cancels_its_caller_is_one_failed_episode_each(place, monkeypatch):
    monkeypatch.setitem(FAULTS, "cancels", cancel_the_caller)

    groups, runner = await play(AsyncWatched, place, "cancels")

    (group,) = groups
    assert (len(group), runner.ledger.cancelled) == (2, 0)
    assert {one.stop_reason.failed for one in group} == {place not in {"close", "tool"}}


@pytest.mark.parametrize("entry", [Watched, AsyncWatched])
async def test_a_constructor_that_cancels_its_caller_is_one_failed_episode_each(entry, monkeypatch):
    monkeypatch.setitem(FAULTS, "cancels", cancel_the_caller)

    groups, runner = await play(entry, "constructor", "cancels")

    assert [one.error.boundary for one in groups[0]] == ["env"] * 2
    assert runner.ledger.outcomes == {StopReason.ERROR: 2}


@pytest.mark.parametrize("place", ["constructor", "start", "user.respond"])
def test_an_interrupt_ends_the_run(place, monkeypatch):
    """Python raises Ctrl-C in the main thread, where this loop runs."""
    monkeypatch.setitem(FAULTS, "interrupt", raising(KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(play(AsyncWatched, place, "interrupt"))


@pytest.mark.parametrize("place", ["constructor", "start", "reward", "close", "user.respond", "argument"])
def test_an_interrupt_that_code_raises_in_another_thread_is_a_failure_like_any_other(place, monkeypatch):
    monkeypatch.setitem(FAULTS, "interrupt", raising(KeyboardInterrupt))

    with ThreadPoolExecutor(1) as thread:
        groups, runner = thread.submit(lambda: asyncio.run(play(AsyncWatched, place, "interrupt"))).result()

    assert (len(groups[0]), runner.ledger.cancelled) == (2, 0)
    assert {one.stop_reason.failed for one in groups[0]} == {place not in {"close", "argument"}}
