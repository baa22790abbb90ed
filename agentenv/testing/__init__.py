"""Helpers for authors of tools and environments to use in their own tests.

- `check_env` uses an environment in every way that a run does, and reports what is wrong.
- `check_tool` calls a tool as models do, and reports what is wrong.
- `play` plays one episode with a scripted policy, without a model.
- `tool_call` and `tool_call_message` write the tool calls of a scripted model.
- The pytest plugin has the fixtures `play_episode`, `scripted_engine`, `scripted_runner` and
  `assert_env_ok`.

A policy is a function `policy(messages, task, rng)` that returns an assistant message or its text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.testing.calls import tool_call as tool_call
    from agentenv.testing.calls import tool_call_message as tool_call_message
    from agentenv.testing.checker import CheckReport as CheckReport
    from agentenv.testing.checker import Finding as Finding
    from agentenv.testing.checker import check_env as check_env
    from agentenv.testing.episodes import MessagePolicy as MessagePolicy
    from agentenv.testing.episodes import Played as Played
    from agentenv.testing.episodes import oracle_of as oracle_of
    from agentenv.testing.episodes import play as play
    from agentenv.testing.fuzz import random_arguments as random_arguments
    from agentenv.testing.tool_checker import check_tool as check_tool

__all__ = door(__name__)
