"""A package of somebody else adds one of each kind through entry points, without a change in this repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

MODULE = '''
from agentenv.core import ToolError
from agentenv.engine import LoadedModel, ModelForm, ScriptedEngine, check_options
from agentenv.envs import EnvSpec, ToolEnv, World
from agentenv.runs import Format
from agentenv.sandbox import BackendFinding, SandboxDiagnosis
from agentenv.render import byte_tokenizer
from agentenv.tools import Tool
from agentenv_unsafe import UnsafeSandbox


class Riddle(ToolEnv):
    tasks = [{"question": "Say yes."}]

    def start(self, question: str) -> str:
        return question

    def reward(self, answer: str) -> float:
        return float(answer == "yes")


def riddle(name: str) -> EnvSpec:
    return EnvSpec.of(f"riddles/{name}-v0", Riddle, description=f"the riddle {name}")


def parrot(rest, tokenizer, options):
    check_options(ScriptedEngine, f"parrot:{rest}", options)
    codec = byte_tokenizer()
    return LoadedModel(ScriptedEngine([rest], tokenizer=codec, repeat_last=True, **options), codec)


def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


def rows(export):
    return ({"told": episode.reward} for episode in export.episodes())


RIDDLES = World(riddle, "NAME", ("no_such_module",), "pip install riddles[all]", "riddles by name")
PARROT = ModelForm(parrot, "parrot:WORDS")
REWARDS = Format(rows)
BROKEN = 3


class Box(UnsafeSandbox):
    @staticmethod
    async def diagnose():
        return SandboxDiagnosis(None, (BackendFinding("box", False, "its lid is missing"),))


def greet(name: str = "you"):
    print(f"hello {name}")
'''
ENTRY_POINTS = """
[agentenv.envs]
riddles/Yes-v0 = riddles:Riddle
[agentenv.worlds]
riddle = riddles:RIDDLES
broken = riddles:BROKEN
[agentenv.engines]
parrot = riddles:PARROT
[agentenv.formats]
rewards = riddles:REWARDS
[agentenv.sandboxes]
box = riddles:Box
[agentenv.tools]
shout = riddles:shout
[agentenv.verbs]
greet = riddles:greet
sandbox.greet = riddles:greet
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the installed package `riddles`."""
    info = tmp_path / "site" / "riddles-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: riddles\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info.parent / "riddles.py").write_text(MODULE)
    return info.parent


def run(site: Path, *words: str, code: int = 0) -> str:
    """Run Python beside the package and return what it printed, errors included."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *words],
        cwd=site.parent,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def test_its_world_and_engine_play_and_its_format_writes_the_run(site):
    told = run(site, "-m", "agentenv", "eval", "riddle:Yes", "-m", "parrot:yes", "--json")

    assert json.loads(told.splitlines()[-1])["run"]
    name = json.loads(told.splitlines()[-1])["run"]
    written = run(site, "-m", "agentenv", "export", name, "--as", "rewards")
    assert written.split()[1:] == ["1", "episodes"]
    assert json.loads(Path(site.parent, written.split()[0]).read_text()) == {"told": 1.0}


def test_the_engine_of_the_page_is_played_and_its_doctor_finds_nothing_wrong(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text().partition("## An engine\n")[2]
    entry, module = re.findall(r"```(?:toml|python)\n(.*?)```", page, re.DOTALL)[:2]
    info = tmp_path / "site" / "babble-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: babble\nVersion: 1.0\n")
    ((group, points),) = tomllib.loads(entry)["project"]["entry-points"].items()
    (info / "entry_points.txt").write_text(
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
    )
    (info.parent / "babble.py").write_text(module)

    played = run(
        info.parent, "-m", "agentenv", "eval", "agentenv/Calculator-v0", "-m", "babble:abc", "-n", "1"
    )
    told = run(info.parent, "-m", "agentenv", "doctor", "-m", "babble:abcdefgh")

    assert "final_answer 1" in played
    assert "16 tokens, 16 log-probabilities, weights version 0" in told
    assert "WRONG" not in told


def test_its_parts_are_listed_with_what_they_need_and_what_is_wrong(site):
    told = json.loads(run(site, "-m", "agentenv", "list", "--json", code=1))
    assert "riddles/Yes-v0" in [row["id"] for row in told["environments"]]
    assert "shout" in [row["name"] for row in told["tools"]]
    worlds = {row["name"]: row for row in told["libraries"]}
    assert worlds["riddle:NAME"]["needs"] == "pip install riddles[all]"
    assert worlds["broken:..."]["error"] == "UsageError: riddles:BROKEN is 3, which is no agentenv.envs.World"


def test_its_sandbox_and_tool_are_used_by_name(site):
    code = (
        "import asyncio, agentenv as ae\n"
        "async def main():\n"
        "    async with ae.sandbox.create('box', size=1) as box:\n"
        "        print(type(box).__name__, (await box.run_code('print(1)')).stdout)\n"
        "asyncio.run(main())\n"
        "print(ae.make_tool('shout').name, ae.spec('riddle:No').id)"
    )

    assert run(site, "-W", "ignore", "-c", code).split() == ["Box", "1", "shout", "riddles/No-v0"]


def test_its_verbs_run_beside_ours_and_below_them(site):
    assert run(site, "-m", "agentenv", "greet", "--name", "Ada") == "hello Ada\n"
    assert run(site, "-m", "agentenv", "sandbox", "greet") == "hello you\n"
    assert re.search(r"^ *greet +riddles$", run(site, "-m", "agentenv", "--help"), re.M)
    assert "greet" in run(site, "-m", "agentenv", "sandbox", "--help")
    assert "did you mean 'greet'?" in run(site, "-m", "agentenv", "greeet", code=2)


def test_the_doctor_shows_what_its_sandbox_says(site):
    assert "no  box: its lid is missing" in run(site, "-m", "agentenv", "doctor")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("eval", "ridle:Yes", "-m", "mock"), "did you mean 'riddle'?"),
        (("eval", "riddle:Yes", "-m", "parot:yes"), "did you mean parrot:WORDS?"),
        (("eval", "broken:x", "-m", "mock"), "of package 'riddles' cannot be loaded"),
    ],
)
def test_a_misspelt_or_broken_part_is_told(site, words, meant):
    assert meant in run(site, "-m", "agentenv", *words, code=2)
