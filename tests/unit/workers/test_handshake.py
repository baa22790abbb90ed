"""A worker that has other files or another version than the driver is refused, and its node is named."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from agentenv.core import UsageError
from agentenv.envs import spec
from agentenv.workers import crew_of
from agentenv.workers.handshake import Handshake, parts_here
from helpers.worker_runs import recipe_of

SHOP = """
import agentenv as ae

class Shop(ae.ToolEnv):
    async def start(self, x):
        return "go"

    async def reward(self):
        return 1.0

ae.register("shop/Handshake-v0", Shop, tasks=[{"x": 1}], override=True)
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text(SHOP)
    Path("prices.jsonl").write_text('{"apple": 1}\n')
    (tmp_path / "runs").mkdir()
    return spec("shop.py:shop/Handshake-v0")


def test_equal_parts_pass_and_others_are_named(shop, tmp_path: Path):
    here = Handshake([shop])
    there = parts_here([shop])
    here.require(there, "w1", "node-b")
    data, code = f"{tmp_path.name}/prices.jsonl", f"{tmp_path.name}/shop.py"
    assert {"Python", "agentenv", data, code} <= there.keys()

    for changed in ({**there, data: "0"}, {**there, "agentenv": "0"}, {**there, "Python": "3.1"}):
        with pytest.raises(UsageError, match=r"worker w1 on node-b cannot play this run.* has another (\S+)"):
            here.require(changed, "w1", "node-b")
    with pytest.raises(UsageError, match=r"has no \S*/prices.jsonl"):
        here.require({name: there[name] for name in there if name != data}, "w1", "node-b")


def test_folders_that_the_code_names_are_compared_and_others_are_not(shop, tmp_path: Path):
    Path("shop.py").write_text(f'{SHOP}\nimport helpers\nSTOCK = "stock/today"\nOUT = "runs"\n')
    for file in ("helpers/sums.py", "stock/today/a.csv", "other/b.csv", "runs/c.json", "stock/runs/d.json"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("1")

    names = {name.removeprefix(f"{tmp_path.name}/") for name in parts_here([shop])}

    assert {"helpers/sums.py", "stock/today/a.csv"} <= names
    assert not names & {"other/b.csv", "runs/c.json", "stock/runs/d.json"}


def test_what_a_run_writes_beside_its_environment_refuses_no_worker(shop):
    here = Handshake([shop])
    later = time.time() + 5
    Path("prices.jsonl").write_text("written by the run\n")
    os.utime("prices.jsonl", (later, later))
    Path("notes.txt").write_text("written by the run\n")

    here.require(parts_here([shop]), "w1", "node-b")


def crew(shop, **where):
    return crew_of(recipe_of([shop], workers=1), [shop], workers=1, **where)


def test_code_that_changes_while_a_run_goes_on_joins_it_in_no_worker(shop):
    hired = crew(shop)
    Path("shop.py").write_text(SHOP + "# newer\n")

    with pytest.raises(UsageError, match=r"on this machine cannot play .* another \S*/shop.py"):
        asyncio.run(hired.__aenter__())
