"""`ae.train`: one call makes a run that can be viewed, stopped and resumed, as `agentenv train` does."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch

import agentenv as ae
from agentenv.cli import main
from agentenv.core import DependencyMissing, StoreError, TrainingFailed, UsageError
from agentenv.engine import TransformersEngine
from agentenv.engine.hf.batching import Batch
from agentenv.envs import EnvSpec
from agentenv.runs import find_run
from agentenv.runs.store import RunStatus
from agentenv.runs.view.data import run_data
from agentenv.training import GRPOConfig, GRPOTrainer
from agentenv.training.learners.torch import passes
from agentenv.training.learners.torch.learner import TorchLearner
from agentenv.training.learners.torch.world import World
from agentenv.training.loop import usable
from agentenv.training.loop.ending import save_what_is_whole
from agentenv.training.loop.shared_run import SharedRun
from agentenv.training.stop import stop
from helpers.frames import frames_of_ours
from scenes import Lengths, numbered, registered, saved_model
from scenes import trainer as trainer_by_hand


class Echo(Lengths):
    made: ClassVar[list[int]] = []

    def __init__(self, digits: int = 1) -> None:
        self.made.append(digits)


TASKS = {"train": [{"n": n} for n in range(4)], "test": [{"n": 9}]}


def echo(name: str = "test/Echo-v0") -> EnvSpec:
    return EnvSpec.of(name, Echo, tasks=TASKS)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Echo.made.clear()


def train(model: str = "", envs=None, *, settings=None, **options):
    quick = {"groups_per_step": 2, "learning_rate": 0.01, "save_steps": 1, "eval_on_start": False}
    settings = {**quick, **(settings or {})}
    options = {"steps": 2, "group_size": 2, **options}
    limits = {"max_turns": 1, "max_tokens_per_turn": 4}
    return ae.train(echo() if envs is None else envs, model, train=settings, limits=limits, **options)


def command(*words: str) -> int | str | None:
    """Run `agentenv train`; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    return ended.value.code


QUICK = ["-k", "2", "--demos", "none"]
QUICK += ["-o", "save_steps=1", "-o", "max_tokens_per_turn=4", "-o", "eval_on_start=false"]


def steps_of(run) -> list[int]:
    return [line["step"] for line in run.metrics()]


def checkpoints(run) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").glob("step-*"))


def test_a_training_names_the_parts_of_the_runner_and_resumes_with_them(model, tmp_path):
    (tmp_path / "scores.py").write_text("def bonus(trajectory):\n    return 5.0\n")
    condenser = {"name": "summarise", "at": 0.5}
    first = train(model, runner={"score": "scores.py:bonus", "condenser": condenser})
    plans = []
    again = train(resume=first.run.path, steps=3, on_start=plans.append)
    assert plans[0].runner.condenser == condenser
    assert len(again.run) == 12 + 2  # the held-out task was played at the end of each part
    assert {record.rewards["bonus"] for record in again.run} == {5.0}
    assert all("recall_block" in str(record.tools) for record in again.run)

    with pytest.raises(UsageError, match="did you mean 'bonus'"):
        train(model, runner={"score": "scores.py:bonuss"}, runs_dir="others")
    assert not (tmp_path / "others").exists()


def test_a_training_keeps_episodes_notes_metrics_and_checkpoints(model):
    started, stepped = [], []

    result = train(model, on_start=started.append, on_metrics=lambda step, metrics: stepped.append(step))

    assert (result.steps_done, stepped, result.interrupted) == (2, [1, 2], False)
    assert steps_of(result.run) == [1, 2]
    notes = result.run.annotations()
    assert (len(result.run), result.run.status) == (9, RunStatus.FINISHED)
    assert {note["step"] for note in notes.values() if "role" not in note} == {1, 2}
    held_out = [name for name, note in notes.items() if note.get("role") == "held-out"]
    assert [name.partition(":")[0] for name in held_out] == ["held-out-2"]
    assert result.run.vocabulary()
    assert result.checkpoint == result.run.path / "checkpoints" / "step-2"
    assert result.evaluation["eval/tasks"] == 1.0
    assert result.history[-1]["eval/reward"] == result.evaluation["eval/reward"]
    assert (started[0].id, started[0].resumed_step) == (result.run.id, 0)


