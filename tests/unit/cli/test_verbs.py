"""The verbs on stored runs: diff, replay, rescore, export, import; and new, doctor, train."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv import training
from agentenv.cli.new import files_of
from agentenv.core import DependencyMissing, TokenSequence, install_line
from agentenv.core.installed import dependency
from agentenv.runs import compare
from agentenv.runs.compare import first_divergence
from agentenv.runs.store import RunStatus, find_run, list_runs
from agentenv.testing import tool_call
from agentenv_bridges import to_atif
from helpers.sample_runs import episode, span, write_run
from scenes import saved_model


@pytest.fixture
def played(adder, command):
    """A run of six tasks one after another, so that episode n is of task n and wants n + 1."""

    def play(model: str = "scripted:3", env: str = adder) -> str:
        command("eval", env, "-m", model, "-n", "6", "-o", "concurrency=1", "--json")
        return find_run("last").id

    return play


# diff -----------------------------------------------------------------------------------------


def test_diff_pairs_tasks_and_finds_where_episodes_part(played, command):
    low, high = played("scripted:11 and 12"), played("scripted:11 and 12 13")

    text = command("diff", low, high).out
    same = command("diff", low, low).out

    assert "reward 0.333 → 0.500" in text
    assert "1 tasks better · 0 worse · 5 same" in text
    assert "first divergence: task" in text
    assert "episodes agree token by token" in same


def test_divergence_names_the_first_token_and_its_turn(tmp_path):
    left = episode(0, 0)
    *spans, last = left.sequences[0].spans
    other = span("model", "17_boxes hold 391 pencils.", 1)
    right = replace(left, sequences=(TokenSequence((*spans, other)),))

    found = first_divergence(left, right)

    assert found is not None
    assert (found.token, found.turn) == (len(left.sequences[0]) - len(last) + 2, 1)
    assert first_divergence(left, left) is None
    before = write_run(tmp_path, "a", [left, episode(1, 0)])
    compared = compare(before, write_run(tmp_path, "b", [episode(0, 0, reward=0.0)]))
    assert (compared.only_before, compared.only_after, len(compared.worse)) == (1, 0, 1)
    assert json.loads(json.dumps(compared.as_json()))["worse"] == 1


# replay and rescore ---------------------------------------------------------------------------


def test_replay_gives_the_environment_the_same_messages_and_says_what_changed(adder, played, command):
    name = played()
    same = command("replay", f"{name}#2")
    text = Path(adder).read_text()
    Path("changed.py").write_text(text.replace("cli/", "changed/").replace("What is", "Please say"))
    other = command("replay", f"{name}#2", "--env", "changed.py", "--json")

    assert (same.code, other.code) == (0, 1)
    assert same.out.endswith("the same\n")
    assert "Please say" in other.json["difference"]


def test_a_model_goes_on_from_a_turn_that_is_named(played, command):
    words = ("--episode", "2", "--from-turn", "0", "-m", "scripted:other 99", "--json")
    (group,) = command("replay", played(), *words).json["groups"]

    assert (group["recorded"], group["branches"]) == (1.0, [0.0])


SANDBOXED = '''
import agentenv as ae


class Runs(ae.ToolEnv):
    """Run code."""

    def start(self, n: int) -> str:
        return f"Run {n}."

    @ae.tool
    async def run(self, code: str, context: ae.Context) -> str:
        """Run code."""
        return (await context.sandbox.run_code(code)).text()

    def reward(self, trajectory) -> float:
        return float("6" in trajectory.turns[0].tool_results[0].text)


ae.register("verbs/Runs-v0", Runs, tasks=[{"n": 1}], sandbox="none")
'''


def test_replay_gives_a_sandbox_to_an_environment_that_needs_one(played, command):
    Path("runs.py").write_text(SANDBOXED)
    Path("script.json").write_text(json.dumps([tool_call("run", code="print(2 * 3)"), "six"]))

    said = command("replay", played("scripted:script.json", "runs.py"), "--episode", "0", "--json")

    assert said.code == 0
    assert said.json == {"same": True, "difference": "", "reward": [1.0, 1.0]}


def test_rescore_writes_a_new_run_and_leaves_the_old(adder, played, command):
    old = find_run(played())
    before = (old.path / "trajectories.jsonl").read_bytes()

    report = command("rescore", old.id, "--reward", f"{adder}:half", "--json").json

    assert report["reward"]["mean"] == 0.5
    assert (old.path / "trajectories.jsonl").read_bytes() == before
    assert find_run(report["run"]).load(0).sequences == old.load(0).sequences


# export and import ----------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("atif") is None, reason="the package atif is not installed")
def test_atif_documents_load_in_the_reference_models():
    import atif

    assert atif.Trajectory.model_validate(to_atif(episode(0, 0), model="m")).steps[1].tool_calls


@pytest.mark.parametrize(
    "words", [("--output", "out.jsonl"), ("--as", "atif", "--output", "documents")], ids=str
)
def test_what_is_exported_is_imported_also_from_a_directory_of_documents(played, command, words):
    old = find_run(played())
    assert command("export", old.id, *words).code == 0
    said = command("import", words[-1])
    new = find_run("last")

    assert said.code == 0
    assert "6 episodes" in said.out
    assert [(one.reward, one.task_id) for one in new.summaries] == [
        (one.reward, one.task_id) for one in old.summaries
    ]


def test_equal_rows_become_members_of_a_group(command):
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    Path("rows.jsonl").write_text("\n".join([json.dumps(row)] * 3))

    assert command("import", "rows.jsonl").code == 0
    assert [one.member for one in find_run("last").summaries] == [0, 1, 2]


# new ------------------------------------------------------------------------------------------


def test_new_package_has_entry_point_test_readme_and_ci():
    files = files_of(["shop", "math"])
    project = tomllib.loads(files["pyproject.toml"])
    badge = "json?url=https://raw.githubusercontent.com/OWNER/shop-math/main/check.json&query="

    assert set(files) == {
        *("pyproject.toml", "shop_math.py", "test_shop_math.py", "README.md", ".gitignore"),
        ".github/workflows/test.yml",
    }
    assert badge in files["README.md"]
    assert '"shop/ShopMath-v0" = "shop_math:SPEC"' in files["pyproject.toml"]
    assert project["project"]["dependencies"] == [dependency()]
    direct = project["tool"]["hatch"].get("metadata", {}).get("allow-direct-references", False)
    assert direct == ("@" in dependency())
    assert "@" not in files["shop_math.py"].replace("@ae.tool", "")


def test_new_makes_the_package_of_a_file(adder, tmp_path, command):
    text = Path(adder).read_text()
    splits = "tasks={'train': [{'x': i, 'y': 1} for i in range(30)], 'test': [{'x': 7, 'y': 7}]}"
    text = text.replace("tasks=[{", "tasks=OLD[{").partition("tasks=OLD")[0] + f"{splits})\n"
    Path(adder).write_text(text)

    assert command("new", "my-sums", "--from", adder).code == 0

    made = tmp_path / "my-sums"
    assert (made / "my_sums.py").read_text() == text
    points = tomllib.loads((made / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points == {"agentenv.envs": {"cli/Adder-v0": "my_sums:Adder"}}
    assert "Ask for a sum." in (made / "README.md").read_text()
    assert "30 train, 1 test" in (made / "README.md").read_text()
    compile((made / "test_my_sums.py").read_text(), "test_my_sums.py", "exec")


@pytest.mark.slow
def test_new_package_passes_check_eval_and_its_own_tests(tmp_path, command):
    assert command("new", "shop-math").code == 0
    for words, folder in (
        (["agentenv", "check", "shop-math/shop_math.py"], tmp_path),
        (["agentenv", "eval", "shop-math/shop_math.py", "-n", "5"], tmp_path),
        (["pytest", "-q", "-p", "no:cacheprovider"], tmp_path / "shop-math"),
    ):
        line = [sys.executable, "-m", *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr


# doctor and list ------------------------------------------------------------------------------


def test_doctor_says_what_a_model_can_do_and_which_isolation_runs_here(command):
    model, here = command("doctor", "-m", "mock", "--json").json, command("doctor", "--json").json["sandbox"]

    assert model["model"]["template"]
    assert any(name == "pydantic" and version for name, version, _ in model["packages"])
    scripted = command("doctor", "-m", "scripted:Hi", "--json").json
    assert not [finding for finding in (*model["engine"], *scripted["engine"]) if finding["ok"] is False]
    assert {finding["name"] for finding in here["findings"]} >= {"namespace", "landlock", "e2b"}
    assert all(finding["detail"] for finding in here["findings"])
    assert here["text"].startswith("sandbox: ")


def test_list_says_which_models_want_a_key_that_is_not_set(command, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)

    rows = {row["form"]: row for row in command("list", "--models", "--json").json["models"]}
    text = command("list", "--models", "openai").out

    assert (rows["openai:NAME"]["set"], rows["anthropic:NAME"]["set"]) == (True, False)
    assert rows["anthropic:NAME"]["key"] == "ANTHROPIC_API_KEY"
    assert "OPENAI_API_KEY is set" in text
    assert "secret" not in text


# train ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    pytest.importorskip("torch")
    return saved_model(tmp_path_factory.mktemp("tiny"))


def options(**values: int) -> list[str]:
    given = {"max_turns": 1, "max_tokens_per_turn": 8, **values}
    return ["-k", "2", *(word for name, value in given.items() for word in ("-o", f"{name}={value}"))]


def test_training_without_torch_names_the_extra_and_makes_no_run(adder, monkeypatch, command):
    monkeypatch.setattr("agentenv.core.errors.find_spec", lambda name: None)
    said = command("train", adder, "-m", "mock")
    error, _, fix = said.err.splitlines()

    assert said.code == 2
    assert error.endswith("needs torch and transformers")
    assert fix == f"  fix: {install_line('train')}"
    assert list_runs() == []
    with pytest.raises(DependencyMissing, match=r"GRPOTrainer needs torch"):
        training.__getattr__("GRPOTrainer")


@pytest.mark.slow
def test_training_keeps_metrics_episodes_and_checkpoints_and_resumes(adder, tiny_model, command):
    given = options(groups_per_step=2, max_turns=2, save_steps=1)

    said = command("train", adder, "-m", tiny_model, "--steps", "2", *given)
    trained = find_run("last")
    assert said.code == 0
    assert "step 2/2  reward" in said.out
    assert [line["step"] for line in trained.metrics()] == [1, 2]
    assert len(trained) == 8
    assert trained.vocabulary()
    assert {note["step"] for note in trained.annotations().values()} == {1, 2}

    said = command("train", "--resume", trained.id, "--steps", "3")
    again = find_run(trained.id)
    assert said.code == 0
    assert "resumed at step 2" in said.out
    assert [line["step"] for line in again.metrics()] == [1, 2, 3]
    assert (len(again), again.status) == (12, RunStatus.FINISHED)


def torchrun(*words: str) -> str:
    """Run a command in two processes; return what both printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "agentenv", "train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_processes_train_and_resume_one_run(adder, tiny_model):
    given = options(groups_per_step=3, save_steps=1)

    text = torchrun(adder, "-m", tiny_model, "--steps", "2", *given)
    (trained,) = list_runs()
    assert [text.count(f"step {step}/2  reward") for step in (1, 2)] == [1, 1]
    assert [line["step"] for line in trained.metrics()] == [1, 2]
    assert len({one.key for one in trained.summaries}) == 12
    assert all(len(group) == 2 for group in trained.groups())
    assert len(trained.annotations()) == 12

    text = torchrun("--resume", "last", "--steps", "3")
    (again,) = list_runs()
    assert text.count("resumed at step 2") == 1
    assert [line["step"] for line in again.metrics()] == [1, 2, 3]
    assert (len(again), again.status) == (18, RunStatus.FINISHED)
