"""Tools by name: in the registry, in environments, and as a setting of a run."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core import UnknownTool, UsageError
from agentenv.envs import EnvSpec, registry
from agentenv.tools import tool_registry


@ae.tool
def shout(text: str) -> str:
    """Say it loudly.

    Args:
        text: What to say.
    """
    return text.upper()


def whisper(text: str) -> str:
    """Say it quietly."""
    return text.lower()


class Talk(ae.ToolEnv):
    tools = ("calculator", shout)

    def start(self) -> str:
        return "Talk."

    @ae.tool
    def listen(self) -> str:
        """Listen."""
        return "..."

    def reward(self) -> float:
        return 0.0


@pytest.fixture(autouse=True)
def _registries(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tool_registry, "_items", dict(tool_registry._items))
    monkeypatch.setattr(tool_registry, "_errors", {})
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("calculater", "unknown tool 'calculater'; did you mean 'calculator'?"),
        ("find", "there are: calculator"),
        ("find", "tools = (find,)"),
        ("no.such.module:x", "'no.such.module:x' cannot be loaded"),
        ("agentenv_tools.arithmetic:MAX_CHARS", "neither a tool nor a function"),
    ],
)
def test_a_name_without_a_tool_is_told(name: str, told: str):
    with pytest.raises(UnknownTool) as caught:
        ae.make_tool(name)

    assert told in f"{caught.value} {caught.value.remedy}"


def test_a_registered_tool_has_a_name_of_its_own():
    made = ae.register_tool(whisper)
    ae.register_tool(shout, name="loud")

    assert (ae.make_tool("whisper"), ae.make_tool("loud")) == (made, shout)
    assert ae.register_tool(whisper).name == "whisper"
    assert ae.make_tool("agentenv_tools.arithmetic:evaluate").name == "evaluate"
    assert ae.make_tool("calculator")("17*3") == 51
    with pytest.raises(UsageError, match="tool 'calculator' is registered already"):
        ae.register_tool(shout, name="calculator")
    assert ae.register_tool(shout, name="calculator", override=True) is ae.make_tool("calculator")


@pytest.mark.parametrize("tools", ["shell, calculator", ["shell", "calculator"]])
def test_a_run_replaces_the_tools_that_are_no_methods(tools: str | list[str]):
    entry = EnvSpec.of("talk/Talk-v0", Talk, tasks=[{}]).with_kwargs({"tools": tools})

    again = EnvSpec.from_json(entry.to_json())

    assert entry.make().toolbox.names == again.make().toolbox.names == ("listen", "shell", "calculator")


def test_an_entry_point_with_such_a_parameter_gets_the_tools_itself():
    class Own(Talk):
        def __init__(self, tools: str = "") -> None:
            self.given = tools

    env = EnvSpec.of("talk/Own-v0", Own, tasks=[{}]).make(tools="anything")

    assert env.given == "anything"
    assert env.toolbox.names == ("listen", "calculator", "shout")


@pytest.mark.parametrize(
    ("entry_point", "env", "told"),
    [
        (Talk, {"tools": "calculater"}, "unknown tool 'calculater'"),
        (type("Misspelt", (Talk,), {"tools": ("calculater",)}), {}, "unknown tool 'calculater'"),
        (ae.Env, {"tools": "calculator"}, "talk/X-v0 cannot be given tools"),
        (Talk, {"tools": "calculator", "volume": 3}, r"cannot be made with \['volume'\]"),
    ],
)
def test_what_is_wrong_with_tools_is_told_before_any_episode(entry_point, env, told, tmp_path):
    entry = EnvSpec.of("talk/X-v0", entry_point, tasks=[{}])

    with pytest.raises(UsageError, match=told):
        ae.evaluate(entry, num_tasks=1, env=env, runs_dir=tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_the_command_line_sets_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command):
    monkeypatch.chdir(tmp_path)
    tools = "env.tools=calculator,agentenv_tools.arithmetic:evaluate"

    assert command("eval", "agentenv/Calculator-v0", "-n", "1", "--json", "-o", tools).code == 0
    (trajectory,) = ae.find_run("last")
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["calculator", "evaluate"]


def test_a_tool_that_cannot_be_loaded_is_listed_with_its_error(command, monkeypatch):
    broken = EntryPoint("broken", "no_such_package:tool", "agentenv.tools")
    monkeypatch.setattr(tool_registry, "_points", {**tool_registry._entry_points, "broken": broken})

    good = command("list", "--load", "--json", "agentenv_tools")
    bad = command("list", "--load", "no_such_package")
    told = {row["name"]: row["description"] for row in good.json["tools"]}

    assert (good.code, bad.code) == (0, 1)
    assert told["shell"].startswith("Run a shell command")
    assert "cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'" in bad.out
    with pytest.raises(UnknownTool, match="'broken' of package 'no_such_package:tool' cannot be loaded"):
        ae.make_tool("broken")