def test_a_run_goes_on_from_its_last_checkpoint_with_its_settings_and_never_becomes_shorter(model):
    first = train(model, settings={"learning_rate": 0.02, "groups_per_step": 1}, seed=5)
    started = []

    again = train(resume="last", steps=3, seed=6, on_start=started.append)

    assert again.run.id == first.run.id
    assert steps_of(again.run) == [1, 2, 3]
    assert [line["tasks/met"] for line in again.run.metrics()] == [1, 2, 3]
    assert (again.steps_done, len(again.history), len(again.run)) == (3, 1, 8)
    plan = started[0]
    assert (plan.resumed_step, plan.config.seed, plan.config.optimizer.learning_rate) == (2, 5, 0.02)
    shorter = train(resume=first.run.path, steps=1)
    assert (shorter.steps_done, shorter.history) == (3, ())


@pytest.mark.parametrize(("words", "steps"), [((), 1), (("--steps", "2"), 2)])
def test_the_command_makes_a_resumed_run_longer_only_if_steps_are_typed(model, words, steps):
    with registered(echo("test/Recorded-v0")) as name:
        first = train(model, {name: 1.0}, steps=1)
        code = command("--resume", first.run.id, *words)

    assert not code
    assert len(ae.find_run(first.run.id).metrics()) == steps


def test_a_tracker_that_is_not_installed_is_told_before_a_run_is_made(model, monkeypatch):
    monkeypatch.setattr("agentenv.core.errors.find_spec", lambda name: None if name == "wandb" else object())

    with pytest.raises(DependencyMissing, match="needs wandb"):
        ae.train(echo(), model, steps=1, train={"report_to": "wandb"}, runs_dir="services")

    assert not Path("services").exists()


def test_arguments_win_over_the_trainers_options(model):
    config = GRPOConfig(max_steps=7, num_generations=3, groups_per_step=1)
    plans = []

    ae.train(echo(), model, steps=1, train=config, limits={"max_tokens_per_turn": 2}, on_start=plans.append)

    kept = plans[0].config
    assert (kept.max_steps, kept.sampling.num_generations, kept.sampling.groups_per_step) == (1, 3, 1)
    assert kept.output_dir == str(plans[0].path)
    assert "output_dir" not in find_run("last").info.config["train"]


def test_arguments_of_the_environment_reach_every_one_of_a_mixture_and_a_resumed_run(model):
    mixture = [(echo("test/One-v0"), 1.0), (echo("test/Two-v0"), 1.0)]

    train(model, mixture, env={"digits": 4}, settings={"groups_per_step": 4})
    assert set(Echo.made) == {4}
    Echo.made.clear()
    train(envs=mixture, resume="last", steps=3)

    assert set(Echo.made) == {4}


@pytest.mark.parametrize("changed", [{"kwargs": {"digits": 4}}, {"limits": ae.RunLimits(max_turns=1)}, None])
def test_a_run_is_not_resumed_by_id_where_its_environment_was_changed(model, changed):
    known = echo("test/Registered-v0")
    with registered(known):
        if changed is None:
            assert ae.train(resume=train(model, known).run.path, steps=3).steps_done == 3
        other = [known.id, known.id] if changed is None else replace(known, **changed)
        run = train(model, other).run.path
        with pytest.raises(UsageError, match=r"test/Registered-v0.*pass the same envs again"):
            ae.train(resume=run, steps=3)
        assert ae.train(other, resume=run, steps=3).steps_done == 3


def test_a_finished_training_keeps_its_model_without_being_asked(model):
    result = train(model, settings={"save_steps": 0})

    assert result.checkpoint == result.run.path / "checkpoints" / "step-2"
    assert checkpoints(result.run) == ["step-2"]
    assert ae.evaluate(echo(), f"hf:{result.checkpoint}", num_tasks=1).report.num_scored == 1


