"""The command line: what it prints, what it refuses, and that a stopped run goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from agentenv.cli import VERBS, main
from agentenv.cli.dashboard import Dashboard, held_out_lines, sparkline, step_line
from agentenv.cli.errors import report_error
from agentenv.core import RunLimits, StoreError, Trajectory
from agentenv.envs import EnvSpec, registry
from agentenv.runs import EvalConfig, Evaluation, evaluate, rollout
from agentenv.runs.store import Run, RunStatus, RunWriter, encode_trajectory, find_run, list_runs
from helpers.hostile import Terminal
from helpers.waiting import wait_until

ADDER = '''
import asyncio

from agentenv.envs import ToolEnv, register
from agentenv.tools import tool


class Adder(ToolEnv):
    """Add two numbers."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reward(self, answer: str) -> float:
        return float(str(self.want) in answer)


class Broken(Adder):
    """Cannot start."""

    def start(self, x: int, y: int) -> str:
        raise ValueError(f"no table for {x}")


class Uneven(Adder):
    """Tasks from the fourth on fail, and only then do the first three start."""

    failed = 0
    all_failed = asyncio.Event()

    async def start(self, x: int, y: int) -> str:
        if x >= 3:
            Uneven.failed += 1
            if Uneven.failed == 9:
                Uneven.all_failed.set()
            raise ValueError(f"no table for {x}")
        await Uneven.all_failed.wait()
        return Adder.start(self, x, y)


class Unlucky(Adder):
    """The first three tasks fail, once the others are being scored."""

    num_scored = 0
    scored = asyncio.Event()

    async def start(self, x: int, y: int) -> str:
        if x < 3:
            await Unlucky.scored.wait()
            raise ValueError(f"refused, request id: req_{'abc'[x]}XYZ")
        return Adder.start(self, x, y)

    async def reward(self, answer: str) -> float:
        Unlucky.num_scored += 1
        if Unlucky.num_scored == 9:
            Unlucky.scored.set()
        return 0.0


