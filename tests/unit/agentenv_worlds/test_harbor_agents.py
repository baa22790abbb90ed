"""Agents of others, installed into the images of tasks: exact tokens, and the reward of what they did.

Installing one needs the registries of Debian, PyPI or npm and takes minutes, so these tests are exhaustive.
"""

from __future__ import annotations

import json

import pytest

from agentenv_containers import AGENTS, PODMAN
from helpers.agents import by_turn, call
from helpers.containers import IMAGE, needs_podman

from .test_harbor import alone, one

pytestmark = [pytest.mark.containers, pytest.mark.exhaustive]
LINE = "wc -l < /etc/passwd > /root/answer; cat /root/answer"
END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CHECKS = """#!/bin/sh
[ "$(cat /root/answer)" = "$(wc -l < /etc/passwd)" ] && echo 1 > /logs/verifier/reward.txt
"""
TURNS = {
    "mini-swe-agent": (
        call(json.dumps({"command": LINE}), "bash"),
        call(json.dumps({"command": END}), "bash"),
    ),
    "codex": (call(json.dumps({"cmd": LINE}), "exec_command"), "It is written."),
    "claude-code": (
        call(json.dumps({"command": LINE, "description": "count"}), "Bash"),
        "It is written.",
    ),
}


@pytest.fixture(autouse=True)
def builds(monkeypatch):
    needs_podman()
    # The certificates of this machine, because a registry may be reached through a proxy of its own.
    certificates = "/etc/ssl/certs/ca-certificates.crt"
    monkeypatch.setenv(
        "AGENTENV_BUILD_OPTIONS",
        "--network=host --volume=/etc/ssl/certs:/etc/ssl/certs:ro "
        f"--env=PIP_CERT={certificates} --env=NODE_EXTRA_CA_CERTS={certificates}",
    )


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_solves_a_task_in_its_container_with_exact_tokens(agent, tmp_path):
    # Tasks of one image share the layer in which the agent is installed.
    settings = f'[environment]\ndocker_image = "{IMAGE}"\n'
    folder = alone(tmp_path, "count-errors", task_toml=settings, tests__test_sh=CHECKS)
    record = await one(by_turn(*TURNS[agent]), folder, agent=agent)

    assert (record.stop_reason, record.reward) == ("final_answer", 1.0), record.error
    assert record.trainable, record.untrainable_reason
    main = record.sequences[0]
    assert [turn.sequence for turn in record.turns] == [0, 0]
    assert main.num_trained_tokens == sum(turn.num_tokens for turn in record.turns)
    assert await PODMAN.sweep() == []
