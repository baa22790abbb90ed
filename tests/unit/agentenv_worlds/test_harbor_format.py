"""Harbor's format, read without a container: what is refused, brought up to date, and never resolved."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentenv as ae
from agentenv.core import DependencyMissing, TaskError, UsageError
from agentenv.runs import EvalConfig, Evaluation
from agentenv_worlds.harbor.boxes import Place
from agentenv_worlds.harbor.env import make, splits
from agentenv_worlds.harbor.format import read_task, resolved
from agentenv_worlds.harbor.trial import Trial, TrialOptions, rewards_of
from helpers.containers import TASKS

PLAIN = TASKS / "train" / "count-errors"


@pytest.fixture
def task(tmp_path):
    """A task whose settings a test may write."""
    folder = tmp_path / "task"
    shutil.copytree(PLAIN, folder)

    def written(settings: str):
        (folder / "task.toml").write_text(settings)
        return read_task(folder)

    return written


def test_the_task_set_has_three_kinds_and_a_held_out_split():
    spec = ae.spec(f"harbor:{TASKS}")
    assert spec.tasks is not None
    assert spec.tasks.splits == ("train", "test")
    tasks = [
        read_task(TASKS / split / row.id) for split in spec.tasks.splits for row in spec.tasks.split(split)
    ]
    kinds = [task.settings.metadata["kind"] for task in tasks]
    assert {kind: kinds.count(kind) for kind in kinds} == {"files": 4, "code": 4, "system": 4}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("[environment]\ngpus = 1", "environment.gpus cannot be given here"),
        ('[environment]\nos = "windows"', "environment.os"),
        ('[environment]\nallowed_hosts = ["x.org"]', 'allowed_hosts is for network_mode = "allowlist"'),
        (
            '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["x.org"]',
            "agent.network_mode is 'allowlist'",
        ),
        ('[[environment.mcp_servers]]\nname = "a"', "environment.mcp_servers"),
        ('[environment]\nmemory = "2G"\nmemory_mb = 3', "memory and memory_mb disagree"),
        ('[environment]\nmemory = "much"', "'much' is no size"),
        ('[environment]\nmemory = "9e999G"', "task.toml cannot be read"),
        ("[environment]\nspeed = 3", "environment.speed cannot be given here"),
        ('[[verifier.collect]]\ncommand = "x"', "verifier.collect"),
        ('artifacts = [{source = "/x", service = "db"}]', "service"),
        ('artifacts = ["/x/../y"]', "artifacts.0.source: '/x/../y' leads out of its folder"),
        ('[[steps]]\nname = "../up"', "no name of a folder"),
        ('[[steps]]\nname = "nowhere"', "instruction.md"),
        ("[agent]\ntimeout_sec = 'long'", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = nan", "agent.timeout_sec"),
        ("[verifier]\ntimeout_sec = -1", "verifier.timeout_sec"),
        ("[environment]\nmemory_mb = 0", "environment.memory_mb"),
        ("[environment]\nmemory_mb = 99999999999999999999", "environment.memory_mb"),
        ("[environment]\ncpus = 1e300", "environment.cpus"),
        ("verifier = 3", "verifier"),
        ("environment = 3", "environment"),
        ('[agent]\nnetwork_mode = "no-network"', "agent.network_mode is 'no-network'"),
        ('[verifier]\nnetwork_mode = "no-network"', "verifier.network_mode is 'no-network'"),
        ("x = " + "[" * 5000, "task.toml cannot be read"),
        ("[agent", "task.toml cannot be read"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(task, settings, named):
    with pytest.raises(TaskError) as refused:
        task(settings)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("environment/singularity-compose.yaml", "environment/singularity-compose.yaml is not played"),
        ("tests/docker-compose.yaml", "tests/docker-compose.yaml is not played"),
        ("tests", "there is no tests"),
    ],
)
def test_services_in_other_files_and_a_task_without_tests_are_refused(task, tmp_path, path, told):
    if path == "tests":
        shutil.rmtree(tmp_path / "task" / path)
    else:
        (tmp_path / "task" / path).write_text("services: {}\n")
    with pytest.raises(TaskError, match=told):
        task("")


def test_a_network_that_the_container_has_anyway_is_no_reason_to_refuse(task):
    read = task(
        '[environment]\nnetwork_mode = "no-network"\n[agent]\nnetwork_mode = "no-network"\n'
        '[verifier]\nenvironment_mode = "separate"\nnetwork_mode = "public"'
    )
    place, _ = Place.of_verifier(read, read.steps[0], {})
    assert place.network == "open"


@pytest.mark.parametrize("name", ["instruction.md", "tests/secret", "solution", "environment"])
def test_links_out_of_a_task_are_refused(task, tmp_path, name):
    link = tmp_path / "task" / name
    shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
    link.symlink_to("/etc/passwd" if "." in name else "/etc")
    with pytest.raises(TaskError, match="is a link out of the task"):
        task("")


def test_folders_with_odd_names_are_tasks(tmp_path):
    for name in ("a b;$(x)", "é\n", "-rf", "%s{}"):
        shutil.copytree(PLAIN, tmp_path / "odd é;" / name)
    spec = ae.spec(f"harbor:{tmp_path / 'odd é;'}")
    assert spec.tasks is not None
    assert {task.id for task in spec.tasks} == {"a b;$(x)", "é\n", "-rf", "%s{}"}


def test_old_keys_are_brought_up_to_date(task):
    old = 'allow_internet = "no"\nmemory = "2G"\nstorage = "512M"\ngpus = 0\n[verifier]\ncollect = []\n[tags]\na = 1'
    environment = task(f'version = "1.0"\n[environment]\n{old}').settings.environment
    assert environment.network_mode == "no-network"
    assert (environment.memory_mb, environment.storage_mb) == (2048, 512)


def test_a_change_of_any_file_changes_the_digest(task, tmp_path):
    before = task("").digest
    (tmp_path / "task" / "tests" / "answer").write_text("14\n")
    assert task("").digest != before


def test_variables_of_this_machine_are_read_only_if_they_are_named(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    values = {"A": "${HF_TOKEN:-none} x", "B": "$HF_TOKEN"}
    assert resolved(values, frozenset(), where="t") == {"A": "none x", "B": "$HF_TOKEN"}
    assert resolved(values, frozenset({"HF_TOKEN"}), where="t")["A"] == "secret x"
    with pytest.raises(TaskError, match="t wants the variable HF_TOKEN of this machine"):
        resolved({"A": "${HF_TOKEN}"}, frozenset(), where="t")
    with pytest.raises(TaskError, match="GONE"):
        resolved({"A": "${GONE}"}, frozenset({"GONE"}), where="t")


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.binary(max_size=30),
    st.none() | st.binary(max_size=30),
)
def test_the_reward_of_json_wins_and_is_a_finite_number(value, text, data):
    rewards = {"reward": value, "kept": 1.0}
    assert rewards_of(json.dumps(rewards).encode(), text) == rewards
    assert rewards_of(json.dumps(value).encode(), None) == {"reward": value}
    assert rewards_of(None, f" {value!r}\n".encode()) == {"reward": value}
    with suppress(ValueError):
        assert all(math.isfinite(one) for one in rewards_of(data, text).values())


BROKEN = [b"", b"{", b"NaN", b'{"reward": 1e999}', b"1" + b"0" * 400, b'{"reward": "1"}', b'{"reward": null}']


@pytest.mark.parametrize("data", [*BROKEN, b"[1]", b'"x"'])
def test_a_broken_reward_is_an_error_and_not_zero(data):
    with pytest.raises(ValueError, match="verifier"):
        rewards_of(data, b"1.0")
    with pytest.raises(ValueError, match="neither"):
        rewards_of(None, None)


def test_rewards_of_steps_are_their_mean_in_which_missing_keys_count_zero_and_missing_steps_do_not():
    trial = Trial(read_task(TASKS / "test" / "two-steps"), TrialOptions())
    trial.rewards = [{"reward": 1.0, "speed": 4.0}]
    assert trial.total() == {"reward": 1.0, "speed": 4.0}
    trial.rewards.append({"reward": 0.5})
    assert trial.total() == {"reward": 0.75, "speed": 2.0}


def test_a_separate_verifier_gets_an_image_of_its_own_or_a_fresh_one(task, tmp_path):
    read = task('[verifier]\nenvironment_mode = "separate"')
    place, has_tests = Place.of_verifier(read, read.steps[0], {})
    assert (place.build.name, has_tests) == ("environment", False)
    (tmp_path / "task" / "tests" / "Dockerfile").write_text("FROM x\n")
    place, has_tests = Place.of_verifier(read, read.steps[0], {})
    assert (place.build.name, has_tests) == ("tests", True)


@pytest.mark.parametrize(("of_step", "build"), [("", None), ('docker_image = "own"', "own")])
def test_a_dockerfile_of_a_step_comes_before_an_image_of_its_task(task, tmp_path, of_step, build):
    step = tmp_path / "task" / "steps" / "first"
    shutil.copytree(TASKS / "test" / "two-steps" / "steps" / "first", step)
    (step / "tests" / "Dockerfile").write_text("FROM x\n")
    settings = '[verifier.environment]\ndocker_image = "image"\n[[steps]]\nname = "first"\n'
    read = task(settings + (f"[steps.verifier.environment]\n{of_step}" if of_step else ""))

    place, has_tests = Place.of_verifier(read, read.steps[0], {})

    assert (place.part.docker_image, place.build, has_tests) == (build, step / "tests", True)


STEPS = """
[agent]
user = "worker"
timeout_sec = 50
[verifier]
user = "judge"
timeout_sec = 900
env = {A = "task", B = "task"}
[[steps]]
name = "first"
[[steps]]
name = "second"
agent = {user = 7}
healthcheck = {command = "true"}
[steps.verifier]
user = "other"
timeout_sec = 5
env = {B = "step"}
environment_mode = "separate"
"""


def test_a_step_has_what_its_task_has_where_it_says_nothing(task, tmp_path):
    for name in ("first", "second"):
        shutil.copytree(TASKS / "test" / "two-steps" / "steps" / "first", tmp_path / "task" / "steps" / name)

    first, second = task(STEPS).steps

    assert (first.agent.user, first.agent.timeout_sec, first.healthcheck) == ("worker", 50, None)
    assert (second.agent.user, second.agent.timeout_sec) == (7, 50)
    assert second.healthcheck is not None
    # Harbor gives each step's verifier 600 s, unless the step says otherwise.
    assert (first.verifier.user, first.verifier.timeout_sec) == ("judge", 600)
    assert (second.verifier.user, second.verifier.timeout_sec) == ("other", 5)
    assert first.verifier.env == {"A": "task", "B": "task"}
    assert second.verifier.env == {"A": "task", "B": "step"}
    assert [step.verifier.is_separate for step in (first, second)] == [False, True]


@pytest.mark.skipif(find_spec("harbor") is not None, reason="Harbor is installed: its own tests ask it")
async def test_a_runtime_of_harbor_names_the_extra_that_brings_it():
    told = r"env\.runtime=modal .*\[harbor\]'?, with Python 3\.12"
    with pytest.raises(DependencyMissing, match=told):
        make(runtime="modal")
    with pytest.raises(DependencyMissing, match=told):
        await make.prepare(runtime="modal")


def a_folder(tmp_path, *refused: str):
    """A folder of three tasks, of which the named ones need a GPU."""
    for name in ("count-errors", "fix-add", "fix-median"):
        shutil.copytree(TASKS / "train" / name, tmp_path / name)
        if name in refused:
            (tmp_path / name / "task.toml").write_text("[environment]\ngpus = 1\n")
    return tmp_path


def test_a_refused_task_leaves_the_others_to_be_played_and_is_counted_beside_the_mean(tmp_path, caplog):
    def evaluation(folder, **options):
        return Evaluation(EvalConfig(envs=(f"harbor:{folder}",), model="scripted:Done.", **options))

    folder = a_folder(tmp_path / "one", "count-errors", "fix-median")
    played = evaluation(folder)
    assert [task.id for (tasks,) in [played.tasks] for task in tasks] == ["fix-add"]
    assert "2 left out that cannot be played" in played.terms[0]
    for name in ("count-errors", "fix-median"):
        assert f"left out: {folder / name}" in caplog.text
    assert "environment.gpus cannot be given here" in caplog.text

    few = evaluation(a_folder(tmp_path / "other", "fix-add", "fix-median"), num_tasks=1)
    assert [task.id for task in few.tasks[0]] == ["count-errors"]
    assert few.terms[0] == "1 task, none held out"  # the refused ones were not read


async def test_one_refused_task_refuses_all_where_that_is_asked_for_and_where_there_is_no_other(tmp_path):
    one = a_folder(tmp_path / "one", "fix-median")
    with pytest.raises(TaskError, match="fix-median"):
        async with ae.spec(f"harbor:{one}").prepare(skip="refuse"):
            pass
    every = a_folder(tmp_path / "every", "count-errors", "fix-add", "fix-median")
    with pytest.raises(TaskError, match=r"none of the 3 tasks can be played, the first: .*count-errors"):
        list(ae.spec(f"harbor:{every}").tasks)


def test_settings_are_checked(tmp_path):
    for options, told in (
        ({"network": "host"}, "network must be"),
        ({"runtime": "modal", "agent": "codex"}, r"env\.agent cannot be played with env\.runtime=modal"),
        ({"agent": "codecs"}, "no agent that is known"),
        ({"agent": "codex", "images": True}, r"env\.images is a tool of ours"),
        ({"skip": "all"}, "skip must be name or refuse"),
    ):
        with pytest.raises(UsageError, match=told):
            make(**options)
    with pytest.raises(UsageError, match="there is no folder"):
        splits(tmp_path / "none")
    with pytest.raises(UsageError, match="holds no task"):
        splits(tmp_path)
