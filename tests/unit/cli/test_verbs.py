"""The verbs on stored runs: diff, replay, rescore, export, import; and new, doctor, train."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agentenv import training
from agentenv.cli import main
from agentenv.cli.new import files_of
from agentenv.core import (
    DependencyMissing,
    StopReason,
    TokenSequence,
    TokenSpan,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    install_line,
)
from agentenv.core.installed import dependency
from agentenv.envs import registry
from agentenv.runs import compare
from agentenv.runs.compare import first_divergence
from agentenv.runs.store import Run, RunStatus, RunWriter, find_run, list_runs
from agentenv.testing import tool_call
from agentenv_bridges import from_atif, from_openai, to_atif, to_openai, to_sft

GUESSER = '''
import agentenv as ae


class Guesser(ae.ToolEnv):
    """Say a number."""

    def start(self, want: int) -> str:
        self.want = want
        return f"Say {want}."

    @ae.tool
    def double(self, x: int) -> int:
        """Double a number."""
        return 2 * x

    def reward(self, answer: str) -> float:
        return float(str(self.want) in answer)


def half(answer):
    return 0.5


ae.register("verbs/Guesser-v0", Guesser, tasks=[{"want": n} for n in range(10, 30)])
'''


@pytest.fixture(scope="module")
def guesser(tmp_path_factory):
    path = tmp_path_factory.mktemp("envs") / "guesser.py"
    path.write_text(GUESSER)
    yield str(path)
    registry.remove("verbs/Guesser-v0")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return int(stop.value.code or 0)


def played(guesser: str, model: str, tmp_path: Path) -> str:
    """Play six tasks one after another, so that episode n of the run is of task n."""
    run("eval", guesser, "-m", model, "-n", "6", "-o", "concurrency=1", "--json")
    return find_run("last").id


def tool_episode(member: int = 0, reward: float = 1.0, tokens: tuple[int, ...] = (7, 8, 9)) -> Trajectory:
    call = ToolCall("c1", "double", '{"x": 21}')
    spans = (
        TokenSpan("prompt", (1, 2)),
        TokenSpan("model", (3, 4), (-0.1, -0.2), 0, 0),
        TokenSpan("env", (5, 6), None, None, 0),
        TokenSpan("model", tokens, tuple(-0.1 for _ in tokens), 0, 1),
    )
    messages = (
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Double 21."},
        {"role": "assistant", "content": "", "reasoning_content": "easy", "tool_calls": [call.to_message()]},
        {"role": "tool", "tool_call_id": "c1", "name": "double", "content": "42"},
        {"role": "assistant", "content": "42"},
    )
    turns = (
        Turn(
            0,
            messages[2],
            "stop",
            2,
            start=2,
            tool_calls=(call,),
            tool_results=(ToolResult("c1", "double", "42"),),
        ),
        Turn(1, messages[4], "stop", len(tokens), start=6, reward=reward),
    )
    return Trajectory(
        env_id="verbs/Double-v0", task_id="t0", seed=5, group_id="g", member=member,
        stop_reason=StopReason.FINAL_ANSWER, turns=turns, sequences=(TokenSequence(spans),), messages=messages,
        reward=reward, rewards={"right": reward}, task={"x": 21}, tools=({"type": "function", "function": {"name": "double"}},),
    )  # fmt: skip


def stored(root: Path, name: str, episodes) -> Run:
    with RunWriter.create(name, runs_dir=root, run_id=name) as writer:
        for one in episodes:
            writer.append(one)
    return Run(writer.path)


def test_diff_pairs_tasks_and_finds_where_episodes_part(guesser, tmp_path, capsys):
    low, high = (
        played(guesser, "scripted:11 and 12", tmp_path),
        played(guesser, "scripted:11 and 12 13", tmp_path),
    )
    capsys.readouterr()

    assert run("diff", low, high) == 0
    text = capsys.readouterr().out
    assert run("diff", low, low) == 0
    same = capsys.readouterr().out

    assert "reward 0.333 → 0.500" in text
    assert "1 tasks better · 0 worse · 5 same" in text
    assert "first divergence: task" in text
    assert "episodes agree token by token" in same


def test_diff_of_unrelated_runs_is_refused(guesser, tmp_path, capsys):
    one = played(guesser, "scripted:1", tmp_path)
    stored(tmp_path / "runs", "other", [tool_episode()])

    assert run("diff", one, "other") == 2
    assert "no task has a score in both runs" in capsys.readouterr().err


def test_divergence_names_the_first_token_and_its_turn(tmp_path):
    left, right = tool_episode(), tool_episode(tokens=(7, 0, 9))

    found = first_divergence(left, right)

    assert found is not None
    assert (found.token, found.turn) == (7, 1)
    assert first_divergence(left, left) is None


def test_comparison_counts_tasks_of_one_run_only(tmp_path):
    from dataclasses import replace

    more = replace(tool_episode(), task_id="t1", group_id="g1")
    found = compare(
        stored(tmp_path, "a", [tool_episode(), more]), stored(tmp_path, "b", [tool_episode(reward=0.0)])
    )

    assert (found.only_before, found.only_after, len(found.worse)) == (1, 0, 1)
    assert json.loads(json.dumps(found.as_json()))["worse"] == 1


def test_replay_gives_the_environment_the_same_messages(guesser, tmp_path, capsys):
    name = played(guesser, "scripted:12", tmp_path)
    capsys.readouterr()

    assert run("replay", f"{name}#2") == 0
    assert capsys.readouterr().out.endswith("the same\n")


def test_replay_says_what_changed_in_the_environment(guesser, tmp_path, capsys):
    name = played(guesser, "scripted:12", tmp_path)
    changed = tmp_path / "changed.py"
    changed.write_text(GUESSER.replace("verbs/", "changed/").replace("Say {want}.", "Please say {want}."))
    capsys.readouterr()

    assert run("replay", f"{name}#2", "--env", str(changed), "--json") == 1
    assert "Please say" in json.loads(capsys.readouterr().out)["difference"]
    registry.remove("changed/Guesser-v0")


def test_a_model_goes_on_from_a_turn_that_is_named(guesser, tmp_path, capsys):
    name = played(guesser, "scripted:12", tmp_path)
    capsys.readouterr()

    assert run("replay", name, "--episode", "2", "--from-turn", "0", "-m", "scripted:other 99", "--json") == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert run("replay", f"{name}#2", "-m", "mock") == 2

    assert (group["recorded"], group["branches"]) == (1.0, [0.0])
    assert "--from-turn" in capsys.readouterr().err


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


def test_replay_gives_a_sandbox_to_an_environment_that_needs_one(tmp_path, capsys):
    (tmp_path / "runs.py").write_text(SANDBOXED)
    (tmp_path / "script.json").write_text(json.dumps([tool_call("run", code="print(2 * 3)"), "six"]))
    name = played(str(tmp_path / "runs.py"), f"scripted:{tmp_path / 'script.json'}", tmp_path)
    capsys.readouterr()

    assert run("replay", name, "--episode", "0", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    registry.remove("verbs/Runs-v0")

    assert result == {"same": True, "difference": "", "reward": [1.0, 1.0]}


def test_rescore_writes_a_new_run_and_leaves_the_old(guesser, tmp_path, capsys):
    name = played(guesser, "scripted:12", tmp_path)
    before = (tmp_path / "runs" / name / "trajectories.jsonl").read_bytes()
    capsys.readouterr()

    assert run("rescore", name, "--reward", f"{guesser}:half", "--json") == 0
    report = json.loads(capsys.readouterr().out)

    assert report["reward"]["mean"] == 0.5
    assert (tmp_path / "runs" / name / "trajectories.jsonl").read_bytes() == before
    assert find_run(report["run"]).load(0).sequences == find_run(name).load(0).sequences


@pytest.mark.parametrize("reward", ["nothing", "gone.py:f", "json:gone"])
def test_rescore_with_a_reward_that_is_not_there_is_refused(guesser, tmp_path, reward, capsys):
    name = played(guesser, "scripted:12", tmp_path)

    assert run("rescore", name, "--reward", reward) == 2
    assert "fix:" in capsys.readouterr().err


def test_openai_rows_come_back_with_messages_calls_and_reward():
    old = tool_episode(member=3)

    new = next(iter(from_openai(json.loads(json.dumps(list(to_openai([old])))))))

    assert (new.messages, new.task, new.member, new.reward) == (old.messages, old.task, 3, 1.0)
    assert new.turns[0].tool_results[0].content == "42"
    assert not new.trainable


def test_sft_rows_are_the_good_episodes():
    rows = list(to_sft([tool_episode(), tool_episode(1, reward=0.0)]))

    assert [len(row["messages"]) for row in rows] == [5]


def test_atif_keeps_tokens_mask_and_reward_and_comes_back():
    old = tool_episode()

    document = json.loads(json.dumps(to_atif(old, model="m")))
    new = next(iter(from_atif([document])))
    steps = document["steps"]

    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent"]
    assert steps[3]["metrics"]["completion_token_ids"] == [7, 8, 9]
    assert steps[3]["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 5, 6]
    assert steps[3]["metrics"]["extra"] == {"reward": 1.0, "loss_mask": [True, True, True], "sequence": 0}
    assert new.sequences == old.sequences
    assert new.reward == 1.0
    assert new.answer == "42"
    assert new.turns[0].message["reasoning_content"] == "easy"


def test_arguments_that_are_no_object_survive_atif():
    from dataclasses import replace

    old = tool_episode()
    call = ToolCall("c1", "double", "not json")
    said = {**old.turns[0].message, "tool_calls": [call.to_message()]}
    messages = tuple(said if message == old.turns[0].message else message for message in old.messages)

    new = next(iter(from_atif([to_atif(replace(old, messages=messages))])))

    assert new.turns[0].tool_calls[0].arguments == "not json"


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("atif") is None, reason="the package atif is not installed")
def test_atif_documents_load_in_the_reference_models():
    import atif

    assert atif.Trajectory.model_validate(to_atif(tool_episode(), model="m")).steps[2].tool_calls


def test_export_and_import_through_files(guesser, tmp_path, capsys):
    name = played(guesser, "scripted:12", tmp_path)
    assert run("export", name, "--output", "out.jsonl") == 0
    assert run("import", "out.jsonl") == 0
    assert "6 episodes" in capsys.readouterr().out
    imported = find_run("last")

    assert [one.reward for one in imported.summaries] == [one.reward for one in find_run(name).summaries]


def test_a_directory_of_documents_is_imported_whole(guesser, tmp_path, capsys):
    name = played(guesser, "scripted:12", tmp_path)
    assert run("export", name, "--as", "atif", "--output", "documents") == 0
    assert run("import", "documents") == 0

    assert [(one.reward, one.task_id) for one in find_run("last").summaries] == [
        (one.reward, one.task_id) for one in find_run(name).summaries
    ]


def test_a_directory_without_documents_is_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()

    assert run("import", "empty") == 2
    assert "there is no .json file in empty" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named_with_what_to_do(capsys):
    assert run("import", "nothing.jsonl") == 2
    said = capsys.readouterr().err
    assert "cannot read nothing.jsonl: No such file" in said
    assert "name a file that has episodes" in said


def test_equal_rows_become_members_of_a_group(tmp_path, capsys):
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 3))

    assert run("import", "rows.jsonl") == 0
    assert [one.member for one in find_run("last").summaries] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"eval": {}, "samples": []}', "logs of Inspect are not read"),
        ('{"messages": []}', "has no list `messages`"),
        ('{"messages": [{"role": "elf"}]}', "no known role"),
        ('{"messages": 1}\nnonsense', "line 2, column 1 is not JSON"),
        ("[1]", "not a JSON object"),
        ('{"schema_version": "9", "steps": []}', "not ATIF"),
    ],
)
def test_import_names_what_is_wrong(tmp_path, text, says, capsys):
    (tmp_path / "bad.jsonl").write_text(text)

    assert run("import", "bad.jsonl") == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_new_package_refuses_a_directory_that_is_not_empty(tmp_path, capsys):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "mine.txt").write_text("")

    assert run("new", "shop") == 2
    assert "not empty" in capsys.readouterr().err
    assert run("new", "9lives") == 2


def test_new_package_has_entry_point_test_readme_and_ci():
    files = files_of(["shop", "math"])

    assert {
        "pyproject.toml",
        "shop_math.py",
        "test_shop_math.py",
        "README.md",
        ".gitignore",
        ".github/workflows/test.yml",
    } == set(files)
    assert (
        "json?url=https://raw.githubusercontent.com/OWNER/shop-math/main/check.json&query="
        in files["README.md"]
    )
    assert '"shop/ShopMath-v0" = "shop_math:SPEC"' in files["pyproject.toml"]
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["dependencies"] == [dependency()]
    assert project["tool"]["hatch"].get("metadata", {}).get("allow-direct-references", False) == (
        "@" in dependency()
    )
    assert "@" not in files["shop_math.py"].replace("@ae.tool", "")


ADDER = '''
import agentenv as ae


class Adder(ae.ToolEnv):
    """Ask for a sum."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    def reward(self, answer: str) -> float:
        return float(str(self.want) == answer)


