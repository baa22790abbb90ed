"""What a jail shows: the interpreter, the system's programs, and the packages asked for."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from agentenv.core.errors import SandboxUnavailable, UsageError

__all__ = ["JAIL_CODE", "JailLayout"]

JAIL_CODE = Path(__file__).parent / "jail"
_TAKEN = ("/tmp", "/work", "/dev", "/proc", "/jail", "/site", "/etc")  # noqa: S108 - names inside the jail
_ETC = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_NOBODY = 65534
_QUESTION = (
    "import json, os, sys, sysconfig; "
    "print(json.dumps([os.path.realpath(sys.executable), sys.base_prefix, sysconfig.get_path('stdlib')]))"
)


def _within(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


@dataclass(frozen=True, slots=True)
class JailLayout:
    """Where the interpreter is, and what of the machine the code may read."""

    python: str
    """The interpreter's file, with links resolved."""
    prefix: str
    stdlib: str
    packages: tuple[tuple[str, str], ...] = ()
    """Name under the jail's site folder, and the file or folder on this machine."""

    @classmethod
    def find(cls, python: str | None, packages: Sequence[str]) -> JailLayout:
        """Look at an interpreter, by default the one that runs us (without its virtual environment).

        Raises:
            UsageError: The interpreter cannot be run, or a package is not installed.
        """
        found = tuple(_package_paths(packages))
        if python is None:
            base = getattr(sys, "_base_executable", None) or sys.executable
            stdlib = str(Path(sysconfig.get_path("stdlib")).resolve())
            return cls(os.path.realpath(base), str(Path(sys.base_prefix).resolve()), stdlib, found)
        try:
            answer = subprocess.run(  # noqa: S603 - the caller's own choice
                [python, "-I", "-S", "-c", _QUESTION], capture_output=True, check=True, timeout=30, text=True
            )
            executable, prefix, stdlib = json.loads(answer.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise UsageError(f"python={python!r} is no interpreter that runs here: {error}") from error
        return cls(executable, str(Path(prefix).resolve()), str(Path(stdlib).resolve()), found)

    def _hidden(self) -> list[str]:
        """Return folders that hold other people's packages and data: answers, for instance."""
        hidden = ["/usr/src"]
        if not _within(self.prefix, ["/usr/local"]):
            hidden.append("/usr/local")
        for place in {"/usr", "/usr/local", self.prefix}:
            for pattern in ("lib*/python3*/site-packages", "lib*/python3*/dist-packages"):
                hidden += [str(path) for path in Path(place).glob(pattern)]
        return sorted(path for path in set(hidden) if Path(path).is_dir())

    def for_namespaces(self) -> dict[str, object]:
        """Return the part of the jail's configuration that says what is where."""
        shown = {"/usr": "/usr", "/jail/jail": str(JAIL_CODE), **{path: path for path in _ETC}}
        home = self.prefix
        if _within(self.prefix, _TAKEN):
            home = "/python"
        if not _within(self.prefix, ["/usr"]):
            shown[home] = self.prefix
        python = self.python
        if _within(self.python, [self.prefix]):
            python = home + self.python.removeprefix(self.prefix)
        elif not _within(self.python, ["/usr"]):
            raise UsageError(f"interpreter {self.python} lies outside its own prefix {self.prefix}")
        hidden = [
            home + p.removeprefix(self.prefix) if _within(p, [self.prefix]) else p for p in self._hidden()
        ]
        shown |= {f"/site/{name}": path for name, path in self.packages}
        return {
            "python": python,
            "libraries": f"{home}/lib" if home == "/python" else "",
            "shown": shown,
            "hidden": hidden,
            "site": ["/site"] if self.packages else [],
        }

    def for_landlock(self, base: str) -> dict[str, object]:
        """Return the same where the machine's own files are seen, through a list of what may be read.

        Raises:
            SandboxUnavailable: Root runs this, and nobody, whom the code runs as, cannot reach the
                interpreter.
        """
        if os.geteuid() == 0:
            for path in (self.python, self.stdlib):
                if not _open_to_all(path):
                    raise SandboxUnavailable(
                        f"as root, the code runs as nobody (uid {_NOBODY}), who cannot read {path}",
                        remedy="pass python='/usr/bin/python3' or run as an ordinary user",
                    )
        hidden = self._hidden()
        tops = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", *_ETC]
        if not _within(self.prefix, ["/usr"]):
            tops.append(self.prefix)
        real = sorted({os.path.realpath(top) for top in tops if Path(top).exists()})
        tops = [top for top in real if not _within(str(Path(top).parent), real)]
        readable = [path for top in tops for path in _without(top, hidden)]
        site = f"{base}/site"
        if self.packages:
            Path(site).mkdir(mode=0o755)
            for name, path in self.packages:
                Path(site, name).symlink_to(path)
                readable.append(path)
            readable.append(site)
        return {
            "python": self.python,
            "libraries": "",
            "readable": readable,
            "site": [site] if self.packages else [],
            "base": base,
        }


def _without(top: str, hidden: Sequence[str]) -> list[str]:
    """Return paths that cover a tree but for some folders in it."""
    if top in hidden:
        return []
    if not any(_within(path, [top]) for path in hidden):
        return [top]
    return [path for entry in sorted(Path(top).iterdir()) for path in _without(str(entry), hidden)]


def _open_to_all(path: str) -> bool:
    """Return whether any user may reach and read a path."""
    here = Path(path)
    if not here.stat().st_mode & stat.S_IROTH:
        return False
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in here.parents)


def _package_paths(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the files of packages and of all that they need, but no others."""
    wanted = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
    if not wanted:
        return []
    by_module = metadata.packages_distributions()
    done: set[str] = set()
    found: dict[str, str] = {}
    while wanted:
        name = wanted.pop()
        for dist_name in by_module.get(name.partition(".")[0], [name]):
            key = re.sub(r"[-_.]+", "-", dist_name).lower()
            if key in done:
                continue
            done.add(key)
            try:
                dist = metadata.distribution(dist_name)
            except metadata.PackageNotFoundError:
                if name in names:
                    raise UsageError(
                        f"package {name!r} is not installed; the sandbox cannot show it"
                    ) from None
                continue
            found |= _top_levels(dist)
            wanted += [
                match[0] for r in dist.requires or () if ";" not in r and (match := re.match(r"[\w.-]+", r))
            ]
    return sorted(found.items())


def _top_levels(dist: metadata.Distribution) -> dict[str, str]:
    tops: dict[str, str] = {}
    for file in dist.files or ():
        top = file.parts[0]
        if top not in ("..", "__pycache__", "bin") and not top.endswith((".dist-info", ".pth")):
            tops[top] = str(Path(str(dist.locate_file(top))).resolve())
    if not tops and (spec := util.find_spec(dist.name)) and spec.origin:
        tops[dist.name] = str(Path(spec.origin).parent)
    return {name: path for name, path in tops.items() if Path(path).exists()}