register("cli/Unlucky-v0", Unlucky, tasks=[{"x": i, "y": 1} for i in range(12)])
register("cli/Adder-v0", Adder, tasks=[{"x": i, "y": 1} for i in range(50)])
register("cli/Broken-v0", Broken, tasks=[{"x": i, "y": 1} for i in range(50)])
register("cli/Uneven-v0", Uneven, tasks=[{"x": i, "y": 1} for i in range(12)])
register("cli/Lacking-v0", Adder, tasks=[{"x": i} for i in range(50)])
'''


@pytest.fixture(scope="module")
def adder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("envs") / "adder.py"
    path.write_text(ADDER)
    return f"{path}:cli/Adder-v0"


@pytest.fixture(scope="module", autouse=True)
def _forget(adder: str):
    yield
    for name in ("cli/Adder-v0", "cli/Broken-v0", "cli/Uneven-v0", "cli/Lacking-v0"):
        registry.remove(name)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> int:
    """Run the command line and return its exit code."""
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return int(stop.value.code or 0)


def plain(trajectory: Trajectory) -> dict[str, object]:
    """What must not depend on when or how fast an episode was played."""
    data = encode_trajectory(replace(trajectory, timings={}))
    for turn in data["turns"]:
        turn.pop("timings", None)
        for result in turn.get("tool_results", []):
            result.pop("duration_s", None)
    return json.loads(json.dumps(data))


def test_help_is_short_and_names_every_verb(capsys):
    assert run("--help") == 0
    lines = capsys.readouterr().out.splitlines()

    assert len(lines) <= 26
    assert all(any(line.split()[:1] == [verb] for line in lines) for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_at_most_a_dozen_options(verb, capsys):
    assert run(verb, "--help") == 0
    text = capsys.readouterr().out

    assert (
        len([line for line in text.splitlines() if line.strip().startswith("-")]) <= 14
    )  # with --help and --workers
    assert len(text.splitlines()) <= 40


def test_help_imports_no_verb_and_nothing_heavy():
    code = (
        "import sys\nfrom agentenv.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'gymnasium', 'numpy', 'pydantic', 'rich', 'openai', 'aiohttp'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert done.stderr.strip() == "[]"


def test_the_package_runs_as_a_module():
    words = [sys.executable, "-m", "agentenv", "--version"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("agentenv ")


def test_eval_prints_a_table_and_keeps_the_run(adder, capsys):
    assert run("eval", adder, "-m", "scripted:It is 12", "-n", "20", "-k", "2", "--runs-dir", "r") == 0
    text = capsys.readouterr().out
    stored = find_run("last", "r")

    assert text.splitlines()[-1].startswith("  reward   mean 0.150")
    assert "final_answer 40" in text
    assert len(stored) == 40
    assert stored.status is RunStatus.FINISHED
    assert stored.vocabulary()


def test_eval_prints_json_for_machines(adder, capsys):
    assert run("eval", adder, "-n", "3", "--json") == 0

    report = json.loads(capsys.readouterr().out)

    assert report["num_episodes"] == 3
    assert sum(report["stop_reasons"].values()) == 3


def test_fail_under_decides_the_exit_code(adder):
    assert run("eval", adder, "-m", "scripted:no", "-n", "4", "--fail-under", "0.5", "--json") == 1
    assert run("eval", adder, "-m", "scripted:1 2 3 4 5", "-n", "4", "--fail-under", "0.5", "--json") == 0


def test_a_list_of_nothing_says_so(capsys):
    assert run("list", "no-such-word") == 0
    assert "no installed environment or tool contains these words" in capsys.readouterr().out


def test_settings_reach_limits_sampling_and_config_file(adder, tmp_path):
    (tmp_path / "run.toml").write_text("max_turns = 3\n[sampling]\ntop_p = 0.5\n")
    run(
        "eval",
        adder,
        "-n",
        "1",
        "--config",
        "run.toml",
        "-o",
        "temperature=0.5",
        "-o",
        "runner.concurrency=2",
        "--json",
    )

    config = find_run("last").info.config

    assert (config["limits"]["max_turns"], config["runner"]["concurrency"]) == (3, 2)
    assert (config["sampling"]["top_p"], config["sampling"]["temperature"]) == (0.5, 0.5)


def test_runs_are_listed_newest_first(adder, capsys):
    for seed in range(3):
        run("eval", adder, "-m", "mock", "-n", "2", "--seed", str(seed))
    capsys.readouterr()

    assert run("runs", "-n", "2") == 0
    heads, *lines, rest = capsys.readouterr().out.splitlines()
    assert run("runs", "adder", "--json") == 0
    rows = json.loads(capsys.readouterr().out)

    assert heads.split()[:7] == ["run", "kind", "environments", "model", "episodes", "reward", "status"]
    assert heads.endswith("terms of the reward")
    assert [line.split()[0] for line in lines] == [row["id"] for row in rows[:2]]
    assert lines[0].split()[1:5] == ["eval", "cli/Adder-v0", "mock", "2"]
    assert rest == "and 1 older runs; -n 0 lists all"
    assert [row["created"] for row in rows] == sorted((row["created"] for row in rows), reverse=True)
    assert run("runs", "nowhere") == 2


def test_what_is_typed_wins_over_the_config_file_and_the_file_over_defaults(adder, tmp_path):
    (tmp_path / "run.toml").write_text("num_tasks = 2\ngroup_size = 3\nmax_turns = 3\n")
    run("eval", adder, "--config", "run.toml", "-k", "1", "-o", "max_turns=2", "--json")

    config = find_run("last").info.config

    assert (config["num_tasks"], config["group_size"], config["limits"]["max_turns"]) == (2, 1, 2)


def test_a_training_takes_what_is_typed_over_its_config_file(adder, tmp_path, capsys):
    """The refusal of the steps shows which of the two numbers was taken; no model is loaded."""
    (tmp_path / "train.toml").write_text("max_steps = -1\nnum_generations = 4\n")
    wanted = "max_steps must be 0 or more, not -"

    assert run("train", adder, "-m", "x", "--config", "train.toml", "--steps", "-2") == 2
    assert f"{wanted}2" in capsys.readouterr().err
    assert run("train", adder, "-m", "x", "--config", "train.toml") == 2
    assert f"{wanted}1" in capsys.readouterr().err


WRONG = [
    (["evl"], "did you mean 'eval'"),
    (["eval", "agentenv/Calcluator-v0"], "did you mean 'agentenv/Calculator-v0'"),
    (["eval", "nofile.py"], "no file 'nofile.py'"),
    (["eval"], "name at least one environment"),
    (["eval", "ADDER", "-m", "hf:./nomodel"], "./nomodel"),
    (["eval", "ADDER", "-m", "hf:./hollow"], "no weights"),
    (["eval", "ADDER", "-m", "gpt"], "names no engine"),
    (
        ["eval", "ADDER", "-o", "max_trns=3"],
        "did you mean 'limits.max_turns' (Largest number of assistant turns)",
    ),
    (["eval", "ADDER", "-o", "max_turns=many"], "max_turns"),
    (["eval", "ADDER", "-k", "0"], "'-k' / '--episodes'"),
    (["eval", "ADDER", "--split", "nope"], "no split 'nope'"),
    (["eval", "ADDER", "--runs-dir", "afile"], "--runs-dir"),
    (["eval", "ADDER", "--resume", "gone"], "no run 'gone'"),
    (["train", "ADDER", "-m", "./nomodel"], "./nomodel"),
    (["train", "ADDER", "-m", "./hollow"], "no weights"),
    (["train", "ADDER"], "no model to train"),
    (["train", "ADDER", "-m", "./hollow", "-o", "learning_rat=1"], "did you mean 'train.learning_rate'"),
    (["train", "ADDER", "-m", "mock"], "no weights to train"),
    (["train", "ADDER", "-m", "./hollow", "-o", "env.digts=2"], "takes no such arguments"),
    (["train", "ADDER", "-m", "./hollow", "-k", "1"], "num_generations=1 (-k 1) can never train"),
    (["train", "ADDER", "-m", "./hollow", "-o", "loss.epsilom=1"], "did you mean 'epsilon' (Lower clip"),
    (["eval", "ADDER", "--max-turns", "3"], "-o limits.max_turns=VALUE"),
    (["eval", "ADDER", "--temperature", "0"], "-o sampling.temperature=VALUE"),
    (["train", "ADDER", "--lr", "1"], "-o train.learning_rate=VALUE"),
    (["eval", "ADDER", "-n", "-3"], "-n 0 plays all tasks"),
    (["eval", "ADDER", "-o", "sampling.grammar=x"], "unknown setting 'sampling.grammar'"),
    (["eval", "ADDER", "-m", "openai/gpt-4o"], "did you mean openai:gpt-4o,"),
    (["eval", "ADDER", "-m", "gpt-4o"], "did you mean openai:gpt-4o,"),
    (["eval", "ADDER", "-m", "SmolLM2-135M"], "did you mean smollm2?"),
    (["eval", "ADDER", "-m", "localhost:8000"], "did you mean http://localhost:8000/v1?"),
    (["eval", "./slop.py"], "did you mean 'slip.py'?"),
    (["eval", "./plural.py"], "agentenv.tools is a package and cannot be called; did you mean tool?"),
    (["eval", "./plural.py"], "where: plural.py:2 in <module>"),
    (["eval", "ADDER", "-m", "smolm2"], "did you mean smollm2?"),
    (["eval", "./none.py"], "test/None-v0 has no tasks in its split 'train'"),
    (["runs"], "there are no runs in runs/"),
    (["eval", "ADDER", "--modell", "mock"], "--model"),
    (["eval", "ADDER", "-n", "many"], "give a number of tasks"),
    (["eval", "ADDER", "--tasks", "a.jsonl"], "a file of tasks is named in the environment"),
    (["eval", "ADDER", "-m", "http//localhost:8000/v1"], "did you mean http://localhost:8000/v1?"),
    (["plan", "-m", "nomodel"], "a Hub id is written OWNER/NAME"),
    (["eval", "./lacks.py"], "install that package for the Python that runs agentenv"),
    (["eval", "./near.py"], "has no attribute 'Toolenv'; did you mean 'ToolEnv'?"),
    (["eval", "./rows.py"], "a path begins in the working directory"),
    (["diff", "last"], "AFTER"),
    (["--bogus"], "see agentenv --help"),
    (["eval", "./slip.py"], "slip.py:2: class Slip(object)"),
    (["eval", "./empty.py"], "defines an environment class"),
    (["view", "gone"], "no run 'gone'"),
    (["view", "--sort", "luck"], "cannot sort"),
]


@pytest.mark.parametrize(
    ("words", "says"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_input_is_three_lines_and_leaves_no_run_behind(words, says, adder, tmp_path, capsys):
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "afile").write_text("")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "slip.py").write_text("x = 1\nclass Slip(object)\n    pass\n")
    (tmp_path / "plural.py").write_text("import agentenv as ae\n@ae.tools\ndef f(): ...\n")
    (tmp_path / "lacks.py").write_text("import no_such_package\n")
    (tmp_path / "near.py").write_text("import agentenv as ae\nclass A(ae.Toolenv): ...\n")
    for name, tasks in (("none", []), ("rows", "rows.jsonl")):
        (tmp_path / f"{name}.py").write_text(
            "import agentenv as ae\nclass A(ae.ToolEnv):\n    def start(self): return 'Go.'\n"
            f"ae.register('test/{name.title()}-v0', A, tasks={tasks!r})\n"
        )

    code = run(*[adder if word == "ADDER" else word for word in words])
    captured = capsys.readouterr()

    assert code in (1, 2)
    assert says in captured.err
    assert [line.split(":")[0].strip() for line in captured.err.splitlines()] == ["error", "where", "fix"]
    assert not (tmp_path / "runs").exists()


def test_a_wrong_training_is_told_before_torch_is_loaded(adder):
    code = (
        "import sys; from agentenv.cli import main\n"
        "for words in (['--steps', '-1'], ['--demos', './gone.py:x'], ['-o', 'limits.max_turns=0'], ['-k', '1']):\n"
        f"    try: main(['train', {adder!r}, '-m', 'smollm2', *words])\n"
        "    except SystemExit: print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.split() == ["False"] * 4
    said = [
        "max_steps must be 0 or more, not -1",
        "there is no file './gone.py'",
        "max_turns must be at least 1",
        "num_generations=1 (-k 1) can never train",
    ]
    assert all(words in shown.stderr for words in said)


def test_an_error_of_several_episodes_at_once_is_said_as_one(capsys):
    full = ExceptionGroup(
        "tasks", [ExceptionGroup("members", [StoreError("the disk is full", remedy="free some")])]
    )

    assert report_error(full, ["eval"]) == 1

    assert capsys.readouterr().err.splitlines()[0] == "error: the disk is full"


def test_debug_shows_the_traceback_and_keeps_the_exit_code(adder, capsys):
    with pytest.raises(SystemExit) as left:
        main(["eval", adder, "--split", "nope", "--debug"])

    shown = capsys.readouterr().err
    assert left.value.code == 2
    assert "Traceback (most recent call last)" in shown
    assert "error: " in shown


FIRST_LOST = """
import asyncio
import agentenv as ae
from agentenv.core import SandboxCrashed

others = []
seen = asyncio.Event()

class Lost(ae.ToolEnv):
    tasks = [{"x": x} for x in range(12)]

    async def start(self, x: int) -> str:
        if x < 3:
            await seen.wait()
            raise SandboxCrashed("the machine is gone")
        return "Say 1."

    def reward(self, x: int) -> float:
        others.append(x)
        if len(others) == 9:
            seen.set()
        return 1.0

ae.register("cli/Lost-v0", Lost)
"""


def test_a_run_that_goes_on_does_not_say_that_the_first_failed_where_others_are_scored(tmp_path, capsys):
    (tmp_path / "lost.py").write_text(FIRST_LOST)
    name = f"{tmp_path / 'lost.py'}:cli/Lost-v0"
    run("eval", name, "-m", "scripted:1", "-o", "concurrency=12", "-o", "retries=0")
    run("eval", "--resume", "last")
    registry.remove("cli/Lost-v0")

    text = capsys.readouterr().out
    assert "9 of 12" in text
    assert "all failed" not in text


def test_first_episodes_that_all_fail_alike_stop_the_run(adder, capsys):
    broken = adder.replace("Adder-v0", "Broken-v0")

    assert run("eval", broken, "-n", "40", "-o", "concurrency=4") == 1
    text = capsys.readouterr().out

    assert "the first 3 episodes all failed with the same error: env: ValueError: no table for" in text
    place = re.search(r"adder\.py:(\d+) in start\)", text)
    assert ADDER.splitlines()[int(place[1]) - 1].strip().startswith('raise ValueError(f"no table')
    assert len(find_run("last")) < 40


def test_first_episodes_that_fail_at_one_place_stop_the_run_also_if_their_errors_name_the_task(tmp_path):
    (tmp_path / "named.py").write_text(
        ADDER.replace("cli/", "named/").replace(
            'f"no table for {x}"', '"no table for " + "abcdefghij"[x % 10] * 3'
        )
    )
    result = evaluate(f"{tmp_path}/named.py:named/Broken-v0", "mock", num_tasks=40, runner={"concurrency": 1})

    assert result.stopped.startswith("the first")
    assert len(result.groups) < 40


def test_broken_tasks_that_fail_fast_do_not_stop_a_run_whose_first_tasks_are_good(adder):
    result = evaluate(adder.replace("Adder-v0", "Uneven-v0"), "scripted:It is 3")

    assert result.stopped == ""
    assert (result.report.num_episodes, result.report.num_scored) == (12, 3)


def test_first_tasks_that_fail_alike_do_not_stop_a_run_in_which_another_one_has_a_score(adder):
    result = evaluate(
        adder.replace("Adder-v0", "Unlucky-v0"), "scripted:It is 3", runner={"concurrency": 12}, num_tasks=12
    )

    assert result.stopped == ""
    assert (result.report.num_episodes, result.report.num_scored) == (12, 9)


def test_task_row_that_lacks_a_field_is_named(adder, capsys):
    assert run("eval", adder.replace("Adder-v0", "Lacking-v0"), "-n", "5") == 1

    captured = capsys.readouterr()

    assert "y" in captured.out + captured.err
    assert "Traceback" not in captured.out + captured.err


def test_stopped_run_goes_on_and_ends_like_an_undisturbed_one(adder, capsys):
    words = [adder, "-n", "12", "-k", "3", "--seed", "5"]
    run("eval", *words, "--runs-dir", "whole", "--json")
    run("eval", *words, "--runs-dir", "cut", "--json")
    whole, cut = find_run("last", "whole"), find_run("last", "cut")
    lines = (cut.path / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    (cut.path / "trajectories.jsonl").write_bytes(b"".join(lines[::2]) + lines[1][:50])
    (cut.path / "index.jsonl").unlink()
    capsys.readouterr()

    assert run("eval", "--resume", cut.id, "--runs-dir", "cut", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    again = Run(cut.path)

    assert {one.key: plain(again.load(one)) for one in again.summaries} == {
        one.key: plain(whole.load(one)) for one in whole.summaries
    }
    assert report["num_episodes"] == 36
    assert len((cut.path / "trajectories.jsonl").read_bytes().splitlines()) == 36


CHANGES = {
    "the tasks of resume/Adder-v0": ("range(50)", "range(1, 50)"),
    "the settings of resume/Adder-v0": ("Adder, tasks", "Adder, max_turns=3, tasks"),
    "the file changing.py": ("in answer)", "in answer[:9])"),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_run_of_a_changed_environment_is_resumed_only_anyway(part, tmp_path, capsys):
    path = tmp_path / "changing.py"
    source = ADDER.replace("cli/", "resume/")
    path.write_text(source)
    try:
        run("eval", f"{path}:resume/Adder-v0", "-n", "2", "--json")
        name = find_run("last").id
        path.write_text(source.replace(*CHANGES[part]))

        assert run("eval", "--resume", name) == 2
        said = capsys.readouterr().err
        assert part in said
        assert "--resume-anyway" in said
        assert run("eval", "--resume", name, "--resume-anyway", "--json") == 0
        path.write_text(source)
        assert run("eval", "--resume", name, "--json") == 0
    finally:
        for each in ("Adder", "Broken", "Uneven", "Unlucky", "Lacking"):
            registry.remove(f"resume/{each}-v0")


def test_a_run_without_digests_is_resumed_as_before(adder):
    run("eval", adder, "-n", "2", "--json")
    written = find_run("last").path / "run.json"
    record = json.loads(written.read_text())
    assert set(record.pop("made_of")) == {
        "the tasks of cli/Adder-v0",
        "the settings of cli/Adder-v0",
        "the file adder.py",
    }
    written.write_text(json.dumps(record))

    assert run("eval", "--resume", find_run("last").id, "--json") == 0


def test_resume_refuses_what_is_no_evaluation(adder, capsys):
    with RunWriter.create("x", kind="import", run_id="imported"):
        pass

    assert run("eval", "--resume", "imported") == 2
    assert "run imported is not an evaluation" in capsys.readouterr().err


def test_a_run_that_another_process_writes_is_refused_and_left_as_it_is(adder, capsys, tmp_path):
    assert run("eval", adder, "-m", "mock", "-n", "2", "--runs-dir", str(tmp_path)) == 0
    (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
    with RunWriter.resume(directory):
        before = {file.name: file.read_bytes() for file in directory.iterdir()}

        assert run("eval", "--resume", str(directory)) == 1

        assert "is being written by another process" in capsys.readouterr().err
        assert {file.name: file.read_bytes() for file in directory.iterdir()} == before


@pytest.mark.parametrize(
    "words",
    [
        ("-n", "7"),
        ("-k", "2"),
        ("-m", "oracle"),
        ("-o", "temperature=0"),
        ("-o", "limits.max_turns=3"),
        ("-o", "env.x=1"),
        ("-o", "engine.temper=1"),
        ("-o", "success_at=0.5"),
    ],
)
def test_resume_refuses_by_name_what_would_change_results(words, adder, capsys):
    run("eval", adder, "-n", "2", "--json")
    capsys.readouterr()

    assert run("eval", "--resume", find_run("last").id, *words) == 2
    named = {"-n": "num_tasks", "-k": "group_size", "-m": "model"}.get(words[0]) or words[1].partition("=")[0]
    assert named in capsys.readouterr().err


def test_resume_takes_what_changes_no_result_and_what_is_as_it_was(adder):
    run("eval", adder, "-n", "2", "-m", "mock", "-o", "temperature=0.5", "--json")
    same = ("-n", "2", "-m", "mock", "-o", "temperature=0.5")

    assert run("eval", "--resume", find_run("last").id, *same, "-o", "runner.concurrency=3", "--json") == 0


def test_a_run_with_a_key_and_an_address_is_resumed_with_others(adder, tmp_path, capsys, request):
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) for _ in range(2)]
    for server in servers:  # which answer everything with status 501
        Thread(target=server.serve_forever, daemon=True).start()
        request.addfinalizer(server.server_close)
        request.addfinalizer(server.shutdown)
    first, other = (server.server_address[1] for server in servers)
    away = ("-m", "openai:m", "-o", f"engine.base_url=http://127.0.0.1:{first}/v1", "-o", "engine.retry_s=0")
    run("eval", adder, "-n", "1", *away, "-o", "engine.api_key=k", "-o", "runner.retries=0", "--json")
    found = find_run("last")
    capsys.readouterr()

    servers[0].shutdown()
    servers[0].server_close()
    again = ("-o", f"engine.base_url=http://127.0.0.1:{other}/v1", "-o", 'engine.headers={"x" = "y"}')
    run("eval", "--resume", found.id, *again, "-o", "engine.api_key=other", "--json")

    assert "501" in capsys.readouterr().out
    assert "other" not in (found.path / "run.json").read_text()


def test_resume_refuses_another_environment(adder, capsys):
    run("eval", adder, "-n", "1", "--json")

    assert run("eval", "cli/Broken-v0", "--resume", find_run("last").id) == 2
    assert "leave the environment out" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_finished(adder, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(
        ADDER.replace("cli/", "slow/")
        + "\nimport asyncio\nclass Slow(Adder):\n    async def start(self, x: int, y: int) -> str:\n"
        "        await (asyncio.Event().wait() if x >= 5 else asyncio.sleep(0))\n        self.want = x + y\n        return 'go'\n"
        'register("slow/Slow-v0", Slow, tasks=[{"x": i, "y": 1} for i in range(10)])\n'
    )
    words = [sys.executable, "-m", "agentenv", "eval", f"{slow}:slow/Slow-v0", "-n", "10"]
    # A shell's background jobs ignore the signal, and their children inherit that.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heard,  # noqa: PLW1509
    )
    wait_until(
        lambda: any(
            len(index.read_bytes().splitlines()) == 5 for index in tmp_path.glob("runs/*/index.jsonl")
        )
    )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)

    assert process.returncode == 130, err
    assert "5 of 10 episodes are kept" in out
    assert "Traceback" not in err
    assert find_run("last").status is RunStatus.INTERRUPTED


def test_evaluation_in_python_needs_no_run_directory(adder, tmp_path):
    result = evaluate(adder, "scripted:It is 3", num_tasks=4, group_size=2)

    assert result.report.num_episodes == 8
    assert [group.trajectories[0].task["x"] for group in result.groups] == [0, 1, 2, 3]
    assert not (tmp_path / "runs").exists()


def test_rollout_gives_groups_in_the_order_of_the_tasks(adder):
    groups = rollout(adder, num_tasks=3, group_size=2, limits=RunLimits(max_turns=2))

    assert [len(group) for group in groups] == [2, 2, 2]
    assert [group.trajectories[0].task["x"] for group in groups] == [0, 1, 2]


def test_evaluation_writes_each_episode_before_it_is_counted(adder, tmp_path):
    seen: list[int] = []
    with RunWriter.create("x", runs_dir=tmp_path) as writer:
        config = EvalConfig(envs=(adder,), num_tasks=3)
        evaluation = Evaluation(config)
        evaluation.keep_in(writer)
        evaluation.on_episode = lambda _: seen.append(len(Run(writer.path)))
        import asyncio

        asyncio.run(evaluation.play())

    assert seen == [1, 2, 3]


def test_endless_tasks_ask_for_a_number():
    spec = EnvSpec.of("cli/Endless-v0", "agentenv.envs.tool_env:ToolEnv", tasks=lambda seed: {"x": seed})

    with pytest.raises(ValueError, match="is endless"):
        Evaluation(EvalConfig(envs=("cli/Endless-v0",), num_tasks=None), specs=[spec])


def test_sparkline_spans_least_to_largest():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([float("nan")]) == ""


def test_the_held_out_success_of_each_environment_has_a_line():
    scores = {"success": 0.5, "success_low": 0.25, "success_high": 0.75, "tasks": 8.0, "pass@4": 0.875}
    one = {f"eval/{name}": value for name, value in scores.items()}
    two = {
        f"eval/{env}/{name}": value for env in ("demo/A-v0", "demo/B-v0") for name, value in scores.items()
    }

    line = "0.500 [0.250, 0.750] on 8 tasks, greedy, pass@4 0.875"
    assert held_out_lines(one, "greedy") == [f"held-out success {line}"]
    assert held_out_lines(two, "greedy") == [
        f"held-out success of {env} {line}" for env in ("demo/A-v0", "demo/B-v0")
    ]
    assert held_out_lines({"reward": 1.0}, "greedy") == []
    before = {**one, "eval/success": 0.25, "eval/success_low": 0.0, "eval/success_high": 0.5}
    whole = f"0.250 [0.000, 0.500] before the first step, {line.replace('750] on', '750] after the last on')}"
    assert held_out_lines(one, "greedy", before) == [f"held-out success {whole}"]


def test_the_dashboard_tells_the_scores_before_the_first_step(capsys):
    board = Dashboard()
    scores = {"success": 0.5, "success_low": 0.25, "success_high": 0.75, "tasks": 8.0}

    board.scored({f"eval/{name}": value for name, value in scores.items()})
    board.step(1, {"reward": 0.25})

    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(" before the first step: held-out success 0.500")
    assert shown[1].startswith("step 1/0  reward 0.25")


def test_step_line_survives_missing_metrics():
    assert step_line(1, 20, [{"reward": 0.25}]).startswith("step  1/20  reward 0.25")


def test_a_step_tells_of_servers_that_failed():
    well = {"reward": 0.25, "servers/used": 2.0, "servers/failures": 0.0}

    assert "servers" not in step_line(1, 20, [well])
    assert step_line(1, 20, [{**well, "servers/failures": 3.0}]).endswith("servers 2, 3 failures")


def test_what_a_step_did_not_compute_is_a_dash():
    line = step_line(1, 20, [{"reward": 0.25, "grad_norm": 0.0}])

    assert "spread -  entropy -  clip -  grad 0  gap max -  trained -" in line


def test_printed_commands_name_the_directory_of_the_runs(adder, capsys):
    assert run("eval", adder, "-n", "2", "--runs-dir", "my runs") == 0
    viewed = [line for line in capsys.readouterr().out.splitlines() if "agentenv view" in line]

    assert viewed
    assert all(line.count("--runs-dir 'my runs'") == line.count("agentenv view") for line in viewed)


@pytest.mark.slow
def test_two_thousand_episodes_survive_kill_9_bit_equal(adder, tmp_path):
    words = [sys.executable, "-m", "agentenv", "eval", adder, "-n", "50", "-k", "40"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "--runs-dir", "whole", "--json"], check=True, capture_output=True, env=env)
    process = subprocess.Popen([*words, "--runs-dir", "cut", "--json"], stdout=subprocess.DEVNULL, env=env)
    wait_until(
        lambda: any(
            file.read_bytes().count(b"\n") > 700 for file in tmp_path.glob("cut/*/trajectories.jsonl")
        )
    )
    process.kill()
    process.wait()
    cut = find_run("last", "cut")
    before = len(cut)
    resume = [sys.executable, "-m", "agentenv", "eval", "--resume", cut.id, "--runs-dir", "cut", "--json"]
    done = subprocess.run(resume, check=True, capture_output=True, text=True, env=env)
    whole, again = find_run("last", "whole"), Run(cut.path)
    report = json.loads(done.stdout)

    assert 700 <= before < 2000
    assert len(again) == len(whole) == 2000
    assert len((cut.path / "trajectories.jsonl").read_bytes().splitlines()) == 2000
    ours = {one.key: plain(again.load(one)) for one in again.summaries}
    assert ours == {one.key: plain(whole.load(one)) for one in whole.summaries}
    assert report["num_scored"] == 2000


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_an_evaluation_survives_kills(adder, tmp_path, kills):
    """Every `kill -9` costs the episodes in flight alone, and the resumed run ends like an undisturbed one."""
    words = [sys.executable, "-m", "agentenv", "eval"]
    task = [adder, "-n", "50", "-k", "80", "-o", "concurrency=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, *task, "--runs-dir", "whole", "--json"], check=True, capture_output=True, env=env)

    def lines() -> int:
        return sum(file.read_bytes().count(b"\n") for file in tmp_path.glob("cut/*/trajectories.jsonl"))

    kept = [0]
    for _ in range(kills):
        arguments = ["--resume", "last"] if kept[-1] else task
        process = subprocess.Popen(
            [*words, *arguments, "--runs-dir", "cut", "--json"], stdout=subprocess.DEVNULL, env=env
        )
        wait_until(lambda: lines() > kept[-1], seconds=120)
        process.kill()
        process.wait()
        kept.append(len(find_run("last", "cut")))
    subprocess.run(
        [*words, "--resume", "last", "--runs-dir", "cut", "--json"], check=True, capture_output=True, env=env
    )
    whole, again = find_run("last", "whole"), find_run("last", "cut")

    assert kept == sorted(kept)
    assert kept[-1] < len(whole) == len(again) == 4000
    ours = {one.key: plain(again.load(one)) for one in again.summaries}
    assert ours == {one.key: plain(whole.load(one)) for one in whole.summaries}


DIGITS = '''
from agentenv.envs import ToolEnv, register


