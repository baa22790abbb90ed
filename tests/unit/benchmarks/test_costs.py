"""Every entrance answers every kind of attack; the table of what that costs has no open cell."""

from __future__ import annotations

import re
import sys
from contextlib import suppress

import pytest

from agentenv.core.errors import AgentEnvError
from helpers.scripts import load_benchmark

costs = load_benchmark("costs")
PLAYED = [
    (entrance, kind)
    for entrance, (_, reasons) in costs.ENTRANCES.items()
    for kind in costs.KINDS
    if kind not in reasons
]


def test_the_page_has_a_row_an_entrance_and_no_open_cell():
    rows = [line.strip("| ").split(" | ") for line in costs.PAGE.read_text().splitlines() if "|" in line][2:]

    assert [row[0] for row in rows] == list(costs.ENTRANCES)
    assert {len(row) for row in rows} == {1 + len(costs.KINDS)}
    assert not [cell for row in rows for cell in row if not cell.strip() or "ERROR" in cell]


def test_no_cell_of_the_page_is_above_what_is_promised():
    found = re.findall(r"\(([\d.]+) s, (\d+) MB\)", costs.PAGE.read_text())

    assert len(found) == len(PLAYED)
    assert max(float(seconds) for seconds, _ in found) <= costs.LIMIT_S
    assert max(int(megabytes) for _, megabytes in found) <= costs.LIMIT_MB


@pytest.mark.skipif(sys.platform != "linux", reason="UNTESTED: asks programs and devices of Linux")
@pytest.mark.parametrize(("entrance", "kind"), PLAYED)
async def test_an_attack_is_answered_or_refused_in_words(entrance, kind, monkeypatch):
    if entrance == "MCP":
        pytest.importorskip("mcp", reason="UNTESTED: mcp is not installed")
    monkeypatch.setattr(costs, "SIZE", 20_000)
    monkeypatch.setattr(costs, "BINARY", bytes(range(256)) * 80)
    # Whatever else is raised is a crash.
    with suppress(AgentEnvError):
        assert await costs.ENTRANCES[entrance][0](kind)
