"""Agents that are programs, run as they are: each conversation is one sequence, as sampled.

`.ci/install-agents` installs the programs beside the SDKs for `make test-agents`; elsewhere they are skipped.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core import RunLimits, StopReason
from agentenv.engine import ScriptedEngine
from agentenv.runner import Runner
from helpers.agents import RENDERER, TOKENIZER, by_turn, call, check_tokens, served

FOLDER = Path(sys.prefix) / "programs" / "node_modules" / ".bin"
EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Program:
    """A program, how it is started on a question, and calls of its tools in the JSON of a careless model."""

    command: tuple[str, ...]
    look: str
    """Reads add.py of the folder WORKSPACE."""
    echo: str
    correct: str
    example: str = ""
    settings: tuple[str, str] = ("", "")
    """A file that the program reads in its workspace, and what is in it."""


OPENCODE_PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "any"},
    "models": {"m": {}},
}
PROGRAMS = {
    "claude": Program(
        ("claude", "--permission-mode", "acceptEdits", "--print"),
        call('{"file_path":  "WORKSPACE/add.py"}', "Read"),
        call('{"command": "echo caf\\u00e9 ü ",\n "description": "x"}', "Bash"),
        call('{"command":"sed -i s/-/+/ add.py"}', "Bash"),
        example="with_claude_code.py",
    ),
    "codex": Program(
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        call('{"cmd":  "cat add.py"}', "exec_command"),
        call('{"cmd": "echo caf\\u00e9 ü ",\n "yield_time_ms":  5000}', "exec_command"),
        call('{"cmd":"sed -i s/-/+/ add.py"}', "exec_command"),
        example="with_codex.py",
    ),
    "opencode": Program(
        ("opencode", "run", "--model", "ours/m"),
        call('{"filePath":  "WORKSPACE/add.py"}', "read"),
        call('{"command": "echo caf\\u00e9 ü ",\n "description": "x"}', "bash"),
        call('{"command":"sed -i s/-/+/ add.py","description":"x"}', "bash"),
        settings=("opencode.json", json.dumps({"provider": {"ours": OPENCODE_PROVIDER}})),
    ),
    "qwen": Program(
        ("qwen", "--auth-type", "openai", "--model", "m", "--approval-mode", "yolo", "--prompt"),
        call('{"file_path":  "WORKSPACE/add.py"}', "read_file"),
        call('{"command": "echo caf\\u00e9 ü ",\n "is_background": false}', "run_shell_command"),
        call('{"command":"sed -i s/-/+/ add.py","is_background":false}', "run_shell_command"),
    ),
}


@pytest.fixture(params=PROGRAMS)
def program(request, monkeypatch) -> Program:
    if not (FOLDER / request.param).exists():
        pytest.skip(f"{request.param} is not installed; .ci/install-agents installs it where there is npm")
    monkeypatch.setenv("PATH", f"{FOLDER}{os.pathsep}{os.environ['PATH']}")
    return PROGRAMS[request.param]


class FixBug(ae.AgentEnv):
    """A program that corrects a file in its workspace."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def start(self) -> None:
        (self.workspace / "add.py").write_text("def add(a, b):\n    return a - b\n")
        name, settings = self.program.settings
        if name:
            (self.workspace / name).write_text(settings)

    def command(self):
        return [*self.program.command, "The function in add.py must add its arguments. Correct it."]


