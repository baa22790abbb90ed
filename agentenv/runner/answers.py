"""The answers that the runner itself gives to tool calls, and what it asks of those of an environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import cast

from agentenv.core.episode_env import StepResult
from agentenv.core.errors import EnvironmentMisuse, UsageError
from agentenv.core.messages import CallStatus, JsonValue, ToolCall, ToolErrorKind, ToolResult
from agentenv.runner.condense import RECALL_TOOL
from agentenv.tools.arguments import mend_call

__all__ = ["check_step", "malformed", "marked", "mend", "not_run", "with_recall"]

_KINDS = {
    CallStatus.UNKNOWN_TOOL: ToolErrorKind.UNKNOWN_TOOL,
    CallStatus.BAD_ARGUMENTS: ToolErrorKind.BAD_ARGUMENTS,
}


def with_recall(tools: tuple[Mapping[str, JsonValue], ...]) -> tuple[Mapping[str, JsonValue], ...]:
    """Return the tools of an episode whose conversation may be condensed."""
    names = [cast("Mapping[str, object]", tool["function"])["name"] for tool in tools]
    if "recall_block" in names:
        raise UsageError("the environment has a tool recall_block of its own: it cannot be condensed")
    return (*tools, RECALL_TOOL)


def malformed(call: ToolCall) -> ToolResult:
    """Tell the model what is wrong with a call that could not be read."""
    kind = _KINDS.get(call.status, ToolErrorKind.INVALID_JSON)
    return ToolResult(call.id, call.name, call.error or f"malformed tool call: {call.status.value}", kind)


def mend(
    calls: list[ToolCall], tools: tuple[Mapping[str, JsonValue], ...]
) -> tuple[list[ToolCall], frozenset[str]]:
    """Mend calls whose JSON is broken; return all calls, and the ids of those that were mended."""
    names = {str(cast("Mapping[str, object]", tool["function"])["name"]) for tool in tools}
    tried = [mend_call(call, names) for call in calls]
    return tried, frozenset(new.id for old, new in zip(calls, tried, strict=True) if new is not old)


def marked(results: tuple[ToolResult, ...], mended: frozenset[str]) -> list[ToolResult]:
    """Mark the results of calls that were mended."""
    return [replace(one, repaired=True) if one.tool_call_id in mended else one for one in results]


def not_run(call: ToolCall, why: str) -> ToolResult:
    """Tell the model why a call was not run."""
    return ToolResult(call.id, call.name, f"not run: {why}", ToolErrorKind.NOT_RUN)


def check_step(step: StepResult, calls: list[ToolCall]) -> None:
    """Check what an environment answered.

    Raises:
        EnvironmentMisuse: Calls without a result, or a reward that is no number.
    """
    answered = [result.tool_call_id for result in step.tool_results]
    if answered != [call.id for call in calls]:
        raise EnvironmentMisuse(
            f"the environment answered the calls {answered} where {[call.id for call in calls]} were made; "
            "give one result for each call, in call order"
        )
    if not isfinite(step.reward):
        raise EnvironmentMisuse(f"step gave the reward {step.reward!r}; it must be finite")
