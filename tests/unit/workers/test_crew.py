"""The crew's rules, on workers of this process that die when told to."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentenv.core import AgentEnvError, RunLimits, UsageError
from agentenv.core.collector import THRESHOLDS
from agentenv.core.trajectory import StopReason
from agentenv.engine import Completion, Features, Sampling, load_engine
from agentenv.engine.scripted import ScriptedEngine
from agentenv.envs import EnvSpec
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Job, Runner
from agentenv.testing import tool_call
from agentenv.workers import Crew, EpisodeWorker, Order, Played, Recipe, WorkerLost
from agentenv.workers.crew import MAX_HANGING
from agentenv.workers.episode_worker import OrderKey, StageRecipe
from agentenv.workers.silence import _longest
from agentenv.workers.worker import ClusterLost
from helpers.deadly import Deadly
from helpers.waiting import let_others_run, until
from helpers.worker_runs import recipe_of

STOP = Renderer(byte_tokenizer()).stop_token_ids[0]
SPEC = EnvSpec.of("helpers/InProcess-v0", Deadly, tasks=[{"x": x} for x in range(40)])


class Here:
    """A worker of this process; `dies_of` decides which episodes end it."""

    def __init__(self, recipe: str, name: str, dies_of: Callable[[str, int], bool]) -> None:
        self.name, self._dies_of = name, dies_of
        self._worker = EpisodeWorker(recipe, name)
        self._dead = asyncio.Event()
        self.orders: list[tuple[str, int]] = []
        self.servers: list[tuple[str, int | None]] = []
        self.closed = False
        self.version = 0

    async def start(self) -> None:
        await self._worker.__aenter__()

    async def play(self, order: Order) -> Played:
        self.orders.append((order.job.task_id, order.member))
        self.servers.append((order.job.task_id, order.server))
        if self._dies_of(order.job.task_id, len(self.orders)):
            self._dead.set()
        playing = asyncio.ensure_future(self._worker.play(len(self.orders), order))
        died = asyncio.ensure_future(self._dead.wait())
        await asyncio.wait({playing, died}, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if self._dead.is_set():
            playing.cancel()
            raise WorkerLost(f"{self.name} died")
        played = playing.result()
        assert played is not None
        return played

    async def expect_weights(self, version: int, run: str) -> None:
        self.version = version

    async def stats(self) -> dict[str, Any]:
        return self._worker.stats()

    async def turns(self) -> dict[OrderKey, dict[str, Completion]]:
        return self._worker.turns()

    def kill(self, why: str) -> None:
        self._dead.set()

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self._worker.__aexit__()


class Hired:
    """Makes workers of this process and remembers them."""

    def __init__(self, dies_of: Callable[[str, int], bool] = lambda task, number: False) -> None:
        self.recipe = recipe_of([SPEC]).to_json()
        self.dies_of = dies_of
        self.workers: list[Here] = []
        self.beside: list[str] = []

    def __call__(self, name: str, beside: bool) -> Here:
        self.workers.append(Here(self.recipe, name, self.dies_of))
        self.beside += [name] * beside
        return self.workers[-1]


def once_at(episode: int) -> Callable[[str, int], bool]:
    """Let the first worker that begins so many episodes die of the last of them."""
    deaths = iter([True])
    return lambda task, number: number == episode and next(deaths, False)


def runner(crew: Crew | None = None) -> Runner:
    return Runner(
        load_engine("random").engine, Renderer(byte_tokenizer()), RunLimits(max_turns=3), elsewhere=crew
    )


async def played(crew: Crew | None, tasks: int = 12) -> dict[str, Any]:
    groups = runner(crew).run_groups(SPEC, SPEC.task_set().take(tasks))
    return {group.group_id: group[0] async for group in groups}


def marks(directory: Path) -> set[str]:
    """Return what the environment has noted so far."""
    return {path.name.partition("-")[0] for path in directory.iterdir()}


def same(ours: Any, theirs: Any) -> bool:
    return ours.sequences == theirs.sequences and ours.reward == theirs.reward and ours.seed == theirs.seed


def _stay(_: Recipe) -> None:
    """Keep the directory."""


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are in this process, so the recipe must not change its directory."""
    monkeypatch.setattr(Recipe, "enter_directory", _stay)


async def test_a_crew_plays_the_episodes_of_one_process():
    alone = await played(None)
    hired = Hired()

    async with Crew(hired, 3, [SPEC]) as crew:
        together = await played(crew)

    assert together.keys() == alone.keys()
    assert all(same(together[key], alone[key]) for key in alone)
    assert [len(worker.orders) for worker in hired.workers] == [4, 4, 4]
    assert all(worker.closed for worker in hired.workers)


