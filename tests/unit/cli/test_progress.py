"""What an evaluation and a training show while they run: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

import agentenv as ae
from agentenv.cli.dashboard import Dashboard, held_out_lines, sparkline, step_line
from agentenv.cli.phase import Phase, left_text, loading
from agentenv.cli.tally import ALMOST, Tally, waiting_text
from agentenv.core import EpisodeError, StopReason
from agentenv.runner import Waiting
from agentenv.runs.store import RunWriter, summarize
from agentenv.training import GRPOConfig
from helpers.sample_runs import episode
from scenes import Go, registered, spec_of

LINE = threading.Event()


class Held(Go):
    """Begins when a line of progress said that the episode waits for the environment."""

    def start(self) -> str:
        assert LINE.wait(60)
        return "go"


@pytest.fixture
def held():
    LINE.clear()
    with registered(spec_of(Held, [{"id": "a"}, {"id": "b"}])) as name:
        yield name


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch) -> Terminal:
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    return screen


@pytest.fixture
def writer(tmp_path):
    with RunWriter.create("t", kind="train", runs_dir=tmp_path, run_id="t") as writer:
        yield writer


def plan_of(writer: RunWriter, **values: object) -> SimpleNamespace:
    """What a dashboard reads of a training of which an episode waits for its engine."""
    sizes = {"groups_per_step": 4, "num_generations": 8, "max_steps": values.pop("max_steps", 2)}
    given = {
        "id": "t",
        "path": writer.path,
        "envs": {"shop/Math-v0": 1.0},
        "resumed_step": 0,
        "terms": (),
        "demos": "none",
        "checkpoint": None,
        "waiting": lambda: [Waiting("a", "engine", 3.2)],
        "sampled": lambda: 120,
        "limits": ae.RunLimits(),
        "config": GRPOConfig(model="m", eval_temperature=0.0, **sizes),
    }
    return SimpleNamespace(**{**given, **values})


def test_tally_has_tasks_speed_reward_and_interval():
    tally = Tally(2)
    lost = EpisodeError("env", "KeyError", "no price")
    for task, member, reward in [(0, 0, 1.0), (0, 1, 0.0), (1, 0, 1.0)]:
        tally.add(summarize(episode(task, member, reward=reward)))
    tally.add(summarize(episode(2, 0, stop=StopReason.ERROR, error=lost)))
    waits = [Waiting("a", "engine", 3.2), Waiting("b", "tool", 9.0), Waiting("c", "engine", 0.1)]

    assert (tally.episodes, tally.tasks_done, tally.failed) == (4, 1, 1)
    assert "reward 0.667 [" in tally.facts()
    assert tally.facts().endswith("err 1")
    assert [waiting_text(waits), waiting_text([])] == ["engine 2 (3 s), tool 1 (9 s)", ""]


def test_tokens_count_in_speed_and_bar_as_they_are_sampled():
    counts = iter((0, 0, 50, 200, 100_000, 100_000))
    tally = Tally(1, sampled=lambda: next(counts))
    shares = [tally.phase("play", 8, 4, 100.0).share for _ in range(4)]
    assert shares == [0.0, 0.5 / 8, 2 / 8, 4 * ALMOST / 8]
    assert tally.speed() != "0 tok/s"

    counts = iter((0, 200))
    tally = Tally(1, sampled=lambda: next(counts))
    tally.add(replace(summarize(episode(0, 0)), sampled_tokens=20))  # a short one finishes first
    assert tally.phase("play", 4, 4, 120.0).share == (1 + 180 / 120) / 4

    tally = Tally(1)
    tally.add(summarize(episode(0, 0)), earlier=True)
    assert (tally.tokens, tally.speed()) == (0, "0 tok/s")


def test_a_line_says_what_episodes_wait_for_although_none_finishes(held, monkeypatch, command):
    lines: list[str] = []

    def note(text: str, **_: object) -> None:
        lines.append(text)
        if "waiting for env 2" in text:
            LINE.set()

    monkeypatch.setattr("agentenv.cli.progress.LINE_EVERY_S", 0.01)
    monkeypatch.setattr("agentenv.cli.tally.print", note, raising=False)

    assert command("eval", held, "-n", "2").code == 0
    assert " 0 of 2 episodes  0 of 2 tasks" in next(line for line in lines if "waiting for env 2" in line)


def test_a_terminal_shows_a_table_with_a_row_for_each_environment(held, screen, monkeypatch, command):
    LINE.set()
    monkeypatch.setattr("sys.stdout", screen)
    names = (held, "agentenv/Calculator-v0")

    assert command("eval", *names, "-n", "2", "-o", "concurrency=1").code == 0
    shown = screen.getvalue()
    assert [word for word in (*names, "tasks", "95 %", "tok/s", "0/2") if word not in shown] == []
    assert "2/2" in shown


def test_a_training_says_between_two_steps_what_it_plays(writer, capsys):
    writer.append(episode(9, 0))
    terms = ("40 tasks of the split train",)
    with Dashboard() as board:
        board.begin(plan_of(writer, max_steps=20, resumed_step=2, terms=terms))
        for member, reward in enumerate((1.0, 0.0)):
            writer.append(episode(0, member, reward=reward))
        writer.append(replace(episode(1, 0), group_id="held-out-2:order-0001"))
        line = board.line()
        board.step(3, {"reward": 0.5})
        after = board.line()
    shown = capsys.readouterr().out

    assert line.startswith("step 3/20  2 episodes (32 a step)")
    assert "reward 0.500 [" in line
    assert line.endswith("  waiting for engine 1 (3 s)")
    assert after.startswith("step 4/20  0 episodes")
    assert "held-out" not in after
    assert " resumed at step 2" in shown
    assert " terms of the reward: 40 tasks of the split train\n" in shown


def test_a_terminal_shows_what_a_training_plays_below_its_lines(writer, screen, monkeypatch):
    monkeypatch.setattr("sys.stdout", screen)
    with Dashboard() as board:
        board.begin(plan_of(writer))
        writer.append(episode(0, 0))
        board.step(1, {"reward": 0.5})

    shown = screen.getvalue()
    assert "step 2/2  0 episodes (32 a step)" in shown
    assert "waiting for engine 1 (3 s)" in shown
    assert "step 1/2  reward 0.50" in shown


def tell(module: str, text: str, *numbers: float) -> None:
    logging.getLogger(f"agentenv.training.{module}").info(text, *numbers)


def test_a_training_shows_no_step_in_its_warm_up_and_after_its_last_step(writer):
    with Dashboard(model="m") as board:
        lines = [board.line()]
        board.begin(plan_of(writer, demos="oracle", waiting=None))
        writer.append(replace(episode(1, 0), group_id="demonstration:1"))
        lines.append(board.line())
        tell("loop.sft", "warm-up step %d of %d", 0, 8)
        tell("loop.sft", "warm-up step %d of %d: %.2f nats a token", 3, 8, 0.5)
        tell("learners.torch.passes", "update %d of %d passes", 1, 2)
        lines.append(warming := board.line())
        tell("loop.sft", "warm-up step %d of %d: %.2f nats a token", 8, 8, 0.5)
        tell("loop.held_out", "held-out episodes: %d of %d are played", 0, 4)
        writer.append(replace(episode(2, 0), group_id="held-out-0"))
        lines.append(scoring := board.line())
        board.scored({})
        writer.append(episode(0, 0))
        lines.append(board.line())
        tell("learners.torch.passes", "update %d of %d passes", 1, 2)
        lines.append(board.line())
        board.step(1, {"reward": 0.5, "step_time": 120.0})
        left = board.line()
        board.step(2, {"reward": 0.5})
        lines.append(board.line())

    assert [line.partition("  ")[0] for line in lines] == [
        *("loading m", "loading m", "warm-up step 3 of 8", "1 of 4 held-out episodes"),
        *("step 1/2", "update 1 of 2", ""),
    ]
    assert " left" in warming
    assert "  about " in scoring
    assert "run: about 2 min left" in left


def test_a_loading_ends_about_when_the_last_one_did(tmp_path, monkeypatch):
    clock = [10.0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("agentenv.cli.phase.time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert Phase("play", 0.75, "", 0.0, share_before=0.5).left() == "about 10 s left"
    assert Phase("play", 0.001, "", 0.0).left() == ""  # "about 3 h": one pass of many says nothing
    left = [left_text(seconds) for seconds in (0, 240, 7_200)]
    assert left == ["about 1 s left", "about 4 min left", "about 2.0 h left"]

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


SCORES = {"success": 0.5, "success_low": 0.25, "success_high": 0.75, "tasks": 8.0, "pass@4": 0.875}


def test_the_held_out_success_of_each_environment_has_a_line(capsys):
    one = {f"eval/{name}": value for name, value in SCORES.items()}
    envs = ("demo/A-v0", "demo/B-v0")
    two = {f"eval/{env}/{name}": value for env in envs for name, value in SCORES.items()}
    before = {**one, "eval/success": 0.25, "eval/success_low": 0.0, "eval/success_high": 0.5}
    line = "0.500 [0.250, 0.750] on 8 tasks, greedy, pass@4 0.875"
    whole = f"0.250 [0.000, 0.500] before the first step, {line.replace('750] on', '750] after the last on')}"

    assert held_out_lines(one, "greedy") == [f"held-out success {line}"]
    assert held_out_lines(two, "greedy") == [f"held-out success of {env} {line}" for env in envs]
    assert held_out_lines({"reward": 1.0}, "greedy") == []
    assert held_out_lines(one, "greedy", before) == [f"held-out success {whole}"]

    board = Dashboard()
    board.scored(one)
    board.step(1, {"reward": 0.25})
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(" before the first step: held-out success 0.500")
    assert second.startswith("step 1/0  reward 0.25")


def test_a_line_of_a_step_has_a_dash_for_what_is_missing_and_tells_of_servers_that_failed():
    well = {"reward": 0.25, "grad_norm": 0.0, "servers/used": 2.0, "servers/failures": 0.0}
    line = step_line(1, 20, [well])

    assert line.startswith("step  1/20  reward 0.25")
    assert "spread -  entropy -  clip -  grad 0  gap max -  trained -" in line
    assert "servers" not in line
    assert step_line(1, 20, [{**well, "servers/failures": 3.0}]).endswith("servers 2, 3 failures")


@pytest.mark.parametrize(
    ("values", "shown"), [([0.0, 0.5, 1.0], "▁▅█"), ([1.0, 1.0], "▁▁"), ([float("nan")], "")]
)
def test_sparkline_spans_least_to_largest(values, shown):
    assert sparkline(values) == shown
