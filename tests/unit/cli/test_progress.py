"""What an evaluation shows while it runs: a table on a terminal, lines elsewhere, the same figures in both."""

from __future__ import annotations

import io
import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

import agentenv as ae
from agentenv.cli import main
from agentenv.cli.dashboard import Dashboard
from agentenv.cli.phase import Phase, left_text, loading
from agentenv.cli.tally import ALMOST, Tally, waiting_text
from agentenv.core import EpisodeError, StopReason
from agentenv.envs import registry
from agentenv.runner import Waiting
from agentenv.runs.store import RunWriter, summarize
from agentenv.training import GRPOConfig
from helpers.sample_runs import episode

LINE = threading.Event()


class Held(ae.ToolEnv):
    """Begins when a line of progress said that the episode waits for the environment."""

    def start(self) -> str:
        assert LINE.wait(60)
        return "go"

    def reward(self) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(registry)
    LINE.clear()
    ae.register("progress/Held-v0", Held, tasks=[{"id": "a"}, {"id": "b"}], override=True)
    yield
    registry.clear()
    registry.update(before)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


def test_tally_has_tasks_speed_reward_and_interval():
    tally = Tally(2)
    lost = EpisodeError("env", "KeyError", "no price")
    for task, member, reward in [(0, 0, 1.0), (0, 1, 0.0), (1, 0, 1.0)]:
        tally.add(summarize(episode(task, member, reward=reward)))
    tally.add(summarize(episode(2, 0, stop=StopReason.ERROR, error=lost)))

    assert (tally.episodes, tally.tasks_done, tally.failed) == (4, 1, 1)
    assert "reward 0.667 [" in tally.facts()
    assert tally.facts().endswith("err 1")


def test_tokens_of_earlier_episodes_are_no_speed():
    tally = Tally(1)
    tally.add(summarize(episode(0, 0)), earlier=True)

    assert tally.tokens == 0
    assert tally.speed() == "0 tok/s"


def test_waits_are_counted_by_what_is_waited_for():
    waits = [Waiting("a", "engine", 3.2), Waiting("b", "tool", 9.0), Waiting("c", "engine", 0.1)]

    assert waiting_text(waits) == "engine 2 (3 s), tool 1 (9 s)"
    assert waiting_text([]) == ""


def test_a_line_says_what_episodes_wait_for_although_none_finishes(monkeypatch):
    lines: list[str] = []

    def note(text: str, **_: object) -> None:
        lines.append(text)
        if "waiting for env 2" in text:
            LINE.set()

    monkeypatch.setattr("agentenv.cli.progress.LINE_EVERY_S", 0.01)
    monkeypatch.setattr("agentenv.cli.tally.print", note, raising=False)

    assert run("eval", "progress/Held-v0", "-n", "2") == 0
    assert LINE.is_set()
    assert " 0 of 2 episodes  0 of 2 tasks" in next(line for line in lines if "waiting for env 2" in line)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_table_with_a_row_for_each_environment(monkeypatch):
    LINE.set()
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", screen)
    names = ("progress/Held-v0", "agentenv/Calculator-v0")

    assert run("eval", *names, "-n", "2", "-o", "concurrency=1") == 0
    shown = screen.getvalue()
    assert [word for word in (*names, "tasks", "95 %", "tok/s", "0/2") if word not in shown] == []
    assert "2/2" in shown


def test_a_training_says_between_two_steps_what_it_plays(tmp_path, capsys):
    def waiting() -> list[Waiting]:
        return [Waiting("a", "engine", 3.2)]

    with RunWriter.create("t", kind="train", runs_dir=tmp_path, run_id="t") as writer:
        writer.append(episode(9, 0))
        plan = SimpleNamespace(
            id="t",
            path=writer.path,
            envs={"shop/Math-v0": 1.0},
            resumed_step=2,
            terms=("40 tasks of the split train",),
            demos="none",
            checkpoint=None,
            waiting=waiting,
            sampled=lambda: 120,
            limits=ae.RunLimits(),
            config=GRPOConfig(
                model="m", max_steps=20, groups_per_step=4, num_generations=8, eval_temperature=0.0
            ),
        )
        board = Dashboard()
        with board:
            board.begin(plan)
            for member, reward in enumerate((1.0, 0.0)):
                writer.append(episode(0, member, reward=reward))
            writer.append(replace(episode(1, 0), group_id="held-out-2:order-0001"))
            line = board.line()
            board.step(3, {"reward": 0.5})
            after = board.line()

    assert line.startswith("step 3/20  2 episodes (32 a step)")
    assert "reward 0.500 [" in line
    assert line.endswith("  waiting for engine 1 (3 s)")
    assert after.startswith("step 4/20  0 episodes")
    assert "held-out" not in after
    shown = capsys.readouterr().out
    assert " resumed at step 2" in shown
    assert " terms of the reward: 40 tasks of the split train\n" in shown


