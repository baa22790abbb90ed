"""Tasks in Harbor's format of several containers, with hosts that they reach, and what their machines offer."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess

import pytest

from agentenv.core import TaskError
from agentenv_containers import endpoint
from agentenv_containers.runtime import owner
from agentenv_worlds.harbor import boxes
from agentenv_worlds.harbor.format import read_task
from agentenv_worlds.harbor.services import services_of
from helpers.agents import by_turn
from helpers.containers import TASKS, left, needs_podman

from .test_harbor import AGENT, alone, bash, one, played

pytest.importorskip("podman_compose", reason="UNTESTED: the extra compose brings podman-compose")

COMPOSE = """
services:
  main:
    depends_on:
      api: {condition: service_healthy}
      seed: {condition: service_completed_successfully}
    environment: ["GREETING=${GREETING:-hello}", "HOME_OF_US=${HOME_OF_US}"]
  api:
    build: ./api
    environment: {PORT: 5000}
    user: nobody
    expose: ["5000"]
    ports: ["5000:5000"]
    healthcheck:
      test: ["CMD", "python3", "-c", "import socket; socket.create_connection(('localhost', 5000))"]
      interval: 200ms
      retries: 60
  seed:
    image: localhost/agentenv-base
    command: sh -c "exit 0"
"""
SERVER = """
import http.server, os, socket

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.getuid()} {socket.gethostbyname('main')}".encode())