@pytest.fixture
def _handlers():
    """Signals as in a program of its own, whatever started the tests."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before:
        signal.signal(number, handler)


def raises(number: int, at: int = 1):
    """A callback that raises a signal at a step."""
    return lambda step, metrics: signal.raise_signal(number) if step == at else None


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("moment", ["after a step", "in a step", "in a step ahead"])
def test_ctrl_c_ends_a_training_with_a_checkpoint_and_the_metrics_of_its_step(model, monkeypatch, moment):
    step = GRPOTrainer.step

    def interrupted(self, groups):
        metrics = step(self, groups)
        if self.steps_done == 2:
            signal.raise_signal(signal.SIGINT)
        return metrics

    settings = {"save_steps": 0, "max_ahead": int(moment == "in a step ahead")}
    if moment != "after a step":
        monkeypatch.setattr(GRPOTrainer, "step", interrupted)
    pressed = raises(signal.SIGINT, 2) if moment == "after a step" else None
    result = train(model, steps=9999, settings=settings, on_metrics=pressed)

    assert (result.interrupted, result.steps_done, len(result.history)) == (True, 2, 2)
    assert steps_of(result.run) == [1, 2]
    assert result.run.status is RunStatus.INTERRUPTED
    assert result.checkpoint == result.run.path / "checkpoints" / "step-2"


def breaking(monkeypatch, step: int, error: BaseException | Callable[[], None]) -> None:
    """Let the gradient of one step fail, or do something else in its place."""
    compute = TorchLearner.forward_backward

    def failing(self, *args, **kwargs):
        if self.weights_version == step - 1:
            if isinstance(error, BaseException):
                raise error
            error()
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(TorchLearner, "forward_backward", failing)


def test_an_exception_in_an_update_keeps_the_last_whole_step_and_the_run_goes_on_from_it(model, monkeypatch):
    with monkeypatch.context() as patch:
        breaking(patch, 3, torch.OutOfMemoryError("no memory left"))
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            train(model, steps=4, settings={"save_steps": 0})
    run = ae.find_run("last")

    assert (run.status, checkpoints(run)) == (RunStatus.FAILED, ["step-2"])
    result = train(resume="last", steps=4)
    assert (result.steps_done, len(result.history)) == (4, 2)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("interrupted", [False, True])
def test_what_a_warm_up_learned_is_kept_if_it_is_interrupted_or_the_first_step_fails(
    model, monkeypatch, interrupted
):
    with monkeypatch.context() as patch:
        if interrupted:
            breaking(patch, 2, lambda: signal.raise_signal(signal.SIGINT))
            result = train(model, demos=say_ten, num_demos=400)
            assert (result.interrupted, result.steps_done) == (True, 0)
        else:
            patch.setattr(GRPOTrainer, "step", lambda self, groups: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                train(model, demos=say_ten, num_demos=4, settings={"save_steps": 0})

    assert checkpoints(ae.find_run("last")) == ["step-0"]
    assert train(resume="last", envs=echo(), demos=say_ten).steps_done == 2


def test_a_step_that_was_broken_off_while_it_wrote_is_not_saved(model, monkeypatch, caplog):
    def half(self, closure=None):
        raise torch.OutOfMemoryError("in the middle")

    with monkeypatch.context() as patch:
        breaking(patch, 2, lambda: patch.setattr(torch.optim.AdamW, "step", half))
        with pytest.raises(torch.OutOfMemoryError):
            train(model, steps=3, settings={"save_steps": 0})

    assert checkpoints(ae.find_run("last")) == []
    assert "step 1 cannot be saved: it was broken off while it wrote the weights" in caplog.text


def test_a_disk_that_is_full_does_not_hide_what_ended_the_run(model, monkeypatch, caplog):
    def full(self):
        raise StoreError("no space left on the disk")

    monkeypatch.setattr(GRPOTrainer, "save_step", full)
    breaking(monkeypatch, 2, ZeroDivisionError("the cause"))
    with pytest.raises(ZeroDivisionError, match="the cause"):
        train(model, settings={"save_steps": 0})

    assert "step 1 cannot be saved: StoreError: no space left on the disk" in caplog.text


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_process_that_has_gone_is_told_in_our_words(model, tmp_path, monkeypatch, by_hand):
    told = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:40123")
    breaking(monkeypatch, 2, told)
    training = (lambda: trainer_by_hand(tmp_path).train()) if by_hand else lambda: train(model)
    with pytest.raises(TrainingFailed, match="another process of the launch has ended, and rank 0") as failed:
        training()

    assert failed.value.__cause__ is told
    directory = tmp_path if by_hand else ae.find_run("last").path
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-1"]


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize(("ahead", "ignored"), [(0, False), (1, False), (0, True), (1, True)])
def test_sigterm_ends_a_training_after_the_step_with_a_checkpoint(model, ahead, ignored):
    if ignored:  # as a shell does for a process that it starts in the background
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(SystemExit) as ended:
        train(
            model,
            steps=9999,
            settings={"save_steps": 0, "max_ahead": ahead},
            on_metrics=raises(signal.SIGTERM, 2),
        )

    assert ended.value.code == 143
    assert ae.find_run("last").status is RunStatus.INTERRUPTED
    assert checkpoints(ae.find_run("last")) == ["step-2"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background"])
def test_a_step_that_takes_too_long_after_sigterm_is_broken_off_between_two_passes(
    model, monkeypatch, ignored
):
    begun, compute = [], passes._backward

    def backward(policy, *args, **kwargs):
        begun.append(policy)
        if len(begun) == 3:  # the first pass of the second step
            signal.raise_signal(signal.SIGTERM)
            while not stop.due:
                threading.Event().wait(0.01)
        return compute(policy, *args, **kwargs)

    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr("agentenv.training.loop.ending.GRACE_S", 0.05)
    monkeypatch.setattr(passes, "_backward", backward)
    with pytest.raises(SystemExit):
        train(model, steps=9999, settings={"save_steps": 0, "tokens_per_micro_batch": 1, "packing": "padded"})

    assert ae.find_run("last").status is RunStatus.INTERRUPTED
    assert (checkpoints(ae.find_run("last")), len(begun)) == (["step-1"], 3)


TESTS = Path(__file__).parents[2]
HANGING = """
import signal, sys, threading
import agentenv as ae
from agentenv.training.learners.torch import passes
from agentenv.training.learners.torch.learner import TorchLearner
from agentenv.training.loop import ending
from scenes import numbered

