"""The command line: what it prints, what its settings reach, and that a stopped run goes on."""

from __future__ import annotations

import asyncio
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
from agentenv.cli.errors import report_error
from agentenv.core import RunLimits, StoreError
from agentenv.runs import EvalConfig, Evaluation, evaluate, rollout
from agentenv.runs.store import Run, RunStatus, RunWriter, encode_trajectory, find_run
from helpers.hostile import Terminal
from helpers.waiting import wait_until
from scenes import Go, spec_of

FAILING = '''
import asyncio

import agentenv as ae
from adder import Adder
from agentenv.core import SandboxCrashed

TWELVE = [{"x": i, "y": 1} for i in range(12)]
FIFTY = [{"x": i, "y": 1} for i in range(50)]


class Broken(Adder):
    """Cannot start."""

    def start(self, x: int, y: int) -> str:
        raise ValueError(f"no table for {x}")


class Named(Adder):
    """Cannot start, and says so in other words for each task."""

    def start(self, x: int, y: int) -> str:
        raise ValueError("no table for " + "abcdefghij"[x % 10] * 3)


class Uneven(Adder):
    """Tasks from the fourth on fail, and only then do the first three start."""

    failed, all_failed = 0, asyncio.Event()

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

    num_scored, scored = 0, asyncio.Event()

    def failure(self, x: int) -> Exception:
        return ValueError(f"refused, request id: req_{'abc'[x]}XYZ")

    async def start(self, x: int, y: int) -> str:
        if x < 3:
            await Unlucky.scored.wait()
            raise self.failure(x)
        return Adder.start(self, x, y)

    async def reward(self, answer: str) -> float:
        Unlucky.num_scored += 1
        if Unlucky.num_scored == 9:
            Unlucky.scored.set()
        return 0.0


class Lost(Unlucky):
    def failure(self, x: int) -> Exception:
        return SandboxCrashed("the machine is gone")


class Slow(Adder):
    """Tasks from the sixth on never start."""

    async def start(self, x: int, y: int) -> str:
        await (asyncio.Event().wait() if x >= 5 else asyncio.sleep(0))
        return Adder.start(self, x, y)


class Digits(ae.ToolEnv):
    """Say a number of so many digits."""

    def __init__(self, digits: int) -> None:
        super().__init__()
        self.digits = digits

    def start(self, x: int, y: int) -> str:
        return f"Say {x} with {self.digits} digits."

    def reward(self, answer: str) -> float:
        return float(self.digits == 2)


for made in (Uneven, Unlucky, Lost):
    ae.register(f"cli/{made.__name__}-v0", made, tasks=TWELVE)
for made in (Broken, Named, Slow, Digits):
    ae.register(f"cli/{made.__name__}-v0", made, tasks=FIFTY)
ae.register("cli/Lacking-v0", Adder, tasks=[{"x": i} for i in range(50)])
'''


