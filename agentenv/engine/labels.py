"""Labels under which servers store weights: whose they are, and which version.

`agentenv-VERSION@RUN@SINCE` are weights that the training RUN pushed, which has used the server since a time;
`agentenv-VERSION` are weights of no training that still goes on. All other labels are the server's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["VERSION_LABEL", "Label"]

VERSION_LABEL = "agentenv-"
"""Prefix of our labels."""
_LABEL = re.compile(rf"{VERSION_LABEL}(?P<version>\d{{1,15}})(?:@(?P<run>[^@]+)@(?P<since>[^@]*))?")


@dataclass(frozen=True, slots=True)
class Label:
    """Weights that this library pushed to a server. Labels are equal if run and version are."""

    version: int
    run: str = ""
    """Name of the training that pushed them; empty if none owns the server."""
    since: str = field(default="", compare=False)
    """When the training began to use the server, as text."""

    @classmethod
    def read(cls, text: str | None) -> Label | None:
        """Return what a server's label says; None if it is not one of ours."""
        found = _LABEL.fullmatch(text or "")
        return found and cls(int(found["version"]), found["run"] or "", found["since"] or "")

    def __str__(self) -> str:
        return f"{VERSION_LABEL}{self.version}" + (f"@{self.run}@{self.since}" if self.run else "")