compute = TorchLearner.forward_backward

def hang(self, *args, **options):
    if self.weights_version == 1:
        for _ in range(int(sys.argv[2])):
            signal.raise_signal(signal.SIGTERM)
        threading.Event().wait()
    return compute(self, *args, **options)

TorchLearner.forward_backward = hang
# Neither the step nor the end of a pass is waited for, but one SIGTERM alone waits for both.
ending.GRACE_S, ending.BREAK_S = (0.1 if sys.argv[2] == "1" else 999.0), 0.1
settings = {"save_steps": 0, "groups_per_step": 2}
ae.train(numbered(), sys.argv[1], steps=9, group_size=2, demos="none", train=settings,
         limits={"max_turns": 1, "max_tokens_per_turn": 6})
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_hangs_is_left_after_sigterm_with_what_is_whole(model, tmp_path, times):
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{HANGING}"
    ended = subprocess.run([sys.executable, "-c", code, model, str(times)], check=False, timeout=120)

    assert ended.returncode == 143
    assert ae.find_run("last").status is RunStatus.INTERRUPTED
    assert checkpoints(ae.find_run("last")) == ["step-1"]


class Node:
    """Something to hold a weak reference to."""


@pytest.mark.usefixtures("_handlers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_sigterm_that_comes_where_python_drops_exceptions_ends_the_warm_up(model, monkeypatch):
    monkeypatch.setattr("agentenv.training.loop.ending.GRACE_S", 0.05)
    steps, compute = [], TorchLearner.forward_backward

    def forward_backward(self, *args, **kwargs):
        steps.append(len(steps))
        node = Node()
        held = weakref.ref(node, lambda _: signal.raise_signal(signal.SIGTERM))
        del node
        assert held() is None
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(TorchLearner, "forward_backward", forward_backward)
    with pytest.raises(SystemExit):
        train(model, demos=say_ten, num_demos=400)

    assert (len(steps), ae.find_run("last").status) == (1, RunStatus.INTERRUPTED)


@pytest.mark.usefixtures("_handlers")
def test_sigterm_while_an_ended_run_is_saved_does_not_lose_the_checkpoint(model, monkeypatch):
    def told_again(trainer: GRPOTrainer, cause: BaseException) -> None:
        signal.raise_signal(signal.SIGTERM)
        save_what_is_whole(trainer, cause)

    monkeypatch.setattr("agentenv.training.loop.ending.save_what_is_whole", told_again)
    with pytest.raises(SystemExit):
        train(model, steps=9999, settings={"save_steps": 0}, on_metrics=raises(signal.SIGTERM))

    assert checkpoints(ae.find_run("last")) == ["step-1"]


class Failing(Echo):
    fails: ClassVar[range] = range(0)

    def reward(self, answer: str) -> float:
        if len(self.made) - 1 in self.fails:
            raise ZeroDivisionError("the scorer is gone")
        return len(answer) / 10


def failing(after: int, number: int = 10**6) -> EnvSpec:
    """Return an environment whose reward fails for so many episodes, after so many others."""
    Failing.fails = range(after, after + number)
    Failing.made.clear()
    return numbered(Failing, 4)


@pytest.mark.parametrize("where", ["typed", "file"])
def test_a_stream_is_asked_for_like_any_setting_and_its_run_resumes(model, tmp_path, capsys, where):
    (tmp_path / "stream.toml").write_text('[train]\nmax_ahead = 2\nkl_estimator = "k1"\n')
    asked = {
        "typed": ["-o", "max_ahead=2", "-o", "train.kl_estimator=k1"],
        "file": ["--config", "stream.toml"],
    }
    with registered(echo()) as name:
        code = command(name, "-m", model, "--steps", "2", "-o", "groups_per_step=1", *QUICK, *asked[where])
    run = ae.find_run("last")
    again = ae.train(echo(), resume=run.path, steps=4)

    assert code == 0
    assert "of the time the trainer" in capsys.readouterr().out
    assert "of the time the trainer" in again.busiest
    config = run.info.config["train"]
    assert (config["stream"]["max_ahead"], config["loss"]["kl_estimator"]) == (2, "k1")
    metrics = again.run.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["staleness/max"] <= 2 and "stream/playing" in line for line in metrics)


