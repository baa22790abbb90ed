"""Tasks in Harbor's format in real containers: scores, forgeries, failures, agents."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core import RunLimits
from agentenv.engine import ScriptedEngine
from agentenv.runner import Runner
from agentenv.runs import find_run
from agentenv.testing import check_env
from agentenv_containers import PODMAN, Container
from agentenv_containers.runtime import owner
from agentenv_worlds.harbor import boxes
from helpers.agents import RENDERER, TOKENIZER, by_turn, call
from helpers.containers import IMAGE, TASKS, left, needs_podman
from helpers.seeing import plain_png
from helpers.waiting import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.usefixtures("podman")]


@pytest.fixture(scope="module")
def podman():
    needs_podman()
    yield
    assert [name for name in left() if owner() in name] == []


def played(policy, folder, tmp_path, **settings):
    """Play every task of a folder once, and return the summaries by task."""
    result = ae.evaluate(
        f"harbor:{folder}",
        policy,
        runs_dir=str(tmp_path / "runs"),
        group_size=1,
        runner={"concurrency": 3},
        **settings,
    )
    return {summary.task_id: summary for summary in result.summaries}


async def one(policy, folder, limits=None, **settings):
    """Play one task with a function as the model, and return the record."""
    spec = ae.spec(f"harbor:{folder}")
    assert spec.tasks is not None
    runner = Runner(ScriptedEngine(policy, tokenizer=TOKENIZER), RENDERER)
    held = RunLimits(max_context_tokens=None, **(limits or {}))
    return await runner.run_episode(spec.make(**settings), next(iter(spec.tasks)).data, limits=held)


def bash(line: str) -> str:
    """A call of the tool, as the scripted model writes it."""
    return call(json.dumps({"command": line}), "bash")


def alone(tmp_path, name: str, **files: str):
    """A folder with a copy of one task, and files of it that are replaced."""
    folder = tmp_path / "tasks" / name
    shutil.copytree(next(TASKS.glob(f"*/{name}")), folder)
    for path, text in files.items():
        file = folder / path.replace("__", "/").replace("_sh", ".sh").replace("_toml", ".toml")
        file.write_text(text)
    return folder


@pytest.mark.parametrize(("split", "workers"), [("train", 0), ("test", 2)])
def test_the_oracle_earns_full_marks_on_every_task_and_no_process_leaves_a_container(
    split, workers, tmp_path
):
    done = played("oracle", TASKS, tmp_path, split=split, workers=workers)
    assert {name: summary.reward for name, summary in done.items()} == {
        path.name: 1.0 for path in (TASKS / split).iterdir()
    }
    pids = {str(row["pid"]) for row in find_run("last", tmp_path / "runs").workers()}
    assert len(pids) == (workers + 1 if workers else 0)
    assert of(pids | {str(os.getpid())}, left()) == []


@pytest.mark.exhaustive
async def test_a_check_of_a_task_finds_nothing_wrong_and_starts_few_containers(monkeypatch):
    starts: list[str] = []

    async def start(self, start=Container.start):
        starts.append(self.name)
        await start(self)

    monkeypatch.setattr(Container, "start", start)
    report = await check_env(f"harbor:{TASKS / 'train' / 'fix-add'}", timeout_s=600)

    assert report.ok, str(report)
    assert len(starts) <= 22


def test_doing_nothing_earns_nothing_and_its_tokens_are_exact(tmp_path):
    done = played("scripted:Done.", TASKS / "test", tmp_path)
    assert {name: summary.reward for name, summary in done.items()} == dict.fromkeys(done, 0.0)
    for summary in done.values():
        assert summary.untrainable_reason == ""
        assert summary.trained_tokens == summary.sampled_tokens > 0


def of(pids, names) -> list[str]:
    """Those of the containers that processes with these numbers started."""
    return [name for name in names if name.split("-")[2] in pids]


def test_nothing_is_left_of_a_run_that_is_ended_while_rewards_are_awaited(tmp_path):
    checks = "#!/bin/sh\ntouch /verifying; trap '' TERM; sleep 600\n"
    for name in ("count-errors", "fix-add", "fix-median"):
        alone(tmp_path, name, tests__test_sh=checks)
    line = [sys.executable, "-m", "agentenv", "eval", f"harbor:{tmp_path / 'tasks'}", "-m", "scripted:Done."]
    run = subprocess.Popen([*line, "--runs-dir", str(tmp_path)], stdout=subprocess.DEVNULL)

    def mine():
        return of({str(run.pid)}, left())

    def verifies(name):
        looks = subprocess.run(["podman", "exec", name, "ls", "/verifying"], capture_output=True, check=False)
        return looks.returncode == 0

    try:
        wait_until(lambda: len(mine()) == 3 and all(map(verifies, mine())), seconds=120)
    finally:
        run.terminate()
        run.terminate()
        run.wait()
    assert mine() == []


@pytest.mark.exhaustive
def test_nothing_is_left_of_workers_whose_driver_was_killed(tmp_path):
    line = [sys.executable, "-m", "agentenv", "eval", f"harbor:{TASKS / 'test'}", "--workers", "2"]
    line += ["--runs-dir", str(tmp_path), "-m", f"scripted:{bash('sleep 600')}"]
    driver = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        workers = wait_until(lambda: workers_in_containers(driver.pid, 2), seconds=120)
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), seconds=120)
    asyncio.run(PODMAN.sweep())
    assert of(workers, left()) == []


def workers_in_containers(driver: int, number: int) -> set[str]:
    """The numbers of a driver's workers, once so many of them have a container; empty until then."""
    children = Path(f"/proc/{driver}/task/{driver}/children").read_text().split()
    return set(children) if len({name.split("-")[2] for name in of(children, left())}) >= number else set()