class Digits(ToolEnv):
    """Say a number of so many digits."""

    def __init__(self, digits: int) -> None:
        super().__init__()
        self.digits = digits

    def start(self, x: int) -> str:
        return f"Say {x} with {self.digits} digits."

    def reward(self, answer: str) -> float:
        return float(self.digits == 2)


register("cli/Digits-v0", Digits, tasks=[{"x": i} for i in range(5)])
'''


@pytest.fixture
def digits(tmp_path):
    path = tmp_path / "digits.py"
    path.write_text(DIGITS)
    yield f"{path}:cli/Digits-v0"
    registry.remove("cli/Digits-v0")


def test_arguments_of_the_environment_are_settings_of_eval_and_check(digits, tmp_path):
    (tmp_path / "two.toml").write_text("[env]\ndigits = 2\n\n[limits]\nmax_turns = 3\n")

    assert run("eval", digits, "-n", "3", "-o", "env.digits=2", "--fail-under", "1") == 0
    assert run("eval", digits, "-n", "3", "--config", "two.toml", "--fail-under", "1") == 0
    assert find_run("last").info.config["limits"]["max_turns"] == 3
    assert evaluate(digits, num_tasks=3, env={"digits": 2}).report.reward.mean == 1.0
    for only in ("schema", "runner"):
        assert run("check", digits, "--only", only) == 1
        assert run("check", digits, "--only", only, "-o", "env.digits=2", "-o", "max_turns=2") == 0


def test_check_finds_a_tool_and_an_environment_of_one_file_by_their_names(tmp_path, capsys):
    (tmp_path / "shop.py").write_text(
        "import agentenv as ae\n"
        "@ae.tool\n"
        "def price(item: str) -> str:\n"
        '    """Tell what something costs.\n\n    Args:\n        item: Its name.\n    """\n'
        "    return '2.50'\n"
        "class Shop(ae.ToolEnv):\n"
        "    def start(self, item: str) -> str:\n"
        "        return item\n"
        "    def reward(self, answer: str) -> float:\n"
        "        return 0.0\n"
    )

    assert run("check", f"{tmp_path / 'shop.py'}:price", "--fuzz", "20", "--json") == 0
    assert json.loads(capsys.readouterr().out)["env_id"] == "tool price"
    assert run("check", f"{tmp_path / 'shop.py'}:Shop", "--only", "schema", "--json") == 1  # it has no tasks
    assert "Shop" in json.loads(capsys.readouterr().out)["env_id"]
    assert run("check", f"{tmp_path / 'shop.py'}:prize") == 2
    assert "did you mean 'price'" in capsys.readouterr().err


def test_check_refuses_settings_that_it_does_not_know(digits, capsys):
    assert run("check", digits, "-o", "max_trns=2") == 2
    assert "did you mean 'limits.max_turns'" in capsys.readouterr().err


def test_an_argument_that_the_environment_does_not_take_is_refused_before_a_run_is_made(adder, capsys):
    code = run("eval", adder, "-n", "3", "-o", "env.digits=2")

    assert code == 2
    assert "cannot be made with ['digits']" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("version", ["\ud800", "\x1b[2J", float("nan"), [[]], 10**400])
def test_a_run_with_a_strange_layout_version_is_left_out_and_the_others_are_shown(
    version, tmp_path, monkeypatch
):
    for name in ("good", "strange"):
        with RunWriter.create("x", runs_dir=tmp_path, run_id=name):
            pass
    file = tmp_path / "strange" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": version}))
    terminal = Terminal()
    page = tmp_path / "page.html"

    monkeypatch.setattr(sys, "stdout", terminal)

    with pytest.raises(SystemExit) as left:
        main(["view", "--output", str(page), "--runs-dir", str(tmp_path)])

    assert left.value.code == 0
    assert "left out: " in terminal.shown
    assert "layout version" in terminal.shown
    assert '"id":"good"' in page.read_text()


def test_two_named_runs_open_as_a_comparison(adder, capsys):
    for _ in range(2):
        assert run("eval", adder, "-n", "1") == 0
    ids = [each.id for each in list_runs("runs")]
    capsys.readouterr()

    assert run("view", *ids, "--no-browser") == 0
    assert f"view.html#/compare/{'/'.join(ids)} (" in capsys.readouterr().out


def test_a_name_that_is_no_run_is_told_to_be_a_model_perhaps(capsys):
    assert run("doctor", "smollm2") == 2
    assert "a model is examined with agentenv doctor -m smollm2" in capsys.readouterr().err


def test_a_wrong_argument_of_a_function_of_ours_is_answered_with_the_right_one(tmp_path, capsys):
    file = tmp_path / "wrong.py"
    file.write_text("import agentenv as ae\nae.register('a/B-v0', ae.ToolEnv, tasks=[{}], max_turn=3)\n")

    assert run("eval", str(file)) == 1
    assert "did you mean 'max_turns'?" in capsys.readouterr().err