def test_a_batch_without_a_usable_episode_ends_the_command_with_its_error(model, capsys):
    words = "-k 2 --steps 5 -o groups_per_step=4 -o max_turns=1 -o max_tokens_per_turn=4"
    with registered(failing(after=0)) as name:
        code = command(name, "-m", model, *words.split())

    told = capsys.readouterr().err
    assert code == 1
    assert "none of the 8 episodes of step 2 can be trained on" in told
    assert "ZeroDivisionError: the scorer is gone" in told
    assert "where: test/Failing-v0, task" in told
    assert ae.find_run("last").status is RunStatus.FAILED


def test_first_batches_of_tasks_that_fail_do_not_end_a_run_in_which_others_work(model):
    result = train(model, failing(after=0, number=8), steps=4)

    assert [line.get("dropped/failed_episodes", 0) for line in result.history] == [4, 4, 0, 0]


def test_an_outage_of_two_batches_does_not_end_a_run_and_one_of_six_does(model, monkeypatch, caplog):
    monkeypatch.setattr(usable, "WAITS_S", (0.01, 0.02, 0.0, 0.0, 0.0))
    settings = {"save_steps": 0}

    result = train(model, failing(after=4, number=8), steps=5, settings=settings)

    assert [line.get("dropped/failed_episodes", 0) for line in result.history] == [0, 4, 4, 0, 0]
    told = [text for text in caplog.messages if "none of the 4 episodes of step" in text]
    assert [text.partition(" of step ")[2][0] for text in told] == ["2", "3"]
    assert "ZeroDivisionError: the scorer is gone" in told[0]
    with pytest.raises(TrainingFailed, match="of step 7 can be trained on"):
        train(model, failing(after=4), steps=20, settings=settings)
    assert len(ae.find_run("last").metrics()) == 6


def test_a_run_that_drops_all_it_played_fails_at_its_end(model):
    settings = {"mask_truncated_completions": True}

    with pytest.raises(TrainingFailed, match="everything was dropped: 4 truncated episodes"):
        train(model, steps=1, settings=settings)


def say_ten(messages, task, random):
    return {"role": "assistant", "content": "ten"}


@pytest.mark.parametrize("named", [True, False])
def test_a_new_run_is_warmed_up_on_demonstrations(model, named, monkeypatch):
    policies = ModuleType("policies")
    policies.say_ten = say_ten
    monkeypatch.setitem(sys.modules, "policies", policies)
    shown = []

    demos = "policies:say_ten" if named else say_ten
    result = train(model, demos=demos, num_demos=3, steps=1, on_warmup=shown.extend)

    assert [one.messages[-1]["content"] for one in shown] == ["ten"] * 3
    assert result.history[0]["weights_version"] == 2.0  # one update of the warm-up, one of the step


