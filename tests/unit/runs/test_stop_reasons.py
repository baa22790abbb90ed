"""A stop reason that a limit or a filter causes has its words wherever reasons are explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentenv.core import StopReason
from agentenv_bridges.formats.inspect_log import LIMITS as OF_INSPECT
from agentenv_bridges.formats.prime_rl import CONDITIONS

RUNNER = (Path(__file__).parents[3] / "docs" / "runner.md").read_text()
PLACES = {
    "docs/runner.md": (re.findall(r"`(\w+)`", RUNNER), ""),
    "their remedies": (
        [reason for reason in StopReason if reason.remedy],
        "max_user_turns content_filter env_truncated",
    ),
    "LIMITS of Inspect": (
        OF_INSPECT,
        "max_user_turns max_tool_calls max_parse_errors content_filter env_truncated",
    ),
    "CONDITIONS of verifiers": (
        CONDITIONS,
        "max_turns max_user_turns max_tool_calls max_parse_errors content_filter env_truncated deadline",
    ),
}
"""Each place with the reasons that it says nothing of, on purpose."""


@pytest.mark.parametrize("place", PLACES)
def test_every_reason_that_cuts_an_episode_has_its_place(place):
    told, left_out = PLACES[place]

    assert {one.value for one in StopReason if one.truncated} - {str(one) for one in told} == {
        *left_out.split()
    }