http.server.ThreadingHTTPServer(("", int(os.environ["PORT"])), Handler).serve_forever()
"""
DOCKER = 'FROM localhost/agentenv-base\nCOPY server.py /server.py\nCMD ["python3", "/server.py"]\n'
ASKS = "python3 -c \"import urllib.request as u; print(u.urlopen('http://{}', timeout=5).read().decode())\""
CHECKS = f"#!/bin/sh\n{ASKS.format('api:5000')} && echo 0.5 > /logs/verifier/reward.txt\n"


@pytest.fixture
def podman():
    needs_podman()
    yield
    assert [name for name in left() if owner() in name] == []
    networks = subprocess.run(["podman", "network", "ls", "-q"], capture_output=True, text=True, check=True)
    assert owner() not in networks.stdout


def composed(tmp_path, compose: str = COMPOSE, settings: str = ""):
    """A task with services, whose verifier asks one of them."""
    folder = alone(tmp_path, "count-errors", tests__test_sh=CHECKS, task_toml=settings)
    (folder / "environment" / "docker-compose.yaml").write_text(compose)
    (folder / "environment" / "api").mkdir()
    (folder / "environment" / "api" / "Dockerfile").write_text(DOCKER)
    (folder / "environment" / "api" / "server.py").write_text(SERVER)
    return folder


@pytest.mark.containers
@pytest.mark.parametrize("mode", ["public", "no-network"])
async def test_services_of_a_task_are_there_for_the_model_and_for_the_verifier(mode, podman, tmp_path):
    folder = composed(tmp_path, settings=f'[environment]\nnetwork_mode = "{mode}"\n')
    beyond = "awk '$2 == \"00000000\"' /proc/net/route"
    turns = by_turn(bash(f"{ASKS.format('api:5000')}; echo $GREETING-$HOME_OF_US"), bash(beyond), "Done.")
    record = await one(turns, folder)

    user, address, said = record.turns[0].tool_results[0].content.split()
    assert (user, said) == ("65534", "hello-")
    assert address.endswith(".12")  # the third of the network, and what the service takes for `main`
    assert (record.turns[1].tool_results[0].content != "(no output)") == (mode == "public")
    assert record.reward == 0.5, record.error


@pytest.mark.containers
def test_the_oracle_reaches_the_services(podman, tmp_path):
    folder = composed(tmp_path)
    (folder / "solution" / "solve.sh").write_text(f"#!/bin/sh\n{ASKS.format('api:5000')} > /app/said\n")
    (folder / "tests" / "test.sh").write_text(f"{CHECKS}[ -s /app/said ] || exit 1\n")

    assert played("oracle", folder, tmp_path)["count-errors"].reward == 0.5


@pytest.mark.containers
async def test_an_agent_in_the_container_reaches_the_services_and_the_model_and_nothing_else(
    podman, tmp_path
):
    folder = composed(tmp_path)
    (folder / "environment" / "agent.py").write_text(AGENT)
    with (folder / "environment" / "Dockerfile").open("a") as file:
        file.write("COPY agent.py /opt/agent.py\n")
    line = f"{ASKS.format('api:5000')}; awk '$2 == \"00000000\"' /proc/net/route"
    turns = iter((bash(line), "Done."))
    record = await one(lambda _: next(turns), folder, agent="python3 /opt/agent.py {instruction}")

    assert record.reward == 0.5, record.error
    (said,) = [message["content"] for message in record.messages if message["role"] == "tool"]
    assert said.startswith("65534 10.")
    assert "00000000" not in said


@pytest.mark.containers
@pytest.mark.parametrize(
    ("compose", "told"),
    [
        (COMPOSE.replace("retries: 60", "retries: 2").replace("PORT: 5000", "PORT: 5001"), "service api"),
        (COMPOSE.replace("exit 0", "echo no seed; exit 3"), "it ended with 3 no seed"),
    ],
)
async def test_a_service_that_does_not_become_what_is_waited_for_aborts_the_episode(
    compose, told, podman, tmp_path
):
    record = await one(lambda _: "Done.", composed(tmp_path, compose))

    assert (record.stop_reason, record.reward) == ("aborted", None)
    assert told in record.error.message


@pytest.mark.containers
async def test_allowed_hosts_are_reached_without_a_network_and_no_others(podman, tmp_path, monkeypatch):
    settings = '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["API.example.", "here.example"]\n'

    async def serve(_, writer):
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nreached")
        writer.close()

    async def answers(host, port, real=endpoint.public_address):
        return "127.0.0.1" if host == "api.example" else await real("localhost", port)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(boxes, "_WEB", (port,))
        monkeypatch.setattr(endpoint, "public_address", answers)
        folder = alone(tmp_path, "count-errors", task_toml=settings, tests__test_sh=RAN)
        lines = [ASKS.format(f"{host}:{port}") for host in ("api.example", "here.example", "other.example")]
        record = await one(by_turn(*map(bash, lines), "Done."), folder)

    allowed, here, other = (turn.tool_results[0].content for turn in record.turns[:3])
    assert allowed == "reached"
    assert "reached" not in here + other  # a name that its owner lets stand for this machine, and another


RAN = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"


@pytest.fixture
def written(tmp_path):
    """A function that writes a file of services and reads its task."""
    folder = tmp_path / "task"
    shutil.copytree(TASKS / "train" / "count-errors", folder)

    def task(compose: str):
        (folder / "environment" / "docker-compose.yaml").write_text(compose)
        return read_task(folder)

    return task


def test_services_are_read_in_the_order_in_which_they_start(written, tmp_path):
    written(COMPOSE)
    services = services_of(tmp_path / "task" / "environment", {"GREETING": "hi"})

    assert list(services) == ["api", "seed", "main"]
    assert services["main"].env({}) == {"GREETING": "hi", "HOME_OF_US": ""}
    assert services["seed"].command == ["sh", "-c", "exit 0"]
    check = services["api"].check
    assert check is not None
    assert (check.interval_sec, check.retries) == (0.2, 60)


@pytest.mark.parametrize(
    ("service", "named"),
    [
        ('volumes: ["/:/host"]', "api.volumes"),
        ("privileged: true", "api.privileged"),
        ("network_mode: host", "api.network_mode"),
        ("pid: host", "api.pid"),
        ("env_file: ../../../secrets", "api.env_file"),
        ("build: ../..", "is not in the task"),
        ("build: {context: ., dockerfile: ../../x}", "is not in the task"),
        ("build: {context: .., dockerfile: environment/Dockerfile}", "is not in the task"),
        ('build: .\n    image: "--privileged"', "api.image"),
        ("extends: {file: /etc/passwd, service: x}", "services.api.extends"),
        ("depends_on: [main]", "cannot wait for 'main'"),
        ("depends_on: [gone]", "cannot wait for 'gone'"),
        ("depends_on: [api]", "wait for each other: api -> api"),
        ("restart: always", "neither that nor build"),
    ],
)
def test_what_a_service_cannot_be_given_is_refused_by_name(written, service, named):
    own = "" if named.startswith(("neither", "is not", "api.image")) else "\n    image: x"
    with pytest.raises(TaskError) as refused:
        written(f"services:\n  api:\n    {service}{own}\n")
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("compose", "named"),
    [
        ("include: [/etc/x.yaml]\nservices: {}\n", "include cannot be given"),
        ("volumes: {x: {}}\nservices: {}\n", "volumes cannot be given"),
        ("services: {main: {privileged: true}}\n", "main.privileged"),
        ("services: {main: {command: serve}}\n", "cannot stand in the place of Harbor's"),
        ("services: {main: {image: other}}\n", "image: it cannot be set here"),
        (
            "services: {main: {depends_on: {db: {condition: service_healthy}}}, db: {image: x}}\n",
            "db has no healthcheck",
        ),
        ("services: [", "cannot be read"),
        ("- a\n", "cannot be read"),
    ],
)
def test_a_file_of_services_that_is_no_such_or_asks_for_more_is_refused(written, compose, named):
    with pytest.raises(TaskError, match=named):
        written(compose)


def test_variables_and_files_of_this_machine_do_not_get_into_services(written, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    written('services:\n  main:\n    environment: ["A=${HF_TOKEN}", HF_TOKEN]\n')
    assert services_of(tmp_path / "task" / "environment", {})["main"].env({}) == {"A": ""}
    known = {"HF_TOKEN": os.environ["HF_TOKEN"]}
    told = services_of(tmp_path / "task" / "environment", known)["main"].env(known)
    assert told == {"A": "secret", "HF_TOKEN": "secret"}
    file = tmp_path / "task" / "environment" / "docker-compose.yaml"
    file.unlink()
    file.symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="a link in its place is not read"):
        read_task(tmp_path / "task")


PLANTED = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def test_a_task_runs_no_code_of_its_own_where_its_services_are_read(written, tmp_path):
    folder = tmp_path / "task" / "environment"
    for name in ("yaml", "dotenv", "podman_compose", "sitecustomize"):
        (folder / f"{name}.py").write_text(PLANTED)
    (folder / ".env").write_text("B=of the file\nA=no\n")
    written('services:\n  main:\n    environment: ["A=${A}", "B=${B}", "HOME=${HOME}"]\n')
    told = services_of(folder, {"PYTHONPATH": str(folder), "A": "it's $B \\ \"\n#"})["main"].env({})

    assert not (folder / "ran").exists()
    assert (told["A"], told["B"]) == ("it's $B \\ \"\n#", "of the file")
    assert told["HOME"] != os.environ["HOME"]


def test_without_podman_compose_the_extra_is_named(written, monkeypatch):
    from agentenv_worlds.harbor import services

    monkeypatch.setattr(services, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"need podman-compose.*\[compose\]"):
        written("services: {main: {}, lone: {image: y}}\n")


MACHINE = """[environment]
skills_dir = "/skills"
[[environment.mcp_servers]]
name = "files"
transport = "http"
url = "http://files:8000/mcp"
[[environment.mcp_servers]]
name = "local"
transport = "stdio"
command = "serve"
args = ["--now", "a b"]
"""


def test_servers_and_skills_of_a_task_stand_behind_its_instruction(tmp_path):
    told = read_task(alone(tmp_path, "count-errors", task_toml=MACHINE)).steps[0].instruction

    assert "- files: streamable-http transport, url: http://files:8000/mcp\n" in told
    assert "- local: stdio transport, command: serve --now 'a b'\n" in told
    assert told.endswith("Each folder in /skills has a SKILL.md; read those that fit the task.")


@pytest.mark.parametrize("host", ["*.x.org", "10.0.0.1", "10.0.0.0/8", "https://x.org", "x.org:443", "::1"])
def test_only_names_of_hosts_are_allowed_hosts(host, tmp_path):
    settings = f'[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["{host}"]\n'
    with pytest.raises(TaskError, match=r"environment\.allowed_hosts\.0"):
        read_task(alone(tmp_path, "count-errors", task_toml=settings))