def test_a_run_is_scored_before_its_first_step_if_it_is_asked_to_be(model):
    scored, stepped = [], []

    def see(step, metrics):
        stepped.append(step)

    result = train(model, settings={"eval_on_start": True}, on_scored=scored.append, on_metrics=see)

    assert scored == [result.evaluation_on_start]
    assert result.evaluation_on_start["eval/tasks"] == 1.0
    assert (stepped, len(result.history), steps_of(result.run)) == ([1, 2], 2, [0, 1, 2])
    held_out = [one for one in result.run.summaries if one.group_id.startswith("held-out-")]
    assert len(held_out) == 2  # before the first step and after the last one
    assert not train(resume=result.run.path, steps=3).evaluation_on_start


class Solved(Echo):
    @staticmethod
    def oracle(messages, task, rng):
        return "one" if task["n"] % 2 else "to"


def solved() -> EnvSpec:
    return numbered(Solved, 4)


async def steps_nothing(trainer: GRPOTrainer) -> list[dict[str, float]]:
    return []


@pytest.mark.parametrize(
    ("demos", "num_demos", "steps"),
    [
        ("oracle", None, (16, 64)),  # 4 tasks 32 times, until they are learned
        (say_ten, None, (16, 16)),  # what a policy shows may be wrong, and is not learned by heart
        ("oracle", 8, (1, 1)),
    ],
)
def test_few_demonstrations_are_shown_as_often_as_many_and_those_of_oracles_until_they_are_learned(
    model, monkeypatch, demos, num_demos, steps
):
    asked: list[tuple[int, int]] = []

    def warmup(self, shown, **given):
        asked.append((given["steps"], given["max_steps"]))

    monkeypatch.setattr(GRPOTrainer, "warmup", warmup)
    monkeypatch.setattr(GRPOTrainer, "run", steps_nothing)

    train(model, solved(), demos=demos, num_demos=num_demos, settings={"demo_min_reward": 0.0})

    assert asked == [steps]


def test_every_process_imitates_the_demonstrations_of_the_first(model, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "warmup", lambda self, shown, **_: imitated.append(shown))
    monkeypatch.setattr(GRPOTrainer, "run", steps_nothing)
    imitated: list[object] = []
    train(model, demos=lambda messages, task, random: {"role": "assistant", "content": "a"})
    (of_first,) = imitated

    def fails(messages, task, random):
        raise AssertionError("a second process played demonstrations")

    gather = World.gather
    monkeypatch.setattr(SharedRun, "is_first", property(lambda self: False))
    monkeypatch.setattr(World, "gather", lambda self, given: gather(self, given) or [(of_first, {})])
    train(model, demos=fails)

    assert len(of_first) == 4
    assert imitated == [of_first, of_first]


@pytest.mark.parametrize(
    ("demos", "min_reward", "said"),
    [("", 0.1, ["one", "one", "to", "to"]), ("oracle", 0.25, ["one", "one"]), ("none", None, [])],
)
def test_the_oracle_is_imitated_where_there_is_one(model, demos, min_reward, said, caplog):
    shown = []

    settings = {"demo_min_reward": min_reward, "eval_on_start": True}
    result = train(model, solved(), demos=demos, steps=1, on_warmup=shown.extend, settings=settings)

    assert sorted(each.messages[-1]["content"] for each in shown) == said
    assert ("2 demonstrations are not imitated: 2 reward under 0.25" in caplog.text) == (min_reward == 0.25)
    kept = [episode for episode in result.run.summaries if episode.group_id.startswith("demonstration:")]
    assert len(kept) == (0 if demos == "none" else 4)
    assert {result.run.note(episode)["role"] for episode in kept} <= {"demonstration"}
    assert run_data(result.run, vocabulary={})["report"]["num_episodes"] == 4
    assert result.evaluation_on_start == {}  # there are no held-out tasks


@pytest.mark.parametrize("demos", ["", "oracle"])
def test_an_oracle_below_full_marks_is_refused_with_its_first_such_episode(model, demos):
    told = r"oracle of test/Solved-v0 earned 0\.[23] of 1 on task .*less than full marks in 4 of 4"
    with pytest.raises(UsageError, match=told) as refused:
        train(model, solved(), demos=demos, steps=1)

    (shown,) = refused.value.__notes__
    assert re.fullmatch(r"user: say \d \| assistant: (one|to)", shown)
    kept = [episode.group_id for episode in ae.find_run("last").summaries]
    assert len([name for name in kept if name.startswith("demonstration:")]) == 4