def titled(texts):
    """A policy that says the texts one after another, and a title to those that ask for one.

    qwen-code begins a conversation with a reply of its own.
    """
    turn = by_turn(*texts)

    def policy(request):
        if "Generate a title" in request.prompt_text:
            return "Adding"
        text = request.prompt_text.replace("<|im_start|>assistant\nGot it. Thanks for the context!", "")
        return turn(replace(request, prompt_text=text))

    return policy


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "no-thinking"])
async def test_a_program_is_one_sequence(program, thinking):
    thought = (lambda text: f"<think>{text}</think>") if thinking else (lambda _: "")
    env = FixBug(program)
    env.start()
    look = program.look.replace("WORKSPACE", str(env.workspace))
    turns = (
        f"{thought('I should' + chr(10) + '  look.  ')} Let me look. \n{look}{program.echo}",
        thought("hm") + program.correct,
        thought("so") + "\n\nIt is corrected. \n",
    )
    try:
        async with served(titled(turns)) as agent:
            answer = await env.agent(agent.url, {})

            captured = agent.captured
            check_tokens(agent.session, agent.engine)
        corrected = (env.workspace / "add.py").read_text()
    finally:
        await env.shutdown()
    assert str(answer).strip().endswith("It is corrected.")
    assert "return a + b" in corrected
    main = [turn for turn in captured.turns if turn.num_tokens and "Adding" not in str(turn.message)]
    assert len({turn.sequence for turn in main}) == 1
    assert len(main) == 3
    assert set(captured.left_out) <= {"auxiliary"}  # opencode's title
    assert captured.sequences[main[0].sequence].num_trained_tokens == sum(turn.num_tokens for turn in main)
    seen, said = (result.content for result in main[0].tool_results)
    assert "return a - b" in seen
    assert "café ü" in said
    forks = {name for name in agent.session.counts if name.startswith("forks_")}
    assert forks <= ({"forks_new"} if program.settings[0] else set())


AIDER = Path(sys.prefix) / "aider" / "bin"


@pytest.mark.skipif(not (AIDER / "aider").exists(), reason=".ci/install-agents installs aider")
async def test_aider_is_one_sequence(monkeypatch):
    """It writes no calls: a file stands in the text, after its name."""
    monkeypatch.setenv("PATH", f"{AIDER}{os.pathsep}{os.environ['PATH']}")
    quiet = "--no-git --yes-always --no-pretty --no-check-update --no-show-model-warnings --analytics-disable"
    command = ("aider", "--model", "openai/m", *quiet.split(), "--file", "add.py", "--message")
    env = FixBug(Program(command, "", "", ""))
    env.variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env.start()
    said = "It is corrected.\n\nadd.py\n```\ndef add(a, b):\n    return a + b\n```"
    try:
        async with served(by_turn(said)) as agent:
            await env.agent(agent.url, {})

            captured = agent.captured
            check_tokens(agent.session, agent.engine)
        corrected = (env.workspace / "add.py").read_text()
    finally:
        await env.shutdown()
    assert corrected == "def add(a, b):\n    return a + b\n"
    assert [len(captured.turns), len(captured.sequences)] == [1, 1]
    assert captured.sequences[0].num_trained_tokens == captured.turns[0].num_tokens


@pytest.mark.parametrize("program", ["claude", "codex"], indirect=True)
async def test_the_example_of_a_program_is_an_environment(program):
    """Codex runs its commands in a sandbox of its own, which not every machine has, so the file may stay."""
    engine = ScriptedEngine(by_turn(program.look, program.correct, "Done."), tokenizer=TOKENIZER)
    spec = ae.spec(str(EXAMPLES / program.example))

    record = await Runner(engine, RENDERER).run_episode(
        spec.make(), {"wrong": "a - b"}, limits=RunLimits(max_context_tokens=None)
    )

    assert (record.stop_reason, record.error) == (StopReason.FINAL_ANSWER, None)
    assert record.trainable
    assert record.answer.strip() == "Done."
    assert [len(record.turns), len(record.sequences)] == [3, 1]


@pytest.mark.parametrize("program", ["claude"], indirect=True)
async def test_a_sub_agent_of_claude_code_is_a_sequence_of_its_own(program):
    task = '{"description": "look", "prompt": "Find the mistake in add.py.", "run_in_background": false}'

    def policy(request):
        replies = request.prompt_text.count("<|im_start|>assistant") - 1
        if "Find the mistake" in request.prompt_text and "Correct it." not in request.prompt_text:
            return (program.look, "It subtracts.")[min(replies, 1)]
        return (call(task, "Agent"), program.correct, "Corrected.")[min(replies, 2)]

    env = FixBug(program)
    env.start()
    try:
        async with served(policy) as agent:
            await env.agent(agent.url, {})

            captured = agent.captured
            check_tokens(agent.session, agent.engine)
    finally:
        await env.shutdown()
    assert sorted(turn.sequence for turn in captured.turns) == [0, 0, 1, 1, 1]
    assert captured.left_out == {}
    assert sum(each.num_trained_tokens for each in captured.sequences) == sum(
        turn.num_tokens for turn in captured.turns
    )
