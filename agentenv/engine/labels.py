"""Labels under which servers store weights: whose they are, and which version.

`agentenv-VERSION@RUN@SINCE` are weights that the training RUN pushed, which has used the server since a time;
`agentenv-VERSION` are weights of no training that still goes on. All other labels are the server's own.

A training of adapters leaves the server's label as it is, because other trainings may have adapters beside
its own. Its name begins with `+`, and each version of its adapter has a name of its own: `NAME@RUN@VERSION`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from secrets import token_hex

__all__ = ["VERSION_LABEL", "Label", "adapter_name", "has_adapters", "owner_of_adapter", "run_of_adapters"]

VERSION_LABEL = "agentenv-"
"""Prefix of our labels."""
_LABEL = re.compile(rf"{VERSION_LABEL}(?P<version>\d{{1,15}})(?:@(?P<run>[^@]+)@(?P<since>[^@]*))?")


_ADAPTER = re.compile(r".+@(?P<run>\+[^@]+)@\d+")


def run_of_adapters(name: str) -> str:
    """Return the name under which a training of adapters uses servers, another one at each start.

    What a killed training has left on a server can then never pass for an adapter of the one that goes on.
    """
    return f"+{name}.{token_hex(3)}"


def has_adapters(run: str) -> bool:
    """Return whether this is the name of a training of adapters."""
    return run.startswith("+")


def adapter_name(adapter: str, run: str, version: int) -> str:
    """Return the name of a version of an adapter on the servers."""
    return f"{adapter}@{run}@{version}" if has_adapters(run) else adapter


def owner_of_adapter(name: str) -> str:
    """Return the training that pushed the adapter of this name; empty if none did."""
    found = _ADAPTER.fullmatch(name)
    return found["run"] if found else ""


@dataclass(frozen=True, slots=True)
class Label:
    """Weights that this library pushed to a server. Labels are equal if run and version are."""

    version: int
    run: str = ""
    """Name of the training that pushed them; empty if none owns the server."""
    since: str = field(default="", compare=False)
    """When the training began to use the server, as text."""

    @property
    def training(self) -> str:
        """The run as its directory is called."""
        return self.run.removeprefix("+").rpartition(".")[0] if has_adapters(self.run) else self.run

    @classmethod
    def read(cls, text: str | None) -> Label | None:
        """Return what a server's label says; None if it is not one of ours."""
        found = _LABEL.fullmatch(text or "")
        return found and cls(int(found["version"]), found["run"] or "", found["since"] or "")

    def __str__(self) -> str:
        return f"{VERSION_LABEL}{self.version}" + (f"@{self.run}@{self.since}" if self.run else "")