async def test_what_a_dead_worker_had_is_played_again_and_ends_the_same_and_is_counted():
    alone = await played(None)
    told: list[Any] = []

    async with Crew(hired := Hired(once_at(2)), 2, [SPEC], told.append) as crew:
        await crew.expect_weights(7)
        player = runner(crew)
        groups = [group async for group in player.run_groups(SPEC, SPEC.task_set().take(12))]
        await until(lambda: crew.summary().startswith("2/2") and hired.workers[2].version)
        summary = crew.summary()

    together = {group.group_id: group[0] for group in groups}
    assert all(same(together[key], alone[key]) for key in alone)
    assert (crew.deaths, crew.lost) == (1, crew.replayed)
    assert crew.replayed >= 1
    assert summary == f"2/2 workers, 1 died, {crew.replayed} episodes played again"
    assert [(worker.name, worker.version) for worker in hired.workers] == [("w1", 7), ("w2", 7), ("w3", 7)]
    ledger = player.ledger
    assert (ledger.balanced, ledger.submitted, ledger.in_flight) == (True, 12, 0)
    driver, *workers = told[-1]  # told at the end at the latest
    assert (driver["worker"], driver["done"], driver["live"], driver["deaths"]) == ("driver", 12, 0, 1)
    assert driver["replayed"] == crew.replayed
    assert len(workers) == 2
    assert {"node", "pid", "rss_mb", "cpu_s", "lag_p99_s", "threads", "waits"} <= workers[0].keys()


