"""A mean is shown with what it is a mean of, and two means of different things are not compared in silence."""

from dataclasses import replace

import pytest

import agentenv as ae
from agentenv.envs import spec
from agentenv.runs import EvalConfig, Evaluation, Run, compare, evaluate
from agentenv.runs.report import score_lines
from agentenv.runs.store import RunWriter
from agentenv.runs.terms import terms_of, training_terms
from agentenv.runs.view.data import run_data
from helpers.sample_runs import write_training


class Adder(ae.ToolEnv):
    """Adds two numbers; `user` stands for an option that decides who is talked to."""

    def __init__(self, user: str = "script", want: int = 3):
        self.user, self.want = user, want

    def start(self, x: int = 1):
        return "What is 1 + 2?"

    def reward(self, answer):
        return float(str(self.want) in answer)


ROWS = [{"x": n} for n in range(40)]


def registered(name, tasks, **fields):
    ae.register(f"terms/{name}-v0", Adder, tasks=tasks, override=True, **fields)
    return f"terms/{name}-v0"


NONE_HELD_OUT = "20 of 40 tasks, none held out"
TWO = {"training": ROWS, "holdout": ROWS[:5]}
MIXED = {"train": ROWS, "test": lambda seed: {"x": seed}}
NAMED = "4 of 40 tasks of the split training (none is called held out; --split plays another: holdout)"
TERMS = [
    (ROWS, {}, NONE_HELD_OUT, "user=script", "temperature 1.0"),
    (ROWS, {"num_tasks": None}, "40 tasks, none held out", "user=script", "temperature 1.0"),
    (TWO, {"num_tasks": 4}, NAMED, "user=script", "temperature 1.0"),
    (TWO, {"split": "holdout"}, "5 tasks of the split holdout", "user=script", "temperature 1.0"),
    (
        *(MIXED, {"num_tasks": 2, "env": {"user": "http://host/v1?key=sk-1"}}),
        *("2 tasks of the split test", "user=http://host/v1", "temperature 1.0"),
    ),
    (
        *(ROWS, {"sampling": {"temperature": 0, "top_k": 5}}),
        *(NONE_HELD_OUT, "user=script", "temperature 0.0, top_k 5"),
    ),
    (
        *(ROWS, {"limits": {"max_turns": 2, "max_tokens_per_turn": 40}}, NONE_HELD_OUT),
        *("user=script", "temperature 1.0", "max_turns 2, max_tokens_per_turn 40"),
    ),
]


@pytest.mark.parametrize("case", TERMS, ids=lambda case: str(case[1]))
def test_tasks_user_and_sampling_stand_with_the_mean(case):
    tasks, given, *terms = case
    report = evaluate(registered("Shown", tasks), model="scripted:It is 3.", **given).report

    assert list(report.terms) == terms
    assert report.as_json()["terms"] == tuple(terms)
    assert " · ".join(terms) in "\n".join(score_lines(report))


def short(answer):
    return len(answer) < 30


def test_a_training_has_terms_of_its_own_tasks_and_added_rewards_are_terms():
    several = {"train": ROWS, "test": ROWS[:3]}
    entries = [spec(registered("Trained", several)), spec(registered("Endless", lambda seed: {"x": seed}))]
    rewarded = spec(registered("Named", ROWS, rewards=[(short, 0.5)]))
    tasks = [ae.TaskSet.of(ROWS).take(1)]

    assert "reward short * 0.5" in terms_of([rewarded], tasks, EvalConfig(envs=(rewarded.id,)))
    assert training_terms(entries, 0.7, ae.RunLimits(max_turns=3)) == (
        "40 tasks of the split train, held out: test",
        "user=script",
        "endless tasks of the split train, none held out",
        "temperature 0.7",
        "max_turns 3",
    )


def test_the_list_of_runs_has_the_terms_of_each_mean(tmp_path, command):
    where = ["--runs-dir", str(tmp_path)]
    evaluate(registered("Listed", ROWS), model="scripted:It is 3.", num_tasks=3, runs_dir=tmp_path)

    (row,) = command("runs", "--json", *where).json
    assert (row["scored"], row["terms"][0]) == (3, "3 of 40 tasks, none held out")
    assert "1.000   finished  3 of 40 tasks, none held out · user=script" in command("runs", *where).out


