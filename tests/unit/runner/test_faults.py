"""Whatever outside code raises, wherever it does: one failed episode with its boundary, and the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BeforeValidator

from agentenv.core import TrajectoryGroup
from agentenv.engine import ScriptedEngine
from agentenv.envs import ToolEnv
from agentenv.envs.rewards import GroupReward, Judge, score_group
from agentenv.render import Renderer
from agentenv.runner import Condenser, User, UserTurn
from agentenv.runner.watchdog import Ledger
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import TOKENIZER, Chat, Go, groups_of, play, runner, spec_of


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


case: dict[str, str] = {}
"""Place and fault of the case that is played."""


def breaks(place: str) -> None:
    if case.get("place") == place:
        FAULTS[case["fault"]]()


def checked(value: object) -> object:
    breaks("argument")
    return value


Size = Annotated[int, BeforeValidator(checked)]


class Result:
    """What a tool returns; it breaks when it is written as text."""

    def __repr__(self) -> str:
        breaks("result")
        return "done"

    __str__ = __repr__


class Watched(ToolEnv):
    """Breaks where and how the case says."""

    def __init__(self) -> None:
        breaks("constructor")

    def start(self) -> str:
        breaks("start")
        return "go"

    @tool
    def work(self, size: Size) -> Result:
        "Do it."
        breaks("tool")
        return Result()

    def is_done(self) -> bool:
        breaks("is_done")
        return False

    def reward(self) -> float:
        breaks("reward")
        return 1.0

    def close(self) -> None:
        breaks("close")


class AsyncWatched(Watched):
    """The same with methods that run on the event loop."""

    async def start(self) -> str:
        return super().start()

    @tool
    async def work(self, size: Size) -> Result:
        "Do it."
        breaks("tool")
        return Result()

    async def is_done(self) -> bool:
        return super().is_done()

    async def reward(self) -> float:
        return super().reward()

    async def close(self) -> None:
        super().close()


class Stepping(Watched):
    async def reset(self, *, seed=None, options=None):
        breaks("reset")
        return await super().reset(seed=seed, options=options)

    async def step(self, action):
        breaks("step")
        return await super().step(action)

    async def finish(self, stop_reason):
        breaks("finish")
        return 1.0

    @property
    def tool_schemas(self):
        breaks("tool_schemas")
        return super().tool_schemas

    async def shutdown(self):
        breaks("shutdown")


class Talker(User):
    def fresh(self):
        breaks("user.fresh")
        return super().fresh()

    async def start(self, task, *, seed):
        breaks("user.start")

    async def respond(self, messages):
        breaks("user.respond")
        return UserTurn("bye", done=True)

    async def close(self) -> None:
        breaks("user.close")


class Shortening(Condenser):
    def fresh(self):
        breaks("condenser.fresh")
        return super().fresh()

    def due(self, used_tokens, max_tokens):
        breaks("condenser.due")
        return True

    async def shorten(self, messages):
        breaks("condenser.shorten")


class Parser(Renderer):
    def parse(self, token_ids):
        breaks("parser")
        return super().parse(token_ids)


class Pool:
    @contextlib.asynccontextmanager
    async def lease(self):
        breaks("sandbox.take")
        yield object()
        breaks("sandbox.give_back")


class Engine(ScriptedEngine):
    """Two tool calls at once, then text; breaks where it is told to."""

    max_context_tokens = 100_000

    async def generate(self, *args, **kwargs):
        breaks("engine.generate")
        return await super().generate(*args, **kwargs)

    async def release(self, session_id):
        breaks("engine.release")
        await super().release(session_id)


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
    "parser": "parser",
    "engine.generate": "engine",
}
CASES = [
    *((Watched, place) for place in [*ENV_PLACES, *OF_TOOLS, "close"]),
    *((AsyncWatched, place) for place in [*ENV_PLACES, *OF_TOOLS, "close"]),
    *((Stepping, place) for place in [*ODD_PLACES, "shutdown"]),
    *((Watched, place) for place in [*BOUNDARY, *CLOSING] if place not in ENV_PLACES + ODD_PLACES),
]


async def played(entry: type[ToolEnv], place: str, fault: str) -> tuple[TrajectoryGroup, Ledger]:
    """Play a group of two, and return it with the books of the runner."""

    def part() -> float:
        breaks("reward function")
        return 0.0

    async def score(record, env, task):
        breaks("score")
        return 0.0, {}

    def choose(task):
        breaks("user.chosen")
        return Talker() if place.startswith("user.") else None

    case.update(place=place, fault=fault)
    judge = [Judge(Chat(lambda _: FAULTS[fault]()), "{answer}")] if place == "judge" else []
    user = choose if place.startswith("user.") else None
    playing = runner(
        Engine(work_then_text, tokenizer=TOKENIZER),
        renderer=Parser(TOKENIZER),
        retries=0,
        concurrency=4,
        sandbox=Pool() if place.startswith("sandbox.") else None,
        condenser=Shortening(at=0.01) if place.startswith("condenser.") else None,
    )
    spec = spec_of(entry, rewards=[part, *judge], user=user)
    (group,) = await groups_of(playing, spec, [{"id": "a"}], 2, score=score)
    return group, playing.ledger


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("entry", "place"), CASES, ids=lambda part: getattr(part, "__name__", part))
async def test_a_fault_of_outside_code_is_one_failed_episode_each(entry, place, fault):
    group, ledger = await played(entry, place, fault)

    assert ledger.balanced
    assert (ledger.submitted, ledger.cancelled, ledger.in_flight, len(group)) == (2, 0, 0, 2)
    assert sum(ledger.outcomes.values()) == 2
    if place in [*CLOSING, *OF_TOOLS, "close", "shutdown"]:
        assert ledger.outcomes == {"user_done" if place.startswith("user.") else "final_answer": 2}
        broken = [result.is_error for one in group for result in one.turns[0].tool_results]
        assert broken == [place in OF_TOOLS] * 4
    else:
        assert [one.error.boundary for one in group] == [BOUNDARY.get(place, "env")] * 2
        assert all(one.stop_reason.failed and one.reward is None for one in group)


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.skipif(sys.platform != "linux", reason="UNTESTED: counts open files in /proc")
async def test_no_fault_leaves_a_task_or_an_open_file_behind():
    await played(Watched, "", "")
    files = open_files()

    for entry, place in CASES:
        await played(entry, place, "rude")

    assert len(asyncio.all_tasks()) == 1
    assert open_files() <= files


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_of_a_group_reward_fails_the_members_that_it_scores(fault):
    group, _ = await played(Watched, "", "")

    scored = await score_group(group, [GroupReward(lambda trajectories: FAULTS[fault]())])

    told = [(one.error.boundary, one.stop_reason, one.reward) for one in scored]
    assert told == [("reward", "error", None)] * 2


CANCELS = ["constructor", "start", "is_done", "reward", "close", "tool", "user.start", "user.respond"]


@pytest.mark.parametrize(
    ("entry", "place"), [(Watched, "constructor"), *((AsyncWatched, place) for place in CANCELS)]
)
async def test_code_that_cancels_its_caller_is_one_failed_episode_each(entry, place, monkeypatch):
    monkeypatch.setitem(FAULTS, "cancels", cancel_the_caller)

    group, ledger = await played(entry, place, "cancels")

    assert (len(group), ledger.cancelled) == (2, 0)
    assert {one.stop_reason.failed for one in group} == {place not in {"close", "tool"}}
    assert place != "constructor" or [one.error.boundary for one in group] == ["env"] * 2


async def test_a_close_that_awaits_what_it_cancelled_does_not_cancel_who_plays_one_episode():
    class Background(Go):
        async def start(self) -> str:
            self.background = asyncio.create_task(asyncio.Event().wait())
            return "go"

        async def close(self) -> None:
            self.background.cancel()
            await self.background

    assert (await play(Background())).stop_reason == "final_answer"


@pytest.mark.parametrize("place", ["constructor", "start", "user.respond"])
def test_an_interrupt_ends_the_run(place, monkeypatch):
    """Python raises Ctrl-C in the main thread, where this loop runs."""
    monkeypatch.setitem(FAULTS, "interrupt", raising(KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(played(AsyncWatched, place, "interrupt"))


@pytest.mark.parametrize("place", ["constructor", "start", "reward", "close", "user.respond", "argument"])
def test_an_interrupt_that_code_raises_in_another_thread_is_a_failure_like_any_other(place, monkeypatch):
    monkeypatch.setitem(FAULTS, "interrupt", raising(KeyboardInterrupt))

    with ThreadPoolExecutor(1) as thread:
        group, ledger = thread.submit(lambda: asyncio.run(played(AsyncWatched, place, "interrupt"))).result()

    assert (len(group), ledger.cancelled) == (2, 0)
    assert {one.stop_reason.failed for one in group} == {place not in {"close", "argument"}}
