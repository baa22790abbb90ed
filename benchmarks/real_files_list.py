"""The files that `real_files.py` plays: where each is from, and what the model says to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Project:
    """A project and one commit of it."""

    short: str
    commit: str
    needs: tuple[str, ...]
    """Packages that its files import."""
    folder: str = ""
    """Folder that the table leaves out."""


@dataclass(frozen=True)
class Theirs:
    """One file, and how it is played."""

    project: str
    file: str
    name: str = ""
    """What `agentenv eval` gets; the file, if empty."""
    code: str = ""
    """Lines of ours, in `ours.py` beside it."""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    answer: str = "done"
    beside: tuple[str, ...] = ()
    """Further paths of the project that it needs."""
    path: tuple[str, ...] = ()
    """Folders from which it imports."""
    serve: str = ""
    """Module that serves it, with its arguments."""
    changes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Lines of theirs that are changed."""


def label(file: Theirs) -> str:
    """Return how the table names a file."""
    project = PROJECTS[file.project]
    return f"{project.short} {file.file.removeprefix(project.folder)}"


PROJECTS = {
    "huggingface/trl": Project("TRL", "f2cd57710", ("trl", "datasets"), "examples/scripts/"),
    "PrimeIntellect-ai/verifiers": Project("verifiers", "9daf5a933", ("verifiers",), "environments/"),
    "meta-pytorch/OpenEnv": Project("OpenEnv", "685de411", ("fastmcp", "uvicorn"), "envs/"),
    "UKGovernmentBEIS/inspect_ai": Project("Inspect", "499e6152e", ("inspect_ai",), "examples/"),
    "modelcontextprotocol/python-sdk": Project("MCP", "57394b054", ("mcp.server.mcpserver",), "examples/"),
    "axon-rl/gem": Project("GEM", "4069f2f", ("gymnasium", "reasoning_gym"), "gem/envs/"),
    "Farama-Foundation/Gymnasium": Project(
        "Gymnasium", "3f0476a8c", ("gymnasium", "pygame"), "docs/tutorials/"
    ),
    "openai/openai-agents-python": Project("OpenAI Agents", "7f7a44f8d", ("agents",), "examples/"),
    "NovaSky-AI/SkyRL": Project("SkyRL", "a9564572e", ("gymnasium", "pandas"), "skyrl-gym/skyrl_gym/envs/"),
}

_MCP = '''
import runpy
from contextlib import asynccontextmanager

import agentenv as ae
from agentenv_mcp import mcp_tools


class Served(ae.ToolEnv):
    """Use a server's tools."""

    tasks = [{{"question": "Try a tool."}}, {{"question": "Try a tool again."}}]

    @classmethod
    @asynccontextmanager
    async def prepare(cls):
        async with mcp_tools({server}) as cls.tools:
            yield

    def start(self, question):
        return question

    def reward(self, answer):
        return 1.0
'''
_TOOLS = '''
import agentenv as ae
from {module} import {tool}


class Given(ae.ToolEnv):
    """Use a tool of theirs."""

    tasks = [{{"question": "Try the tool."}}, {{"question": "Try the tool again."}}]
    tools = ({tool},)

    def start(self, question):
        return question

    def reward(self, answer):
        return 1.0
'''


_HUB = """
import datasets  # rows in the place of the Hub's data sets, which a machine without network lacks

TEXT = " ".join(f"Sentence number {{n}} is here." for n in range(9))
NAMES = ["Ada Lovelace", "Emmy Noether", "Carl Gauss", "Alan Turing", "Felix Klein", "Paul Erdos"] * 3
SUM = {{"question": "What is 1 + 1?", "answer": "It is 2.\\n#### 2"}}
MATH = {{"problem": "What is 1 + 1?", "solution": "It is \\\\boxed{{2}}."}}
ROW = {{"prompt": "some text", **SUM, **MATH, "text": TEXT, "names": NAMES}}


def load_dataset(path, *others, split=None, **options):
    rows = datasets.Dataset.from_list([{{**ROW, "number": n}} for n in range(1000)])
    return rows if split else datasets.DatasetDict({{"train": rows, "test": rows}})


datasets.load_dataset = load_dataset
from agentenv_worlds.verifiers import spec_of

ENV = spec_of("{name}")
"""
_REWARD = '''
import agentenv as ae
from {module} import {function}


class Rewarded(ae.ToolEnv):
    """Score an answer by a reward function of theirs."""

    tasks = [{{"question": "Say something."}}, {{"question": "Say something else."}}]

    def start(self, question):
        return question


ae.register("demo/Rewarded-v0", Rewarded, rewards=[{function}{call}])
'''