def test_a_run_that_was_broken_off_says_so_wherever_its_mean_is_shown(tmp_path, command):
    run = evaluate(registered("Cut", ROWS), model="scripted:It is 3.", num_tasks=3, runs_dir=tmp_path).run
    for name in ("trajectories.jsonl", "index.jsonl"):
        lines = (run.path / name).read_text().splitlines(keepends=True)
        (run.path / name).write_text("".join(lines[:-1]))

    for words in (["runs"], ["doctor", run.id]):
        assert "only 2 of 3 episodes played" in command(*words, "--runs-dir", str(tmp_path)).out
    assert run_data(Run(run.path), vocabulary={})["report"]["terms"][-1] == "only 2 of 3 episodes played"


def test_two_trainings_are_compared_without_what_was_shown_and_held_out(tmp_path):
    one, other = (write_training(tmp_path, name, steps=2) for name in ("one", "other"))
    trained = {row.task_id for row in one.summaries if not one.role(row)}

    comparison = compare(one, other)

    assert len(trained) < len({row.task_id for row in one.summaries})
    assert {task.task_id for task in comparison.tasks} == trained


def test_episodes_without_a_score_are_counted_beside_the_mean():
    class Sometimes(Adder):
        def reward(self, answer):
            return None if self.task["x"] < 10 else 1.0

    ae.register("terms/Sometimes-v0", Sometimes, tasks=ROWS, override=True)

    report = evaluate("terms/Sometimes-v0", model="scripted:It is 3.").report

    assert "of 10 of 20 episodes" in "\n".join(score_lines(report))


def test_runs_of_other_terms_are_told_apart_before_any_number(tmp_path, command):
    name = registered("Compared", ROWS)
    common = {"model": "scripted:It is 3.", "num_tasks": 3, "runs_dir": tmp_path}
    first = evaluate(name, **common).run
    again = evaluate(name, **common).run
    other = evaluate(name, env={"user": "scripted:Hm."}, **common).run

    assert compare(first, again).changed == ()
    assert compare(first, other).changed == ("the terms (user=script against user=scripted:Hm.)",)
    assert Run(first.path).info.terms[1] == "user=script"

    said = command("diff", first.id, other.id, "--runs-dir", str(tmp_path)).out.splitlines()
    assert said[0].startswith("! not the same in both runs: the terms (user=script")
    assert "rescore" in said[1]


OWN = """
import agentenv as ae
class Adder(ae.ToolEnv):
    tasks = [{'x': 1}]
    def start(self, x: int):
        return 'Hello'
    def reward(self, answer):
        return 1.0
"""


@pytest.mark.parametrize("changed", [("1.0", "0.5"), ("'x': 1", "'x': 2")], ids=["reward", "tasks"])
def test_another_reward_or_task_is_found_by_its_digest(tmp_path, changed):
    runs = []
    for folder, source in (("a", OWN), ("b", OWN.replace(*changed))):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "own.py"
        file.write_text(source)
        runs.append(evaluate(str(file), model="scripted:Hm.", runs_dir=tmp_path / "runs").run)

    assert "the file own.py" in compare(*runs).changed


async def test_a_mean_of_a_broken_off_evaluation_says_how_much_was_played(tmp_path):
    config = EvalConfig(envs=(registered("Stopped", ROWS[:5]),), model="scripted:3", num_tasks=2)
    with RunWriter.create("x", runs_dir=tmp_path) as writer:
        for number, more in ((2, ()), (None, ("only 2 of 5 episodes played",))):
            evaluation = Evaluation(replace(config, num_tasks=number))
            evaluation.keep_in(writer)
            if number:
                await evaluation.play()
            report = evaluation.result().report

            assert report.terms[3:] == more
            assert " · ".join(report.terms) in score_lines(report)[0]