async def test_a_model_that_sees_looks_at_images_of_the_machine(tmp_path):
    picture = plain_png((200, 30, 30), 8, 8)
    make = f"mkdir -p shown && cd shown && echo {base64.b64encode(picture).decode()} | base64 -d > a.png"
    looks = [
        call(json.dumps({"path": path}), "view_image") for path in ("cut.png", "a.png", "b.png", "/dev/zero")
    ]
    turns = (bash(f"{make} && echo no > b.png"), bash("head -c 50 a.png > cut.png"), *looks, "Done.")

    record = await one(by_turn(*turns), alone(tmp_path, "fix-loop"), images=True)

    cut, shown, broken, endless = [result for turn in record.turns[2:6] for result in turn.tool_results]
    assert record.error is None
    assert [image.data for sequence in record.sequences for image in sequence.images] == [picture]
    assert [part["type"] for part in shown.content] == ["image_url"]
    assert all(result.is_error for result in (cut, broken, endless))
    assert "cut.png cannot be shown" in cut.content
    assert "b.png cannot be shown" in broken.content
    assert "there is no file /dev/zero" in endless.content


FORGE = """mkdir -p /tests /logs/verifier
echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; echo 1 > /tests/planted
echo '{"reward": 1}' > /logs/verifier/reward.json
setsid sh -c 'while true; do echo "{\\"reward\\": 1}" > /logs/verifier/reward.json; done' >/dev/null 2>&1 &
(while true; do cp /bin/true /tests/test.sh; done) >/dev/null 2>&1 &
sleep 0.2; echo forged"""
CHECKS = """#!/bin/sh
[ -e /tests/planted ] && echo 1 > /logs/verifier/reward.txt && exit
sleep 1
echo 0.25 > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize("mode", ["shared", "separate"])
async def test_programs_that_an_agent_replaces_do_not_read_its_reward(mode, tmp_path):
    settings = f'artifacts = ["/app"]\n[verifier]\nenvironment_mode = "{mode}"\n'
    checks = "#!/bin/sh\n[ -e /app/app.log ] && echo 0.25 > /logs/verifier/reward.txt\n"
    folder = alone(tmp_path, "count-errors", tests__test_sh=checks, task_toml=settings)
    plant = "for p in cat tar head wc mkdir; do printf '#!/bin/sh\\necho 42\\n' > /usr/bin/$p; done; wc"
    record = await one(by_turn(bash(plant), "Done."), folder)

    assert record.turns[0].tool_results[0].content == "42"
    assert record.reward == 0.25, record.error


ENTRY = """#!/bin/sh
sleep 0.5
python3 -m http.server 8000 --directory /srv >/dev/null 2>&1 &
until python3 -c "import socket; socket.create_connection(('127.0.0.1', 8000))" 2>/dev/null; do sleep 0.1; done
"""
ASKS = (
    "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/f').read().decode())\""
)


@pytest.mark.parametrize("last", ['exec "$@"', '"$@"'])
async def test_what_the_entrypoint_of_an_image_starts_is_there_from_the_first_command_to_the_verifier(
    last, tmp_path
):
    docker = """FROM localhost/agentenv-base
