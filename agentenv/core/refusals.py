"""The table of calls that are answered without being run, with what the model is told about each."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from agentenv.core.errors import did_you_mean
from agentenv.core.messages import CallStatus, ToolCall, ToolErrorKind, ToolResult

__all__ = ["Refusal", "malformed", "unknown_tool"]


class Refusal(Enum):
    """Why a well-formed call is not run, in the words that the model reads."""

    CUT = "the completion was cut at its token limit"
    FILTERED = "a filter withheld the completion"
    ENV_FINISHED = "the environment has finished"
    LAST_TURN = "this was the last allowed turn ({limit})"
    TURN_CALLS = "at most {limit} tool calls are run in one turn; call again"
    EPISODE_CALLS = "limit of {limit} tool calls reached"
    NO_SUCH_TOOL = "no tool of this environment"
    """The `step` of an environment left the call without an answer."""
    LEFT_BY_AGENT = "the agent did not go on from here"
    """An agent with a loop of its own never sent the result of the call."""

    def answer(self, call: ToolCall, limit: object = None) -> ToolResult:
        """Return the answer to a call; `limit` is the limit that the words name."""
        text = f"not run: {self.value.format(limit=limit)}"
        return ToolResult(call.id, call.name, text, ToolErrorKind.NOT_RUN)


_ERROR_KINDS = {
    CallStatus.UNKNOWN_TOOL: ToolErrorKind.UNKNOWN_TOOL,
    CallStatus.BAD_ARGUMENTS: ToolErrorKind.BAD_ARGUMENTS,
    CallStatus.IN_THINKING: ToolErrorKind.NOT_RUN,
}
"""Error kind of a result for each status of a call; every other status means broken JSON."""


def malformed(call: ToolCall) -> ToolResult:
    """Answer a call that could not be read with what is wrong with it."""
    kind = _ERROR_KINDS.get(call.status, ToolErrorKind.INVALID_JSON)
    return ToolResult(call.id, call.name, call.error or f"malformed tool call: {call.status.value}", kind)


def unknown_tool(name: str, tools: Collection[str]) -> str:
    """Return what the model is told about a call of a tool that does not exist."""
    if not tools:
        return f"unknown tool {name!r}; there are no tools"
    meant = did_you_mean(name, tools)
    return f"unknown tool {name!r}{f'; {meant}' if meant else ''}; the tools are: {', '.join(tools)}"
