"""Names of a world's environments: which there are, told to who writes a wrong one."""

from __future__ import annotations

from collections.abc import Collection

from agentenv.core import AgentEnvError, UnknownEnvironment, did_you_mean

__all__ = ["check_known"]

_LISTED = 20
"""Names that an error lists; of more, the first few."""


def check_known(
    problem: str, name: str, known: Collection[str], error: type[AgentEnvError] = UnknownEnvironment
) -> None:
    """Check that a name is among those that a world has.

    Args:
        problem: what is wrong otherwise, such as `tau2 has no domain`.
        name: the name.
        known: the names that there are.
        error: what is raised.

    Raises:
        UnknownEnvironment: It is not among them; the error names the nearest one.
    """
    if name in known:
        return
    names = list(known)
    listed = ", ".join(names if len(names) <= _LISTED else [*names[:5], "..."])
    raise error(f"{problem} {name!r}", remedy=f"{did_you_mean(name, known)} there are: {listed}".lstrip())
