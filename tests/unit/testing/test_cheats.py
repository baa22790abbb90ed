"""Code that cheats in the place of the oracle's code: found where it pays, and low where it does not."""

from __future__ import annotations

import json

import pytest

import agentenv as ae
from agentenv.envs import EnvSpec
from agentenv.testing import check_env
from agentenv.testing.calls import tool_call_message
from agentenv.testing.checks.cheats import CHEATS, _Cheat

DOUBLE = "def double(x):\n    return 2 * x\n"
TASKS = [{"id": str(n), "x": n} for n in range(4)]


class Fooled(ae.ToolEnv):
    """Runs the answer beside its test."""

    def start(self, x: int) -> str:
        return "Write double(x)."

    def reward(self, answer: str, x: int) -> float:
        names: dict[str, object] = {}
        try:
            exec(answer.partition("\n")[2].rpartition("```")[0], names)
            return float(names["double"](x) == 2 * x)  # type: ignore[operator]
        except BaseException:  # noqa: BLE001 - what cheats may leave in any way
            return 0.0


class Careful(Fooled):
    """Takes plain numbers only."""

    def reward(self, answer: str, x: int) -> float:
        return float("return 2 * x" in answer)


def oracle(messages, task, rng):
    return f"```python\n{DOUBLE}```"


def tried(entry: type[ae.ToolEnv]):
    return EnvSpec.of(f"cheats/{entry.__name__}-v0", entry, tasks=TASKS, max_turns=1)


async def test_what_each_cheat_scored_is_told(monkeypatch: pytest.MonkeyPatch):
    kept = {name: CHEATS[name] for name in ("junk", "always equal", "exit code")}
    monkeypatch.setattr("agentenv.testing.checks.cheats.CHEATS", kept)

    fooled = (await check_env(tried(Fooled), only=("cheats",))).findings[0]
    careful = (await check_env(tried(Careful), only=("cheats",))).findings[0]

    assert fooled.status == "problem"
    assert "junk 0.00, always equal 1.00, exit code 0.00" in fooled.text
    assert (careful.status, careful.text) == ("ok", "junk 0.00, always equal 0.00, exit code 0.00")


async def test_an_oracle_without_code_is_not_exchanged():
    assert (await check_env("agentenv/Calculator-v0", only=("cheats",))).findings[0].status == "skipped"


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS)
def test_every_cheat_is_python_wherever_it_stands(code: str):
    old = "    if x:\n        return 1"
    calls = [
        tool_call_message("write", path="a.py", content=DOUBLE),
        tool_call_message("replace", old=old, new=""),
    ]
    for call in calls:
        cheat = _Cheat(lambda *_: None, code)
        said = json.loads(cheat.exchange(call)["tool_calls"][0]["function"]["arguments"])  # type: ignore[index]
        assert cheat.tried
        compile(said.get("content") or f"def f(x):\n{said['new']}", "cheat", "exec")
    assert "NAME" not in said["new"]