@pytest.fixture
def failing(adder, tmp_path, monkeypatch):
    """A function from the name of a class to its environment."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "adder", raising=False)
    (tmp_path / "failing.py").write_text(FAILING)
    return "failing.py:cli/{}-v0".format


@pytest.fixture
def in_processes(adder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def agentenv(*words: str) -> list[str]:
    return [sys.executable, "-m", "agentenv", *words]


def plain(run: Run) -> dict[object, object]:
    """What must not depend on when or how fast the episodes of a run were played."""
    found: dict[object, object] = {}
    for one in run.summaries:
        data = encode_trajectory(replace(run.load(one), timings={}))
        for turn in data["turns"]:
            turn.pop("timings", None)
            for result in turn.get("tool_results", []):
                result.pop("duration_s", None)
        found[one.key] = json.loads(json.dumps(data))
    return found


# Help ---------------------------------------------------------------------------------------


def test_help_is_short_and_names_every_verb(command):
    said = command("--help")
    lines = said.out.splitlines()

    assert said.code == 0
    assert len(lines) <= 26
    assert all(any(line.split()[:1] == [verb] for line in lines) for verb in VERBS)
    assert "no installed environment or tool contains these words" in command("list", "no-such-word").out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_at_most_a_dozen_options(verb, command):
    said = command(verb, "--help")
    lines = said.out.splitlines()

    assert said.code == 0
    assert len([line for line in lines if line.strip().startswith("-")]) <= 14  # with --help and --workers
    assert len(lines) <= 40


def test_help_imports_no_verb_and_nothing_heavy():
    code = (
        "import sys\nfrom agentenv.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'gymnasium', 'numpy', 'pydantic', 'rich', 'openai', 'aiohttp'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert done.stderr.strip() == "[]"


# Evaluations --------------------------------------------------------------------------------


def test_eval_prints_a_table_and_keeps_the_run(adder, command):
    said = command("eval", adder, "-m", "scripted:It is 12", "-n", "20", "-k", "2", "--runs-dir", "my runs")
    stored = find_run("last", "my runs")
    viewed = [line for line in said.out.splitlines() if "agentenv view" in line]

    assert said.code == 0
    assert said.out.splitlines()[-1].startswith("  reward   mean 0.150")
    assert "final_answer 40" in said.out
    assert viewed
    assert all(line.count("--runs-dir 'my runs'") == line.count("agentenv view") for line in viewed)
    assert (len(stored), stored.status) == (40, RunStatus.FINISHED)
    assert stored.vocabulary()


@pytest.mark.parametrize(("model", "code"), [("scripted:no", 1), ("scripted:1 2 3 4 5", 0)])
def test_fail_under_decides_the_exit_code_and_json_is_for_machines(adder, command, model, code):
    said = command("eval", adder, "-m", model, "-n", "4", "--fail-under", "0.5", "--json")

    assert said.code == code
    assert (said.json["num_episodes"], sum(said.json["stop_reasons"].values())) == (4, 4)


def test_settings_reach_the_run_and_what_is_typed_wins_over_the_file_and_the_file_over_defaults(
    adder, command
):
    Path("run.toml").write_text("num_tasks = 1\ngroup_size = 3\nmax_turns = 3\n[sampling]\ntop_p = 0.5\n")
    typed = ("-k", "1", "-o", "temperature=0.5", "-o", "runner.concurrency=2")
    command("eval", adder, "--config", "run.toml", *typed, "--json")
    first = find_run("last").info.config
    command("eval", adder, "--config", "run.toml", *typed, "-o", "max_turns=2", "--json")
    second = find_run("last").info.config

    assert (first["limits"]["max_turns"], first["runner"]["concurrency"]) == (3, 2)
    assert (first["sampling"]["top_p"], first["sampling"]["temperature"]) == (0.5, 0.5)
    assert (second["num_tasks"], second["group_size"], second["limits"]["max_turns"]) == (1, 1, 2)


@pytest.mark.parametrize(("typed", "number"), [(("--steps", "-2"), "-2"), ((), "-1")])
def test_a_training_takes_what_is_typed_over_its_config_file(adder, command, typed, number):
    """The refusal of the steps shows which of the two numbers was taken; no model is loaded."""
    Path("train.toml").write_text("max_steps = -1\nnum_generations = 4\n")
    said = command("train", adder, "-m", "x", "--config", "train.toml", *typed)

    assert said.code == 2
    assert f"max_steps must be 0 or more, not {number}" in said.err


def test_arguments_of_the_environment_are_settings_of_eval_and_check(failing, command):
    Path("two.toml").write_text("[env]\ndigits = 2\n\n[limits]\nmax_turns = 3\n")
    digits = failing("Digits")

    assert command("eval", digits, "-n", "3", "-o", "env.digits=2", "--fail-under", "1").code == 0
    assert command("eval", digits, "-n", "3", "--config", "two.toml", "--fail-under", "1").code == 0
    assert find_run("last").info.config["limits"]["max_turns"] == 3
    assert evaluate(digits, num_tasks=3, env={"digits": 2}).report.reward.mean == 1.0
    for only in ("schema", "runner"):
        assert command("check", digits, "--only", only).code == 1
        assert command("check", digits, "--only", only, "-o", "env.digits=2", "-o", "max_turns=2").code == 0


def test_check_finds_a_tool_and_an_environment_of_one_file_by_their_names(tmp_path, command):
    (tmp_path / "shop.py").write_text(
        "import agentenv as ae\n"
        "@ae.tool\n"
        "def price(item: str) -> str:\n"
        '    """Tell what something costs.\n\n    Args:\n        item: Its name.\n    """\n'
        "    return '2.50'\n"
        "class Shop(ae.ToolEnv):\n    def start(self, item: str) -> str:\n        return item\n"
        "    def reward(self, answer: str) -> float:\n        return 0.0\n"
    )
    tool = command("check", "shop.py:price", "--fuzz", "20", "--json")
    env = command("check", "shop.py:Shop", "--only", "schema", "--json")

    assert (tool.code, tool.json["env_id"]) == (0, "tool price")
    assert env.code == 1  # it has no tasks
    assert "Shop" in env.json["env_id"]


def test_evaluation_in_python_needs_no_run_directory_and_rollout_gives_groups_in_order(adder, tmp_path):
    result = evaluate(adder, "scripted:It is 3", num_tasks=4, group_size=2)
    groups = rollout(adder, num_tasks=3, group_size=2, limits=RunLimits(max_turns=2))

    assert result.report.num_episodes == 8
    assert [group.trajectories[0].task["x"] for group in result.groups] == [0, 1, 2, 3]
    assert [(len(group), group.trajectories[0].task["x"]) for group in groups] == [(2, 0), (2, 1), (2, 2)]
    assert not (tmp_path / "runs").exists()


def test_evaluation_writes_each_episode_before_it_is_counted_and_endless_tasks_need_a_number(adder, tmp_path):
    seen: list[int] = []
    with RunWriter.create("x", runs_dir=tmp_path) as writer:
        evaluation = Evaluation(EvalConfig(envs=(adder,), num_tasks=3))
        evaluation.keep_in(writer)
        evaluation.on_episode = lambda _: seen.append(len(Run(writer.path)))
        asyncio.run(evaluation.play())
    assert seen == [1, 2, 3]

    spec = spec_of(Go, lambda seed: {"x": seed})
    with pytest.raises(ValueError, match="is endless"):
        Evaluation(EvalConfig(envs=(spec.id,), num_tasks=None), specs=[spec])


# Environments that fail -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Broken", "Named"])
def test_first_episodes_that_all_fail_alike_stop_the_run(failing, command, name):
    said = command("eval", failing(name), "-n", "40", "-o", "concurrency=1")

    assert said.code == 1
    assert "the first 3 episodes all failed with the same error: env: ValueError: no table for" in said.out
    place = re.search(r"failing\.py:(\d+) in start\)", said.out)
    assert FAILING.splitlines()[int(place[1]) - 1].strip().startswith("raise ValueError(")
    assert len(find_run("last")) < 40


@pytest.mark.parametrize(("name", "scored"), [("Uneven", 3), ("Unlucky", 9)])
def test_tasks_that_fail_alike_do_not_stop_a_run_in_which_others_have_a_score(failing, name, scored):
    """Whether the failing ones are the last of the tasks or the first."""
    result = evaluate(failing(name), "scripted:It is 3", runner={"concurrency": 12}, num_tasks=12)

    assert result.stopped == ""
    assert (result.report.num_episodes, result.report.num_scored) == (12, scored)


def test_a_run_that_goes_on_does_not_say_that_the_first_failed_where_others_are_scored(failing, command):
    first = command("eval", failing("Lost"), "-m", "scripted:1", "-o", "concurrency=12", "-o", "retries=0")
    again = command("eval", "--resume", "last")

    assert "9 of 12" in first.out + again.out
    assert "all failed" not in first.out + again.out


def test_an_error_of_several_episodes_at_once_is_said_as_one(capsys):
    full = StoreError("the disk is full", remedy="free some")

    assert report_error(ExceptionGroup("tasks", [ExceptionGroup("members", [full])]), ["eval"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == "error: the disk is full"


# Runs that go on ------------------------------------------------------------------------------


def test_stopped_run_goes_on_and_ends_like_an_undisturbed_one(adder, command):
    for where in ("whole", "cut"):
        command("eval", adder, "-n", "12", "-k", "3", "--seed", "5", "--runs-dir", where, "--json")
    whole, cut = find_run("last", "whole"), find_run("last", "cut")
    lines = (cut.path / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    (cut.path / "trajectories.jsonl").write_bytes(b"".join(lines[::2]) + lines[1][:50])
    (cut.path / "index.jsonl").unlink()

    said = command("eval", "--resume", cut.id, "--runs-dir", "cut", "--json")

    assert (said.code, said.json["num_episodes"]) == (0, 36)
    assert plain(Run(cut.path)) == plain(whole)
    assert len((cut.path / "trajectories.jsonl").read_bytes().splitlines()) == 36


CHANGES = {
    "the tasks of cli/Adder-v0": ("range(50)", "range(1, 50)"),
    "the settings of cli/Adder-v0": ("Adder, tasks", "Adder, max_turns=3, tasks"),
    "the file adder.py": ("in answer)", "in answer[:9])"),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_run_of_a_changed_environment_is_resumed_only_anyway(part, adder, command):
    file = Path(adder)
    source = file.read_text()
    command("eval", adder, "-n", "2", "--json")
    name, path = find_run("last").id, find_run("last").path / "run.json"
    file.write_text(source.replace(*CHANGES[part]))

    said = command("eval", "--resume", name)
    assert said.code == 2
    assert part in said.err
    assert "--resume-anyway" in said.err
    assert command("eval", "--resume", name, "--resume-anyway", "--json").code == 0

    record = json.loads(path.read_text())
    assert set(record.pop("made_of")) == set(CHANGES)
    path.write_text(json.dumps(record))  # as runs were written before they had digests
    assert command("eval", "--resume", name, "--json").code == 0


def test_a_run_that_another_process_writes_is_refused_and_left_as_it_is(adder, command):
    command("eval", adder, "-m", "mock", "-n", "2")
    directory = find_run("last").path
    with RunWriter.resume(directory):
        before = {file.name: file.read_bytes() for file in directory.iterdir()}
        said = command("eval", "--resume", str(directory))

        assert said.code == 1
        assert "is being written by another process" in said.err
        assert {file.name: file.read_bytes() for file in directory.iterdir()} == before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("-n 7", "num_tasks"),
        ("-k 2", "group_size"),
        ("-m oracle", "model"),
        ("-o temperature=0", "temperature"),
        ("-o limits.max_turns=3", "limits.max_turns"),
        ("-o env.x=1", "env.x"),
        ("-o engine.temper=1", "engine.temper"),
        ("-o success_at=0.5", "success_at"),
        ("cli/Broken-v0", "leave the environment out"),
        ("-n 2 -m mock -o temperature=0.5 -o runner.concurrency=3", ""),
    ],
)
def test_resume_refuses_by_name_what_would_change_results_and_nothing_else(words, named, adder, command):
    command("eval", adder, "-n", "2", "-m", "mock", "-o", "temperature=0.5", "--json")
    said = command("eval", "--resume", "last", *words.split())

    assert said.code == (2 if named else 0)
    assert named in said.err


def test_a_run_with_a_key_and_an_address_is_resumed_with_others(adder, command, request):
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) for _ in range(2)]
    for server in servers:  # which answer everything with status 501
        Thread(target=server.serve_forever, daemon=True).start()
        request.addfinalizer(server.server_close)
        request.addfinalizer(server.shutdown)
    first, other = (f"engine.base_url=http://127.0.0.1:{one.server_address[1]}/v1" for one in servers)
    once = ("-o", "engine.retry_s=0", "-o", "engine.api_key=k", "-o", "runner.retries=0", "--json")
    command("eval", adder, "-n", "1", "-m", "openai:m", "-o", first, *once)
    found = find_run("last")

    servers[0].shutdown()
    servers[0].server_close()
    again = ("-o", other, "-o", 'engine.headers={"x" = "y"}', "-o", "engine.api_key=other", "--json")
    said = command("eval", "--resume", found.id, *again)

    assert "501" in said.out
    assert "other" not in (found.path / "run.json").read_text()


def test_ctrl_c_keeps_what_is_finished(failing, tmp_path):
    # A shell's background jobs ignore the signal, and their children inherit that.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        agentenv("eval", failing("Slow"), "-n", "10"),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
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


def written(tmp_path: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in tmp_path.glob("cut/*/trajectories.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_an_evaluation_survives_kills(in_processes, adder, tmp_path, kills):
    """Every `kill -9` costs the episodes in flight alone, and the resumed run ends like an undisturbed one."""
    members = 20 if kills == 2 else 80
    task = (adder, "-n", "50", "-k", str(members), "-o", "concurrency=2")
    subprocess.run(agentenv("eval", *task, "--runs-dir", "whole"), check=True, capture_output=True)

    kept = [0]
    for _ in range(kills):
        words = ("--resume", "last") if kept[-1] else task
        process = subprocess.Popen(
            agentenv("eval", *words, "--runs-dir", "cut", "--json"), stdout=subprocess.DEVNULL
        )
        wait_until(lambda: written(tmp_path) > kept[-1], seconds=120)
        process.kill()
        process.wait()
        kept.append(len(find_run("last", "cut")))
    last = agentenv("eval", "--resume", "last", "--runs-dir", "cut", "--json")
    done = subprocess.run(last, check=True, capture_output=True, text=True)
    whole, again = find_run("last", "whole"), find_run("last", "cut")

    assert kept == sorted(kept)
    assert kept[-1] < len(whole) == len(again) == written(tmp_path) == 50 * members
    assert plain(again) == plain(whole)
    assert json.loads(done.stdout)["num_scored"] == 50 * members


# Stored runs ----------------------------------------------------------------------------------


def test_runs_are_listed_newest_first(adder, command):
    for seed in range(3):
        command("eval", adder, "-m", "mock", "-n", "2", "--seed", str(seed))

    heads, *lines, rest = command("runs", "-n", "2").out.splitlines()
    rows = command("runs", "adder", "--json").json
    ids = [row["id"] for row in rows[:2]]

    assert heads.split()[:7] == ["run", "kind", "environments", "model", "episodes", "reward", "status"]
    assert heads.endswith("terms of the reward")
    assert [line.split()[0] for line in lines] == ids
    assert lines[0].split()[1:5] == ["eval", "cli/Adder-v0", "mock", "2"]
    assert rest == "and 1 older runs; -n 0 lists all"
    assert [row["created"] for row in rows] == sorted((row["created"] for row in rows), reverse=True)
    assert command("runs", "nowhere").code == 2
    assert f"view.html#/compare/{'/'.join(ids)} (" in command("view", *ids, "--no-browser").out


@pytest.mark.parametrize("version", ["\ud800", "\x1b[2J", float("nan"), [[]], 10**400])
def test_a_run_with_a_strange_layout_version_is_left_out_and_the_others_are_shown(
    version, tmp_path, monkeypatch
):
    for name in ("good", "strange"):
        RunWriter.create("x", runs_dir=tmp_path, run_id=name).close()
    file = tmp_path / "strange" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": version}))
    terminal, page = Terminal(), tmp_path / "page.html"
    monkeypatch.setattr(sys, "stdout", terminal)

    with pytest.raises(SystemExit) as left:
        main(["view", "--output", str(page), "--runs-dir", str(tmp_path)])

    assert left.value.code == 0
    assert "left out: " in terminal.shown
    assert "layout version" in terminal.shown
    assert '"id":"good"' in page.read_text()