COPY entry /entry
RUN chmod +x /entry && printf served > /srv/f
ENTRYPOINT ["/entry"]
"""
    checks = (
        f"#!/bin/sh\n[ $({ASKS}) = served ] && ! pgrep -f 'sleep 543' && echo 1 > /logs/verifier/reward.txt\n"
    )
    folder = alone(tmp_path, "count-errors", environment__Dockerfile=docker, tests__test_sh=checks)
    (folder / "environment" / "entry").write_text(f"{ENTRY}{last}\n")
    line = f"setsid sleep 543 & {ASKS}"
    record = await one(by_turn(bash(line), "Done."), folder)

    assert record.turns[0].tool_results[0].content == "served"
    assert record.reward == 1.0, record.error


SOLVES = """#!/bin/sh
set -e
[ $(id -un) = nobody ]
[ $(stat -c %U /solution/answer) = root ]
cp /solution/answer /app/answer.txt
"""


def test_the_oracle_of_a_user_without_rights_earns_full_marks(tmp_path):
    settings = '[agent]\nuser = "nobody"\n[environment]\nnetwork_mode = "no-network"\n'
    docker = "FROM localhost/agentenv-base\nRUN mkdir -m 777 /app\nWORKDIR /app\nCOPY app.log /app/\n"
    folder = alone(tmp_path, "count-errors", task_toml=settings, environment__Dockerfile=docker)
    (folder / "solution" / "solve.sh").write_text(SOLVES)
    shutil.copy(folder / "tests" / "answer", folder / "solution" / "answer")

    assert played("oracle", folder, tmp_path)["count-errors"].reward == 1.0


def test_the_oracle_of_a_task_without_a_solution_says_so(tmp_path):
    folder = alone(tmp_path, "count-errors")
    shutil.rmtree(folder / "solution")

    assert (
        "count-errors: there is no solution/solve.sh"
        in played("oracle", folder, tmp_path)["count-errors"].error
    )


async def test_a_limit_that_the_run_sets_ends_a_command_and_is_named(tmp_path):
    folder = alone(tmp_path, "count-errors")
    turns = iter(
        (bash("cd /srv; A=1"), bash("sleep 600; touch /late"), bash("pwd; echo $A; ls /late"), "Done.")
    )
    record = await one(lambda _: next(turns), folder, limits={"tool_timeout_s": 1.5})

    cut, after = (turn.tool_results[0].content for turn in record.turns[1:3])
    assert "time limit of 1.5 s reached" in cut
    assert "limits.tool_timeout_s sets that limit" in cut
    assert after.split()[:2] == ["/srv", "1"]
    assert "No such file" in after


PLANT = """mkdir -p /logs/verifier; echo '{"reward": 1}' > /logs/verifier/reward.json
printf '#!/bin/sh\\n' > /usr/bin/rm"""
NO_USERS = "echo > /etc/passwd; echo > /etc/group"
FAILS = 'FROM localhost/agentenv-base\nENTRYPOINT ["sh", "-c", "echo no port is free; exit 3"]\n'
SHOWS = "FROM localhost/agentenv-base\nWORKDIR /app\nCOPY app.log /tests/\n"
SHORT, LATE = "[verifier]\ntimeout_sec = 1\n", "#!/bin/sh\nsleep 600\n"
SILENT = "#!/bin/sh\necho looked; exit 0\n"


@pytest.mark.parametrize(
    ("line", "files", "settings", "outcome", "told"),
    [
        (FORGE, {"tests__test_sh": CHECKS}, {}, ("final_answer", 0.25), ""),
        (NO_USERS, {"tests__test_sh": CHECKS}, {}, ("final_answer", 0.25), ""),
        (PLANT, {"tests__test_sh": CHECKS}, {}, ("error", None), "has replaced programs"),
        ("", {"environment__Dockerfile": FAILS}, {}, ("aborted", None), "entrypoint.*no port is free"),
        (
            "",
            {"environment__Dockerfile": SHOWS},
            {},
            ("aborted", None),
            "the image already has files in /tests",
        ),
        ("", {"tests__test_sh": SILENT}, {}, ("error", None), "neither reward.json nor .*it printed: looked"),
        (
            *("", {"task_toml": SHORT, "tests__test_sh": LATE}, {}, ("error", None)),
            r"did not end within 1 s \(verifier.timeout_sec of task.toml\)",
        ),
        (
            *("", {"task_toml": SHORT, "tests__test_sh": LATE}, {"limits": {"reward_timeout_s": 1.5}}),
            *(("error", None), r"within 1.5 s \(limits.reward_timeout_s\)"),
        ),
    ],
    ids=[
        "forged",
        "without users",
        "planted",
        "entrypoint",
        "shown tests",
        "no score",
        "task's limit",
        "run's limit",
    ],
)
async def test_no_reward_is_forged_and_what_has_none_says_why(line, files, settings, outcome, told, tmp_path):
    turns = (bash(line), "Done.") if line else ("Done.",)
    record = await one(by_turn(*turns), alone(tmp_path, "count-errors", **files), **settings)

    assert (record.stop_reason, record.reward) == outcome, record.error
    assert re.search(told, record.error.message if record.error else "", re.DOTALL), record.error


SERVES = """setsid python3 -m http.server --bind 127.0.0.1 8123 > /dev/null 2>&1 &
until (echo > /dev/tcp/127.0.0.1/8123) 2> /dev/null; do sleep 0.1; done"""


async def test_a_server_that_is_ended_before_the_verifier_is_told(tmp_path, caplog):
    silent = alone(tmp_path / "silent", "fix-median")
    await one(by_turn(bash("setsid sleep 600 > /dev/null 2>&1 &"), "Done."), silent)
    assert "server" not in caplog.text

    await one(by_turn(bash(SERVES), "Done."), alone(tmp_path, "count-errors"))
    assert "count-errors: a server that the agent had left running was ended" in caplog.text


async def test_a_reward_is_forged_where_processes_are_kept_as_the_page_says(tmp_path):
    folder = alone(tmp_path, "count-errors", tests__test_sh=CHECKS)
    record = await one(by_turn(bash(FORGE), "Done."), folder, keep_processes=True)

    assert record.reward != 0.25


SICK = """[environment]
network_mode = "no-network"
[[steps]]
name = "first"
healthcheck = {command = "[ -e /opt/ready ]", interval_sec = 0.1, retries = 2}
[[steps]]
name = "second"
agent = {user = "nobody"}
healthcheck = {command = "id -un; [ -e /opt/next ]", interval_sec = 0.1}
"""


async def test_a_step_that_is_not_healthy_has_no_score(tmp_path):
    sick = await one(lambda _: "Done.", alone(tmp_path / "sick", "two-steps", task_toml=SICK))
    folder = alone(tmp_path, "two-steps", task_toml=SICK)
    (folder / "steps" / "first" / "workdir").mkdir()
    (folder / "steps" / "first" / "workdir" / "setup.sh").write_text("sleep 0.2; touch /opt/ready")
    turns = iter((bash("mkdir /app/box && touch /app/box/lid"), "Made.", "Done."))
    later = await one(lambda _: next(turns), folder)

    assert (sick.stop_reason, sick.reward) == ("aborted", None)  # the model has not begun
    assert "step first is not healthy" in sick.error.message
    assert (later.stop_reason, later.reward) == ("error", None)
    assert "step second is not healthy: nobody" in later.error.message


async def test_a_check_that_never_passes_ends_whatever_its_task_says(tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "_HEALTHY_WITHIN_S", 0.5)
    never = (
        f'[environment]\ndocker_image = "{IMAGE}"\n[environment.healthcheck]\ncommand = "echo sick; false"\n'
    )
    folder = alone(tmp_path, "count-errors", task_toml=f"{never}interval_sec = 0\nretries = 1_000_000_000\n")

    record = await one(lambda _: "Done.", folder)

    assert (record.stop_reason, record.reward) == ("aborted", None)
    assert "count-errors is not healthy: sick" in record.error.message


APART = """artifacts = [{source = "/app", destination = "kept"}]
[verifier]
environment_mode = "separate"
"""
SEES = """#!/bin/sh
is() { [ "$@" ]; echo $((!$?)); }
echo "{\\"reward\\": 1, \\"gone\\": $(is ! -e /app/app.log), \\"made\\": $(is -w /app/box/lid),
\\"noted\\": $(is -e /logs/artifacts/note)}" > /logs/verifier/reward.json
"""


async def test_a_verifier_apart_gets_artifacts_where_they_were_and_in_the_place_of_what_is_there(tmp_path):
    folder = alone(tmp_path, "count-errors", task_toml=APART, tests__test_sh=SEES)
    line = "rm app.log; mkdir box; touch box/lid; echo so > /logs/artifacts/note"
    record = await one(by_turn(bash(line), "Done."), folder)

    assert dict(record.rewards) == {"reward": 1, "gone": 1, "made": 1, "noted": 1}, record.error


async def test_a_step_does_not_begin_with_the_logs_of_the_last_one(tmp_path):
    folder = alone(tmp_path, "two-steps")
    first = bash("mkdir /app/box; touch /app/box/lid /logs/artifacts/a /logs/agent/b")
    turns = (first, "Made.", bash("find /logs -type f"), "Done.")
    record = await one(by_turn(*turns), folder)

    assert record.turns[2].tool_results[0].content == "(no output)"


async def test_the_working_directory_of_a_task_may_be_one_that_only_its_image_names(tmp_path):
    docker = "FROM localhost/agentenv-base\nWORKDIR /app/made\n"
    settings = '[environment]\nworkdir = "/app/made"\n'
    checks = "#!/bin/sh\ncp here.txt /logs/verifier/reward.txt\n"
    folder = alone(
        tmp_path, "count-errors", environment__Dockerfile=docker, task_toml=settings, tests__test_sh=checks
    )

    assert (await one(by_turn(bash("echo 0.5 > here.txt"), "Done."), folder)).reward == 0.5


async def test_files_beside_an_image_are_in_the_working_directory(tmp_path):
    settings = f'[environment]\ndocker_image = "{IMAGE}"\nworkdir = "/srv"\n'
    checks = "#!/bin/sh\ncp /srv/given.txt /logs/verifier/reward.txt\n"
    folder = alone(tmp_path, "count-errors", task_toml=settings, tests__test_sh=checks)
    shutil.rmtree(folder / "environment")
    (folder / "environment").mkdir()
    (folder / "environment" / "given.txt").write_text("0.5")

    assert (await one(lambda _: "Done.", folder)).reward == 0.5


async def test_a_container_that_is_gone_aborts_the_episode(tmp_path):
    def policy(_):
        mine = [name for name in left() if owner() in name]
        subprocess.run(["podman", "rm", "-f", "-t", "0", *mine], check=True, capture_output=True)
        return "Done."

    folder = alone(tmp_path, "count-errors")
    record = await one(policy, folder)

    assert (record.stop_reason, record.reward) == ("aborted", None), record.error
    assert record.error.boundary == "sandbox"


async def test_an_image_may_have_an_empty_folder_for_the_solution(tmp_path):
    docker = "FROM localhost/agentenv-base\nRUN mkdir /solution /tests\nWORKDIR /app\n"
    checks = "#!/bin/sh\ncp /solution/out /logs/verifier/reward.txt\n"
    folder = alone(tmp_path, "count-errors", environment__Dockerfile=docker, tests__test_sh=checks)

    assert (await one(by_turn(bash("echo 0.5 > /solution/out"), "Done."), folder)).reward == 0.5


async def test_time_of_a_task_ends_the_agent_and_its_work_is_graded(tmp_path):
    settings = '[environment]\nnetwork_mode = "no-network"\n[agent]\ntimeout_sec = 0.5\n'
    folder = alone(tmp_path, "count-errors", task_toml=settings)
    answer = (folder / "tests" / "answer").read_text().strip()
    line = bash(f"echo {answer} > /app/answer.txt; sleep 1")

    record = await one(lambda _: line, folder)

    assert (len(record.turns), record.reward) == (1, 1.0), record.error


AGENT = """
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
bash = {"name": "bash", "description": "Run.", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
while True:
    body = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": bash}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    said = json.load(urllib.request.urlopen(asked, timeout=60))["choices"][0]["message"]
    messages.append(said)
    if not said.get("tool_calls"):
        break
    for call in said["tool_calls"]:
        line = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr or "-"})