def _verifiers(name: str, *calls: tuple[str, Mapping[str, Any]], answer: str = "done") -> Theirs:
    return Theirs(
        "PrimeIntellect-ai/verifiers",
        f"environments/{name}/{name}.py",
        "ours.py:ENV",
        _HUB.format(name=name),
        calls,
        answer,
        path=(f"environments/{name}",),
    )


def _reward(file: str, function: str, call: str = "") -> Theirs:
    module = file.rpartition("/")[2].removesuffix(".py")
    code = _REWARD.format(module=module, function=function, call=call)
    return Theirs("huggingface/trl", file, "ours.py", code, path=("trl/rewards",))


def _mcp(file: str, *calls: tuple[str, Mapping[str, Any]], name: str = "mcp") -> Theirs:
    server = f"runpy.run_path({'examples/' + file!r})[{name!r}]"
    return Theirs(
        "modelcontextprotocol/python-sdk", f"examples/{file}", "ours.py", _MCP.format(server=server), calls
    )


def _tool(project: str, file: str, tool: str, **arguments: Any) -> Theirs:
    folder, _, module = file.removesuffix(".py").rpartition("/")
    code = _TOOLS.format(module=module, tool=tool)
    return Theirs(project, file, "ours.py", code, ((tool, arguments),), path=(folder,))


def _openenv(folder: str, *calls: tuple[str, Mapping[str, Any]], file: str = "") -> Theirs:
    file = file or f"{folder.removesuffix('_env')}_environment.py"
    return Theirs(
        "meta-pytorch/OpenEnv",
        f"envs/{folder}/server/{file}",
        "openenv:{address}",
        calls=calls,
        beside=("src", f"envs/{folder}"),
        path=("src", "envs"),
        serve=f"uvicorn {folder}.server.app:app --port {{port}}",
    )


def _inspect(
    file: str, name: str = "", *calls: tuple[str, Mapping[str, Any]], answer: str = "done"
) -> Theirs:
    return Theirs(
        "UKGovernmentBEIS/inspect_ai",
        f"examples/{file}",
        f"inspect:examples/{file}@{name}" if name else "",
        "",
        calls,
        answer,
    )


def _gem(file: str, name: str, answer: str = r"\boxed{1}") -> Theirs:
    return Theirs("axon-rl/gem", f"gem/envs/{file}", f"gem/envs/{file}{name}", answer=answer, beside=("gem",))


