"""What an extra of an installed package still lacks, found without importing anything."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.metadata import EntryPoint

__all__ = ["install_command"]

_OF_EXTRA = re.compile(
    r"(?P<name>[\w.-]+) *(?:\[[^\]]*\])? *(?:== *(?P<version>[\w.+!]+))?"
    r".*\bextra *== *['\"](?P<extra>[\w.-]+)['\"]"
)
"""A requirement of an extra as package metadata has it, such as `toolz==1.2.0; extra == 'miniswe'`."""


def install_command(point: EntryPoint) -> str:
    """Return the command that installs what an entry point needs; empty if nothing is missing.

    An entry point names the extras that it needs behind its object: `module:Class [extra]`.
    """
    if point.dist is None:
        return ""
    found = [_OF_EXTRA.match(requirement) for requirement in point.dist.requires or ()]
    lacking = any(
        match is not None
        and match["extra"] in point.extras
        and not _is_installed(match["name"], match["version"])
        for match in found
    )
    return f"pip install '{point.dist.name}[{','.join(point.extras)}]'" if lacking else ""


def _is_installed(name: str, version: str | None) -> bool:
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return version is None or installed == version