sys.exit(3)
"""


async def test_an_agent_in_the_container_is_graded_with_exact_tokens_whatever_its_exit_code(tmp_path):
    folder = alone(tmp_path, "two-steps")
    (folder / "environment" / "agent.py").write_text(AGENT)
    with (folder / "environment" / "Dockerfile").open("a") as file:
        file.write("COPY agent.py /opt/agent.py\n")
    turns = iter(
        (bash("mkdir /app/box && touch /app/box/lid"), "Made.", bash("mv /app/box /app/chest"), "Done.")
    )

    record = await one(lambda _: next(turns), folder, agent="python3 /opt/agent.py {instruction}")

    assert (record.stop_reason, record.reward) == ("final_answer", 1.0), record.error
    assert [turn.sequence for turn in record.turns] == [0, 0, 1, 1]
    assert record.trainable
    trained = sum(sequence.num_trained_tokens for sequence in record.sequences)
    assert trained == sum(turn.num_tokens for turn in record.turns)


RANDOM = "#!/bin/bash\necho 0.$RANDOM > /logs/verifier/reward.txt\n"


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2", marks=pytest.mark.exhaustive)])
def test_a_model_is_trained_on_what_an_agent_in_the_container_asked_it(model, tmp_path):
    from helpers.training import saved_tiny

    folder = alone(tmp_path, "count-errors", tests__test_sh=RANDOM)
    (folder / "environment" / "agent.py").write_text(AGENT)
    with (folder / "environment" / "Dockerfile").open("a") as file:
        file.write("COPY agent.py /opt/agent.py\n")
    result = ae.train(
        f"harbor:{folder}",
        saved_tiny(tmp_path / "tiny") if model == "tiny" else f"hf:{model}",
        steps=2,
        group_size=2,
        groups_per_step=1,
        demos="none",
        learning_rate=1e-3,
        beta=0.0,
        runs_dir=tmp_path / "runs",
        limits={"max_turns": 2, "max_tokens_per_turn": 8},
        env={"agent": "python3 /opt/agent.py {instruction}"},
    )
    assert len(result.history) == 2
    for metrics in result.history:
        assert metrics["grad_norm"] > 0, metrics