FILES = (
    # TRL
    Theirs(
        "huggingface/trl",
        "examples/scripts/grpo_2048.py",
        "ours.py:demo/Game-v0",
        "import agentenv as ae\nfrom agentenv.envs.adapters import tool_env\n"
        "from grpo_2048 import PROMPT, Game2048Env, reward_score\n\n"
        "ae.register('demo/Game-v0', tool_env(Game2048Env, reward_score), "
        "tasks=[{'prompt': PROMPT}, {'prompt': PROMPT + '.'}])\n",
        (("move", {"direction": "up"}), ("move", {"direction": "left"})),
        path=("examples/scripts",),
    ),
    _reward("trl/rewards/format_rewards.py", "think_format_reward"),
    _reward("trl/rewards/other_rewards.py", "get_repetition_penalty_reward", "(2)"),
    Theirs("huggingface/trl", "examples/scripts/grpo_agent.py"),
    # verifiers
    _verifiers("tool_test"),
    _verifiers("reverse_text", answer="<reversed_text>txet emos</reversed_text>"),
    _verifiers("gsm8k", answer=r"\boxed{2}"),
    _verifiers("doublecheck", answer=r"\boxed{2}"),
    _verifiers("math_group", answer=r"\boxed{2}"),
    _verifiers("sentence_repeater"),
    _verifiers("alphabet_sort"),
    # MCP
    _mcp(
        "mcpserver/complex_inputs.py",
        ("name_shrimp", {"tank": {"shrimp": [{"name": "a"}]}, "extra_names": ["b"]}),
    ),
    _mcp("mcpserver/desktop.py", ("sum", {"a": 1, "b": 2})),
    _mcp("mcpserver/direct_call_tool_result_return.py", ("echo", {"text": "hi"})),
    _mcp("mcpserver/echo.py", ("echo_tool", {"text": "hi"})),
    _mcp("mcpserver/logging_and_progress.py", ("echo", {"text": "hi"})),
    _mcp("mcpserver/parameter_descriptions.py", ("greet_user", {"name": "Ada"})),
    _mcp("mcpserver/unicode_example.py", ("multilingual_hello", {}), ("list_emoji_categories", {})),
    _mcp(
        "mcpserver/weather_structured.py",
        ("get_weather", {"city": "Oslo"}),
        ("get_weather_alerts", {"region": "x"}),
    ),
    _mcp("snippets/servers/structured_output.py", ("get_user", {"user_id": "1"}), ("list_cities", {})),
    _mcp("snippets/servers/lifespan_example.py", ("query_db", {})),
    _mcp("snippets/servers/direct_call_tool_result.py", ("advanced_tool", {}), ("empty_result_tool", {})),
    # Inspect
    _inspect("hello_world.py", answer="Hello World"),
    _inspect("popularity.py", answer="Yes"),
    _inspect("tool_use.py", "addition_problem", ("add", {"x": 1, "y": 1}), answer="2"),
    _inspect("prefill.py", answer="4"),
    _inspect("cache.py", "cache_example"),
    _inspect("structured.py", "rgb_color"),
    _inspect("early_stopping.py", answer="Yes"),
    _inspect("categorical_demo.py"),
    _inspect("reasoning.py"),
    _inspect("text_editor.py"),
    # OpenEnv
    _openenv("echo_env", ("echo_message", {"message": "hi"})),
    _openenv("connect4_env", ("act", {"column": 0})),
    _openenv("grid_world_env", ("act", {"action": "UP"})),
    _openenv("maze_env", ("act", {"action": 1}), file="maze_env_environment.py"),
    # Gymnasium and its like
    Theirs(
        "Farama-Foundation/Gymnasium", "docs/tutorials/gymnasium_basics/environment_creation.py", answer="1"
    ),
    _gem("game_env/guess_the_number.py", ":GuessTheNumberEnv"),
    _gem("game_env/mastermind.py", ":MastermindEnv"),
    _gem("game_env/minesweeper.py", ":MinesweeperEnv"),
    _gem("game_env/sudoku.py", ":SudokuEnv"),
    _gem("game_env/tower_of_hanoi.py", ":TowerofHanoiEnv"),
    _gem("game_env/fifteen_puzzle.py", ":FifteenPuzzleEnv"),
    _gem("game_env/game_2048.py", ":Game2048Env"),
    # Tools of other SDKs
    _tool("openai/openai-agents-python", "examples/basic/tools.py", "get_weather", city="Oslo"),
    _tool("openai/openai-agents-python", "examples/basic/tool_guardrails.py", "get_user_data", user_id="1"),
    Theirs(
        "NovaSky-AI/SkyRL",
        "skyrl-gym/skyrl_gym/envs/gsm8k/env.py",
        beside=("skyrl-gym",),
        path=("skyrl-gym",),
    ),
)