def test_an_oracle_is_measured_by_the_full_marks_of_its_environment(model, monkeypatch):
    monkeypatch.setattr(Solved, "full_marks", 0.2)

    assert train(model, solved(), steps=1).steps_done == 1


def test_peft_says_nothing_in_the_terminal(model):
    options = ["max_tokens_per_turn=4", "groups_per_step=1", "max_turns=1", "lora.target_modules=lm_head"]
    settings = [word for option in options for word in ("-o", option)]

    with registered(solved()) as name:  # a warning is an error in these tests
        assert not command(name, "-m", model, "--steps", "1", "--demos", "none", "-k", "2", *settings)


def test_a_function_of_the_environments_own_file_shows_the_way(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "own_file_demos.py"
    path.write_text(
        "import agentenv as ae\n"
        "class Own(ae.ToolEnv):\n"
        "    def start(self, n: int) -> str:\n        return 'say'\n"
        "    def reward(self, answer: str) -> float:\n        return float(len(answer))\n"
        "def say(messages, task, rng):\n    return 'ten'\n"
        "ae.register('test/OwnFile-v0', Own, tasks=[{'n': 1}, {'n': 2}])\n"
    )
    shown = []

    for demos in (f"{path}:say", "own_file_demos:say"):
        train(model, str(path), demos=demos, steps=1, on_warmup=shown.extend)

    assert [each.messages[-1]["content"] for each in shown] == ["ten"] * 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"demos": "oracle"}, "test/Echo-v0 has no oracle; write a function oracle"),
        ({"envs": []}, "at least one environment"),
        ({"model": ""}, "no model to train"),
        ({"model": "mock"}, "no weights to train"),
        ({"model": "./nowhere/at/all"}, "nowhere"),
        ({"group_size": 1}, "can never train"),
        ({"settings": {"learning_rat": 1}}, "did you mean 'learning_rate'"),
        ({"runner": {"concurency": 1}}, "did you mean 'concurrency'"),
        ({"env": {"digts": 1}}, "takes no such arguments"),
        ({"engine": {"max_bach": 1}}, "did you mean 'max_batch'"),
        ({"demos": "no_such_module:policy"}, "cannot be loaded: No module named"),
        ({"envs": {"test/Echo-v0": 0}}, "must be more than 0"),
        ({"resume": "gone"}, "no run 'gone'"),
        ({"runner": {"condenser": "sumarise"}}, "did you mean 'summarise'"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_directory_is_made(model, options, says, tmp_path):
    with pytest.raises((UsageError, StoreError), match=says):
        train(**{"model": model, **options})

    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_the_run_or_its_limits_is_refused(model):
    with pytest.raises(UsageError, match=r"4 cut by a limit \(generation_length\).*raise the limit"):
        train(model, demos=lambda messages, task, random: "eleven", steps=1)
    with pytest.raises(UsageError, match="leave the environment out"):
        train(envs=echo("test/Other-v0"), resume="last")


def test_options_of_the_engine_reach_it(model, monkeypatch):
    batches = []

    def batch(*args, **options):
        batches.append(options["max_batch"])
        return Batch(*args, **options)

    monkeypatch.setattr("agentenv.engine.hf.engine.Batch", batch)
    train(model, steps=1, engine={"max_batch": 3})

    assert batches == [3]


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("max_ahead", [0, 1])
def test_few_frames_stand_between_train_and_the_engine(model, monkeypatch, max_ahead):
    seen: list[list[str]] = []
    generate = TransformersEngine.generate

    async def watched(self, *args, **options):
        seen.append(frames_of_ours())
        return await generate(self, *args, **options)

    monkeypatch.setattr(TransformersEngine, "generate", watched)
    settings = {"groups_per_step": 1, "refill_rounds": 2, "max_ahead": max_ahead}
    train(model, steps=1, settings=settings, runner={"concurrency": 1})

    assert len(seen) >= 3  # two episodes to train on, at least, and one to evaluate
    for frames in seen:
        above = frames[: next(place for place, name in enumerate(frames) if ".runner." in name)]
        assert above[0] == "agentenv.training.run.train"
        assert len(above) <= 3, frames
        # And the engine's own `generate`; the groups of a stream are played by a task with a frame of its own.
        assert len(frames) + 1 <= 8 + max_ahead, frames