async def test_a_long_episode_goes_on_after_its_worker_died(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentenv.runner.conversation.tokens.LONG_S", 0.0)
    monkeypatch.setattr("agentenv.workers.silence.ASK_EVERY_S", 0.01)
    asked: list[tuple[tuple[int, ...], Sampling]] = []
    go_on = asyncio.Event()

    async def generate(
        self: ScriptedEngine, prompt_ids: Sequence[int], sampling: Sampling, **_: Any
    ) -> Completion:
        asked.append((tuple(prompt_ids), sampling))
        if len(asked) == 3:
            await go_on.wait()
        # The same request is answered otherwise each time, as by new weights.
        ids = (*byte_tokenizer().encode(tool_call("near", number=len(asked))), STOP)
        return Completion(ids, (-0.1 * len(asked),) * len(ids), "stop", ((len(asked), 0, len(ids)),))

    monkeypatch.setattr(ScriptedEngine, "generate", generate)
    hired = Hired()
    hired.recipe = recipe_of([SPEC], "scripted:x", sampling=Sampling(seed=3)).to_json()
    async with Crew(hired, 1, [SPEC]) as crew:
        playing = asyncio.create_task(anext(runner(crew).run_groups(SPEC, SPEC.task_set().take(1))))
        await until(lambda: len(asked) == 3 and [len(turns) for turns in crew._turns.values()] == [2])
        hired.workers[0].kill("")
        (record,) = await playing

    assert len(asked) == 4  # the turn that was lost is asked for again, and no other
    assert asked[3] == asked[2]
    assert [span.weights_version for span in record.sequences[0].spans if span.source == "model"] == [1, 2, 4]
    assert [turn.tool_results[0].content for turn in record.turns[:2]] == ["1", "2"]
    assert (crew.kept, crew.replayed, crew._turns) == (2, 1, {})
    assert "1 episodes played again with 2 of their turns" in crew.summary()


async def test_the_turns_of_a_short_episode_stay_in_its_worker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentenv.workers.silence.ASK_EVERY_S", 0.0)
    told: list[object] = []
    turns = Here.turns

    async def tell(self: Here) -> dict[OrderKey, dict[str, Completion]]:
        told.append(found := await turns(self))
        return found

    monkeypatch.setattr(Here, "turns", tell)
    async with Crew(Hired(), 2, [SPEC]) as crew:
        await played(crew)

    assert told
    assert not any(told)


async def test_what_the_workers_spent_is_added_up(monkeypatch: pytest.MonkeyPatch):
    engine = type(load_engine("random").engine)
    metered = Features(metrics=lambda: {"spent/sampled_tokens": 5.0})
    monkeypatch.setattr(engine, "features", property(lambda self: metered))

    async with Crew(Hired(), 3, [SPEC]) as crew:
        await played(crew)

    assert crew.spent() == {"spent/sampled_tokens": 15.0}


async def test_the_crew_spreads_the_episodes_over_the_servers_and_a_replay_keeps_its_own():
    hired = Hired(once_at(2))

    async with Crew(hired, 2, [SPEC], num_servers=3) as crew:
        await played(crew)
        busy = list(crew.servers.episodes)

    chosen = [choice for worker in hired.workers for choice in worker.servers]
    assert len(chosen) == 12 + crew.replayed > 12
    assert len(set(chosen)) == 12, "a task has one server"
    assert [sum(server == number for _, server in set(chosen)) for number in range(3)] == [4, 4, 4]
    assert busy == [0, 0, 0]


async def test_an_episode_that_kills_every_worker_is_aborted_and_its_neighbours_are_not():
    alone = await played(None)
    poison = list(alone.values())[4].task_id
    hired = Hired(lambda task, number: task == poison)

    async with Crew(hired, 2, [SPEC]) as crew:
        together = await played(crew)

    bad = [record for record in together.values() if record.task_id == poison]
    good = {key: record for key, record in together.items() if record.task_id != poison}
    assert [(one.stop_reason, one.error.boundary) for one in bad] == [(StopReason.ABORTED, "worker")]
    assert bad[0].untrainable_reason
    assert bad[0].seed == next(one.seed for one in alone.values() if one.task_id == poison)
    assert len(good) == 11
    assert all(same(good[key], alone[key]) for key in good)
    assert crew.deaths == 3
    assert hired.beside  # the last attempt had a worker of its own


def starts_fail(monkeypatch: pytest.MonkeyPatch, which: Callable[[str], bool], error: Exception) -> None:
    """Let the start of some workers fail, by their names."""
    begin = Here.start

    async def start(self: Here) -> None:
        if which(self.name):
            raise error
        await begin(self)

    monkeypatch.setattr(Here, "start", start)


async def test_a_crew_that_cannot_be_replaced_says_so(monkeypatch: pytest.MonkeyPatch):
    hired = Hired(lambda task, number: True)
    starts_fail(monkeypatch, lambda name: name != "w1", UsageError("no memory is left"))

    with pytest.raises(AgentEnvError, match="cannot be replaced, after 3 attempts: no memory is left"):
        async with Crew(hired, 1, [SPEC]) as crew:
            await played(crew)


async def test_a_worker_that_cannot_open_the_run_ends_it_at_once(monkeypatch: pytest.MonkeyPatch):
    hired = Hired()
    starts_fail(monkeypatch, "w2".__eq__, UsageError("there is no module 'shop'"))

    with pytest.raises(UsageError, match="there is no module 'shop'"):
        async with Crew(hired, 3, [SPEC]):
            pass
    assert all(worker.closed for worker in hired.workers)


async def test_a_worker_in_which_threads_hang_is_replaced_and_ends_with_its_last_episode(
    monkeypatch: pytest.MonkeyPatch,
):
    alone = await played(None)
    hired, gate = Hired(), asyncio.Event()
    play = Here.play

    async def some_hang(self: Here, order: Order) -> Played:
        number = len(self.orders)
        done = await play(self, order)
        if self.name == "w1" and number == 1:
            return replace(done, hanging=MAX_HANGING)
        if self.name == "w1":
            await gate.wait()  # the last episodes of the worker end after those of all others
        return done

    monkeypatch.setattr(Here, "play", some_hang)

    async with Crew(hired, 2, [SPEC]) as crew:
        playing = asyncio.create_task(played(crew))
        await until(lambda: crew.done == 12 - 5 and crew.summary().startswith("2/2"))
        summary, rows, closed = crew.summary(), await crew.stats(), hired.workers[0].closed
        gate.set()
        together = await playing
        await until(lambda: hired.workers[0].closed)

    assert all(same(together[key], alone[key]) for key in alone)
    assert (crew.retired, crew.deaths, crew.replayed) == (1, 0, 0)
    assert summary == "2/2 workers, 1 replaced because of hung threads"
    assert [row["worker"] for row in rows] == ["w3", "w2", "w1"]
    assert not closed
    assert [len(worker.orders) for worker in hired.workers] == [6, 6, 0]


async def test_a_worker_in_which_threads_hang_may_die_all_the_same(monkeypatch: pytest.MonkeyPatch):
    alone = await played(None)
    hired = Hired(lambda task, number: number == 6 and task == "5")
    play = Here.play

    async def hangs(self: Here, order: Order) -> Played:
        return replace(await play(self, order), hanging=MAX_HANGING * (self.name == "w1"))

    monkeypatch.setattr(Here, "play", hangs)

    async with Crew(hired, 1, [SPEC]) as crew:
        together = await played(crew)

    assert all(same(together[key], alone[key]) for key in alone)
    assert crew.retired == 1


async def test_a_worker_that_dies_as_the_run_begins_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    starts_fail(monkeypatch, "w2".__eq__, WorkerLost("the node of w2 is gone"))

    async with Crew(hired := Hired(), 2, [SPEC]) as crew:
        together = await played(crew)

    assert len(together) == 12
    assert [worker.name for worker in hired.workers if worker.orders] == ["w1", "w3"]
    assert "the node of w2 is gone; another one is started" in caplog.text


async def test_a_worker_that_does_not_answer_is_told_to_be_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    told: list[Any] = []
    monkeypatch.setattr("agentenv.workers.reports.ANSWER_S", 0.0)
    monkeypatch.setattr(Here, "stats", lambda self: asyncio.Event().wait())

    async with Crew(Hired(), 1, [SPEC], told.append):
        pass

    _, row = told[-1]
    assert (row["worker"], row["silent"]) == ("w1", True)
    assert "worker w1 does not answer: its event loop is blocked" in caplog.text


async def test_a_report_that_cannot_be_written_ends_nothing(caplog: pytest.LogCaptureFixture):
    def fail(rows: object) -> None:
        raise OSError("the disk is full")

    async with Crew(Hired(), 1, [SPEC], fail) as crew:
        together = await played(crew)

    assert len(together) == 12
    assert "the disk is full" in caplog.text


async def test_a_user_that_is_an_object_and_another_environment_are_refused():
    async with Crew(Hired(), 1, [SPEC]) as crew:
        with pytest.raises(UsageError, match=r"runner\.score"):
            runner(crew).run_groups(SPEC, [{"x": 1}], score=lambda: 1.0)
        with pytest.raises(UsageError, match="do not know helpers/Other-v0"):
            runner(crew).run_groups(EnvSpec.of("helpers/Other-v0", Deadly), [{"x": 1}])


async def test_a_worker_ends_an_episode_that_is_cancelled_and_closes_its_environment(tmp_path: Path):
    spec = EnvSpec.of("helpers/Waiting-v0", Deadly, kwargs={"directory": str(tmp_path)})
    text = recipe_of([spec]).to_json()

    async with EpisodeWorker(text, "w1") as worker:
        stage = runner().stage(spec)
        job = next(iter(stage.jobs([{"x": -1, "kills": -1}])))
        playing = asyncio.ensure_future(worker.play(1, order_of(stage, job)))
        await until(lambda: marks(tmp_path))
        worker.cancel(1)
        ended = await playing
        await let_others_run()

    assert ended is None
    assert "closed" in marks(tmp_path)


async def test_a_worker_has_cycles_collected_as_rarely_as_a_run_in_process():
    text = recipe_of([SPEC]).to_json()
    before = gc.get_threshold()

    async with EpisodeWorker(text, "w1"):
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == before


def order_of(stage: Any, job: Job) -> Order:
    rules = stage.rules
    recipe = StageRecipe(0, rules.limits, rules.sampling, rules.done_policy)
    return Order(1, pickle.dumps(recipe), job, 0)


async def test_a_worker_that_answers_nothing_is_killed_and_its_episodes_are_played_again(
    monkeypatch: pytest.MonkeyPatch,
):
    good, stuck = Here.play, set[str]()

    async def blocked(self: Here) -> dict[OrderKey, dict[str, Completion]]:
        if self.name in stuck:
            await asyncio.Event().wait()
        return {}

    async def play(self: Here, order: Order) -> Played:
        if order.job.task["x"] != 3:
            return await good(self, order)
        stuck.add(self.name)
        await self._dead.wait()
        raise WorkerLost(f"{self.name} died")

    monkeypatch.setattr(Here, "turns", blocked)
    monkeypatch.setattr(Here, "play", play)
    monkeypatch.setattr("agentenv.workers.silence.GRACE_S", 0.01)
    monkeypatch.setattr("agentenv.workers.silence._longest", lambda limits: 0.01)
    async with Crew(Hired(), 2, [SPEC]) as crew:
        records = (await played(crew, 6)).values()

    assert {one.task["x"]: one.error.boundary for one in records if one.error} == {3: "worker"}
    assert len(records) == 6
    assert crew.deaths == 3


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ({}, 120),
        ({"tool_timeout_s": 4, "env_timeout_s": 5, "reward_timeout_s": 10}, 10),
        ({"episode_timeout_s": 60}, 60),
        ({"tool_timeout_s": None}, None),
        ({"tool_timeout_s": None, "episode_timeout_s": 60}, 60),
    ],
)
def test_how_long_a_worker_may_be_silent_follows_from_the_limits(limits, seconds):
    assert _longest(RunLimits(**limits)) == seconds


async def test_a_cluster_that_has_gone_ends_the_run_at_once_and_replaces_no_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    beside: list[str] = []

    class Beside:
        async def __aenter__(self) -> None:
            beside.append("open")

        async def __aexit__(self, *_: object) -> None:
            beside.append("closed")

    async def play(self: Here, order: Order) -> Played:
        raise ClusterLost("the head has gone")

    monkeypatch.setattr(Here, "play", play)
    with pytest.raises(ClusterLost, match="the head has gone"):
        async with Crew(hired := Hired(), 2, [SPEC], beside=Beside()) as crew:
            await played(crew)

    assert [worker.closed for worker in hired.workers] == [True, True]
    assert (crew.replayed, crew.deaths, beside) == (0, 0, ["open", "closed"])
    assert caplog.messages == []
