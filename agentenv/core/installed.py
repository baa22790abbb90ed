"""How this library was installed, so that a line that installs more of it can be copied as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["DISTRIBUTION", "dependency", "install_line"]

DISTRIBUTION = "agentenv-rl"


def install_line(extra: str, *, package: str = DISTRIBUTION, more: str = "") -> str:
    """Return the command that adds an extra to an installed package, from where the package came.

    Args:
        extra: name of the extra, or several with commas between them.
        package: distribution that has the extra.
        more: packages that pip must install without their dependencies.
    """
    origin = _origin(package)
    wanted, editable = dependency(extra, package=package), ""
    if "dir_info" in origin:
        clone = _path(origin["url"])
        wanted = f"{'.' if clone == Path.cwd() else clone}[{extra}]"
        editable = "-e " if origin["dir_info"].get("editable") else ""
    return f"pip install {editable}'{wanted}'" + (f" && pip install --no-deps {more}" if more else "")


def dependency(extra: str = "", *, package: str = DISTRIBUTION) -> str:
    """Return the requirement by which another package depends on this one, as it is installed here."""
    name, origin = f"{package}[{extra}]" if extra else package, _origin(package)
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return f"{name} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
    return f"{name} @ {origin['url']}" if origin else name


def _origin(package: str) -> dict[str, Any]:
    """Return what the installer noted (PEP 610); empty for an index, and where the source has gone."""
    from importlib import metadata  # costs too much for a program that needs no such line

    try:
        text = metadata.distribution(package).read_text("direct_url.json")
        origin = json.loads(text) if text else {}
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    url = origin.get("url", "")
    return {} if url.startswith("file:") and not _path(url).exists() else origin


def _path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))