ae.register("sums/Adder-v0", Adder, tasks={"train": [{"x": n, "y": 1} for n in range(30)], "test": [{"x": 7, "y": 7}]})
'''


def test_new_makes_the_package_of_a_file(tmp_path, capsys):
    (tmp_path / "adder.py").write_text(ADDER)

    assert run("new", "my-sums", "--from", "adder.py") == 0

    made = tmp_path / "my-sums"
    assert (made / "my_sums.py").read_text() == ADDER
    points = tomllib.loads((made / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points == {"agentenv.envs": {"sums/Adder-v0": "my_sums:Adder"}}
    assert "Ask for a sum." in (made / "README.md").read_text()
    assert "30 train, 1 test" in (made / "README.md").read_text()
    compile((made / "test_my_sums.py").read_text(), "test_my_sums.py", "exec")
    registry.remove("sums/Adder-v0")
    assert run("check", "my-sums/my_sums.py") == 0


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no.py", "no file"),
        ("countdown/Nothing-v0", "unknown"),
        ("agentenv/Calculator-v0", "does not define Calculator"),
    ],
)
def test_new_refuses_what_is_no_file_with_an_environment(source, says, capsys):
    assert run("new", "mine", "--from", source) == 2
    assert says in capsys.readouterr().err
    assert not Path("mine").exists()


@pytest.mark.slow
def test_new_package_passes_check_eval_and_its_own_tests(tmp_path):
    assert run("new", "shop-math") == 0
    for words in (
        ["-m", "agentenv", "check", "shop-math/shop_math.py"],
        ["-m", "agentenv", "eval", "shop-math/shop_math.py", "-n", "5"],
    ):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(tests, capture_output=True, text=True, check=False, cwd=tmp_path / "shop-math")
    assert done.returncode == 0, done.stdout + done.stderr


def test_doctor_says_which_isolation_runs_here(capsys):
    assert run("doctor", "--json") == 0

    found = json.loads(capsys.readouterr().out)["sandbox"]

    assert {finding["name"] for finding in found["findings"]} >= {"namespace", "landlock", "e2b"}
    assert all(finding["detail"] for finding in found["findings"])
    assert found["text"].startswith("sandbox: ")


def test_list_says_which_models_want_a_key_that_is_not_set(capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)

    assert run("list", "--models", "--json") == 0
    rows = {row["form"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert (rows["openai:NAME"]["set"], rows["anthropic:NAME"]["set"]) == (True, False)
    assert rows["anthropic:NAME"]["key"] == "ANTHROPIC_API_KEY"
    assert run("list", "--models", "openai") == 0
    assert "OPENAI_API_KEY is set" in (text := capsys.readouterr().out)
    assert "secret" not in text


def test_doctor_asks_an_api_at_the_address_that_is_given(capsys):
    away = ("-o", "engine.base_url=http://127.0.0.1:9/v1", "-o", "engine.retry_s=0", "-o", "engine.api_key=k")

    assert run("doctor", "-m", "openai:m", *away, "--json") == 1
    assert "openai:m at http://127.0.0.1:9/v1 does not answer" in capsys.readouterr().err
    assert run("doctor", "-m", "openai:m", "-o", "engine.temper=1") == 2


def test_doctor_says_what_a_model_can_do(capsys):
    assert run("doctor", "-m", "mock", "--json") == 0

    found = json.loads(capsys.readouterr().out)

    assert found["model"]["template"]
    assert any(name == "pydantic" and version for name, version, _ in found["packages"])


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from agentenv.render import byte_tokenizer
    from agentenv.training.loop.checkpoint import save_tokenizer

    path = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_ids[0], pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    save_tokenizer(tokenizer, path)
    return str(path)


def test_training_without_torch_names_the_extra_and_makes_no_run(guesser, monkeypatch, capsys):
    monkeypatch.setattr("agentenv.core.errors.find_spec", lambda name: None)

    assert run("train", guesser, "-m", "mock") == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].endswith("needs torch and transformers")
    assert told[2] == f"  fix: {install_line('train')}"
    assert list_runs() == []
    with pytest.raises(DependencyMissing, match=r"GRPOTrainer needs torch"):
        training.__getattr__("GRPOTrainer")


@pytest.mark.slow
def test_training_keeps_metrics_episodes_and_checkpoints_and_resumes(guesser, tiny_model, tmp_path, capsys):
    options = [
        "-k",
        "2",
        "-o",
        "groups_per_step=2",
        "-o",
        "max_turns=2",
        "-o",
        "max_tokens_per_turn=8",
        "-o",
        "save_steps=1",
    ]

    assert run("train", guesser, "-m", tiny_model, "--steps", "2", *options) == 0
    text = capsys.readouterr().out
    trained = find_run("last")
    assert "step 2/2  reward" in text
    assert [line["step"] for line in trained.metrics()] == [1, 2]
    assert len(trained) == 8
    assert trained.vocabulary()
    assert {note["step"] for note in trained.annotations().values()} == {1, 2}

    assert run("train", "--resume", trained.id, "--steps", "3") == 0
    again = find_run(trained.id)
    assert "resumed at step 2" in capsys.readouterr().out
    assert [line["step"] for line in again.metrics()] == [1, 2, 3]
    assert (len(again), again.status) == (12, RunStatus.FINISHED)


def torchrun(*words: str, until: str = "") -> tuple[int, str]:
    """Run a command in two processes, interrupted at a line if one is named; return what both printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*launcher, "-m", "agentenv", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    text = ""
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            text += line
            if until and until in line:
                process.send_signal(signal.SIGINT)
    return process.returncode, text


@pytest.mark.slow
def test_two_processes_train_and_resume_one_run(guesser, tiny_model, tmp_path):
    options = ["groups_per_step=3", "max_turns=1", "max_tokens_per_turn=8", "save_steps=1"]
    words = [word for option in options for word in ("-o", option)]

    code, text = torchrun("train", guesser, "-m", tiny_model, "--steps", "2", "-k", "2", *words)
    assert code == 0
    (trained,) = list_runs()
    assert [text.count(f"step {step}/2  reward") for step in (1, 2)] == [1, 1]
    assert [line["step"] for line in trained.metrics()] == [1, 2]
    assert len({one.key for one in trained.summaries}) == 12
    assert all(len(group) == 2 for group in trained.groups())
    assert len(trained.annotations()) == 12

    code, text = torchrun("train", "--resume", "last", "--steps", "3")
    assert code == 0
    (again,) = list_runs()
    assert text.count("resumed at step 2") == 1
    assert [line["step"] for line in again.metrics()] == [1, 2, 3]
    assert (len(again), again.status) == (18, RunStatus.FINISHED)


@pytest.mark.slow
def test_two_processes_that_are_interrupted_keep_their_episodes_and_a_checkpoint(
    guesser, tiny_model, tmp_path
):
    words = ["-k", "2", "-o", "groups_per_step=3", "-o", "max_turns=1", "-o", "max_tokens_per_turn=8"]

    code, text = torchrun("train", guesser, "-m", tiny_model, "--steps", "9999", *words, until="step    2/")
    (trained,) = list_runs()
    steps = len(trained.metrics())
    assert code != 0
    assert text.count("continue with: agentenv train --resume") == 1
    assert trained.status is RunStatus.INTERRUPTED
    assert len(trained) >= 6 * steps >= 12
    assert len(list((trained.path / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
def test_the_failure_of_a_second_process_fails_the_run_and_loses_no_episode(tiny_model, tmp_path):
    Path("broken.py").write_text(
        GUESSER.replace("verbs/Guesser", "verbs/Broken")
        + """

import os
from agentenv.training import GRPOTrainer

step = GRPOTrainer.step


def broken(trainer, groups):
    if trainer.steps_done == 1 and os.environ["RANK"] == "1":
        raise ValueError("out of luck")
    return step(trainer, groups)


GRPOTrainer.step = broken
"""
    )
    words = ["-k", "2", "-o", "groups_per_step=4", "-o", "max_turns=1", "-o", "max_tokens_per_turn=8"]

    code, _ = torchrun("train", "broken.py", "-m", tiny_model, "--steps", "3", *words)
    (trained,) = list_runs()
    assert code != 0
    assert (trained.status, trained.info.note) == (RunStatus.FAILED, "ValueError: out of luck")
    assert len(trained) >= 12


def test_resuming_what_is_no_training_is_refused(guesser, tmp_path, capsys):
    name = played(guesser, "scripted:12", tmp_path)

    assert run("train", "--resume", name) == 2
    assert "agentenv eval --resume" in capsys.readouterr().err


def test_a_model_in_place_of_a_run_is_told_with_the_option_for_it(capsys):
    assert run("doctor", "scripted:hi") == 2
    assert "agentenv doctor -m scripted:hi" in capsys.readouterr().err