def test_a_terminal_shows_what_a_training_plays_below_its_lines(tmp_path, monkeypatch):
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", screen)
    config = GRPOConfig(model="m", max_steps=2, groups_per_step=4, num_generations=8, eval_temperature=0.0)
    given = {"envs": {"shop/Math-v0": 1.0}, "resumed_step": 0, "demos": "none", "checkpoint": None}
    given |= {"terms": (), "sampled": lambda: 120, "limits": ae.RunLimits()}
    waits = [Waiting("a", "engine", 3.2)]

    with RunWriter.create("t", kind="train", runs_dir=tmp_path, run_id="t") as writer, Dashboard() as board:
        plan = SimpleNamespace(id="t", path=writer.path, waiting=lambda: waits, config=config, **given)
        board.begin(plan)
        writer.append(episode(0, 0))
        board.step(1, {"reward": 0.5})

    shown = screen.getvalue()
    assert "step 2/2  0 episodes (32 a step)" in shown
    assert "waiting for engine 1 (3 s)" in shown
    assert "step 1/2  reward 0.50" in shown


def test_a_training_shows_no_step_in_its_warm_up_and_after_its_last_step(tmp_path):
    with RunWriter.create("t", kind="train", runs_dir=tmp_path, run_id="t") as writer:
        config = GRPOConfig(
            model="m", max_steps=2, groups_per_step=4, num_generations=8, eval_temperature=0.0
        )
        plan = SimpleNamespace(
            id="t",
            path=writer.path,
            envs={"shop/Math-v0": 1.0},
            resumed_step=0,
            terms=("40 tasks of the split train",),
            waiting=None,
            sampled=lambda: 120,
            limits=ae.RunLimits(),
            demos="oracle",
            checkpoint=None,
            config=config,
        )
        board = Dashboard(model="m")
        with board:
            loading = board.line()
            board.begin(plan)
            writer.append(replace(episode(1, 0), group_id="demonstration:1"))
            begun = board.line()
            tell("loop.sft", "warm-up step %d of %d", 0, 8)
            tell("loop.sft", "warm-up step %d of %d: %.2f nats a token", 3, 8, 0.5)
            tell("learners.torch.passes", "update %d of %d passes", 1, 2)
            warming = board.line()
            tell("loop.sft", "warm-up step %d of %d: %.2f nats a token", 8, 8, 0.5)
            tell("loop.held_out", "held-out episodes: %d of %d are played", 0, 4)
            writer.append(replace(episode(2, 0), group_id="held-out-0"))
            scoring = board.line()
            board.scored({})
            writer.append(episode(0, 0))
            playing = board.line()
            tell("learners.torch.passes", "update %d of %d passes", 1, 2)
            updating = board.line()
            board.step(1, {"reward": 0.5, "step_time": 120.0})
            left = board.line()
            board.step(2, {"reward": 0.5})
            after = board.line()

    assert [line.partition("  ")[0] for line in (loading, begun, warming, updating)] == [
        "loading m",
        "loading m",
        "warm-up step 3 of 8",
        "update 1 of 2",
    ]
    assert " left" in warming
    assert scoring.startswith("1 of 4 held-out episodes  about ")
    assert playing.startswith("step 1/2  1 episodes")
    assert "run: about 2 min left" in left
    assert after == ""


def tell(module: str, text: str, *numbers: float) -> None:
    logging.getLogger(f"agentenv.training.{module}").info(text, *numbers)


def test_tokens_count_in_speed_and_bar_as_they_are_sampled():
    counts = iter((0, 0, 50, 200, 100_000, 100_000))
    tally = Tally(1, sampled=lambda: next(counts))
    shares = [tally.phase("play", 8, 4, 100.0).share for _ in range(4)]

    assert shares == [0.0, 0.5 / 8, 2 / 8, 4 * ALMOST / 8]
    assert tally.speed() != "0 tok/s"


def test_short_episodes_that_finish_first_do_not_shorten_the_estimate():
    counts = iter((0, 200))
    tally = Tally(1, sampled=lambda: next(counts))
    tally.add(replace(summarize(episode(0, 0)), sampled_tokens=20))

    assert tally.phase("play", 4, 4, 120.0).share == (1 + 180 / 120) / 4


def test_a_loading_ends_about_when_the_last_one_did(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("agentenv.cli.phase.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def at(phase, seconds):
        clock[0] = phase.began + seconds
        return phase.line()

    first = loading("smollm2")
    assert at(first, 12) == "loading smollm2  12 s"
    first.keep()
    again = loading("smollm2")
    assert [at(again, 3), at(again, 30)] == ["loading smollm2  about 9 s left", "loading smollm2  30 s"]
    again.at("warm-up step", 1, 8)
    assert "warm-up step 1 of 8" in again.line()
    assert loading("another").usual_s == 0.0


def test_a_phase_estimates_its_end_from_what_was_done_since_it_began(monkeypatch):
    monkeypatch.setattr("agentenv.cli.phase.time", SimpleNamespace(monotonic=lambda: 10.0))
    phase = Phase("play", 0.75, "", 0.0, share_before=0.5)

    assert phase.left() == "about 10 s left"
    assert [left_text(seconds) for seconds in (0, 240, 7_200)] == [
        "about 1 s left",
        "about 4 min left",
        "about 2.0 h left",
    ]
