"""The files that are visible in a jail: what the interpreter and the system's programs need, chosen packages.

The list names what is shown, so that whatever else a machine has (packages of other environments, wheels
that come with Python, sources, the user's files) stays out, wherever it lies.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from agentenv.core import SandboxUnavailable, UsageError

__all__ = ["JAIL_CODE", "JailLayout"]

JAIL_CODE = Path(__file__).parent / "jail"
_ETC = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_NOBODY = 65534
_SYSTEM = ("bin", "sbin", "lib32", "lib64", "lib/locale", "lib/terminfo", "share/terminfo", "share/zoneinfo")
"""Folders of `/usr`, and of `/` where the two are apart, with programs and what most of them read."""
_LIBRARIES = re.compile(r".+\.so(\.[\w.]+)?")
_PLATFORM = re.compile(r"\w+-linux-\w+")
"""Folder of the shared libraries of one kind of machine, as Debian names it."""
_GENERATED = re.compile(r"_sysconfigdata_\w*|__pycache__|lib-dynload")
"""Entries of the standard library that are no modules with names of their own."""
_UNNEEDED = frozenset({"idlelib", "test", "turtledemo"})
"""Modules of the standard library that only programs about Python need."""
_INNER = (
    "ctypes/test",
    "distutils/tests",
    "ensurepip/_bundled",
    "lib2to3/tests",
    "sqlite3/test",
    "tkinter/test",
    "unittest/test",
)
"""Folders inside modules that are not needed either: tests, and wheels of other packages."""
_QUESTION = (
    "import json, os, sys, sysconfig; print(json.dumps([os.path.realpath(sys.executable), sys.base_prefix, "
    "sysconfig.get_path('stdlib'), sorted(sys.stdlib_module_names)]))"
)


def _within(path: str, folders: Collection[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


@dataclass(frozen=True, slots=True)
class JailLayout:
    """The location of the interpreter, and the files of the machine that the code may read."""

    python: str
    """Path of the interpreter, with links resolved."""
    prefix: str
    stdlib: str
    modules: frozenset[str]
    """Names of the modules of the interpreter's standard library."""
    packages: tuple[tuple[str, str], ...] = ()
    """Pairs of a name in the jail's site folder and the file or folder on this machine."""

    @classmethod
    def find(cls, python: str | None, packages: Sequence[str]) -> JailLayout:
        """Return the layout for an interpreter; None means the one that runs this process.

        The virtual environment of the interpreter is not part of the layout.

        Raises:
            UsageError: The interpreter cannot be run, or a package is not installed.
        """
        package_paths = tuple(_package_paths(packages))
        if python is None:
            base = getattr(sys, "_base_executable", None) or sys.executable
            stdlib = str(Path(sysconfig.get_path("stdlib")).resolve())
            prefix = str(Path(sys.base_prefix).resolve())
            return cls(os.path.realpath(base), prefix, stdlib, sys.stdlib_module_names, package_paths)
        try:
            answer = subprocess.run(  # noqa: S603 - the caller's own choice
                [python, "-I", "-S", "-c", _QUESTION], capture_output=True, check=True, timeout=30, text=True
            )
            executable, prefix, stdlib, modules = json.loads(answer.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise UsageError(f"python={python!r} is not an interpreter that runs here: {error}") from error
        home, library = str(Path(prefix).resolve()), str(Path(stdlib).resolve())
        return cls(executable, home, library, frozenset(modules), package_paths)

    def _shown(self) -> list[str]:
        """Return the files and folders that the code may read, but for the packages, by the names in use."""
        shown = {*_ETC, self.python, self.stdlib, f"{self.prefix}/share/zoneinfo"}
        for top in ("/", "/usr/"):
            shown |= {top + name for name in _SYSTEM}
        for folder in {"/lib", "/usr/lib", f"{self.prefix}/lib"}:
            if Path(folder).is_dir():
                shown |= {str(path) for path in Path(folder).iterdir() if _is_library(path)}
        return sorted(
            path for path in shown if Path(path).exists() and not _within(str(Path(path).parent), shown)
        )

    def _hidden(self) -> list[str]:
        """Return what lies in the folder of the standard library and is no part of it."""
        inner = [path for name in _INNER if (path := Path(self.stdlib, name)).is_dir()]
        found = [path for path in Path(self.stdlib).iterdir() if not self._is_needed(path.name)]
        return sorted(map(str, [*inner, *found]))

    def _is_needed(self, entry: str) -> bool:
        module = entry.partition(".")[0]
        return bool(_GENERATED.match(entry)) or (module in self.modules and module not in _UNNEEDED)

    def for_namespaces(self) -> dict[str, object]:
        """Return the paths in the jail's configuration for the namespace tier."""
        home = self.prefix if _within(self.prefix, ["/usr"]) else "/python"

        def inside(path: str) -> str:
            return home + path.removeprefix(self.prefix) if _within(path, [self.prefix]) else path

        if not _within(self.python, [self.prefix, "/usr"]):
            raise UsageError(f"interpreter {self.python} is outside its own prefix {self.prefix}")
        # Where /bin and the like are links into /usr, the jail's root gets the same links.
        named = [path for path in self._shown() if not Path("/", Path(path).parts[1]).is_symlink()]
        shown = {inside(path): path for path in named} | {"/jail/jail": str(JAIL_CODE)}
        shown |= {f"/site/{name}": path for name, path in self.packages}
        return {
            "python": inside(self.python),
            # An interpreter that moved finds a shared libpython of its own by this path only.
            "libraries": f"{home}/lib" if home == "/python" and any(map(_is_libpython, named)) else "",
            "shown": shown,
            "hidden": [inside(path) for path in self._hidden()],
            "site": ["/site"] if self.packages else [],
        }

    def for_landlock(self, base: str) -> dict[str, object]:
        """Return the paths in the jail's configuration for the Landlock tier.

        In this tier the code sees the machine's own file system and may read only the listed paths.

        Raises:
            SandboxUnavailable: This process runs as root, so the code runs as the user nobody, who cannot
                read the interpreter.
        """
        if os.geteuid() == 0:
            for path in (self.python, self.stdlib):
                if not _open_to_all(path):
                    raise SandboxUnavailable(
                        f"as root, the code runs as nobody (uid {_NOBODY}), who cannot read {path}",
                        remedy="pass python='/usr/bin/python3' or run as an ordinary user",
                    )
        hidden = self._hidden()
        real = sorted({os.path.realpath(path) for path in self._shown()})
        tops = [path for path in real if not _within(str(Path(path).parent), real)]
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
            # Python's imports list the folder, of which only what is needed is readable.
            "listed": self.stdlib,
            "site": [site] if self.packages else [],
            "base": base,
        }


def _is_library(path: Path) -> bool:
    """Return whether an entry of a `lib` folder is a shared library, or a folder of nothing but those."""
    return bool(_LIBRARIES.fullmatch(path.name) or _PLATFORM.fullmatch(path.name))


def _is_libpython(path: str) -> bool:
    return Path(path).name.startswith("libpython")


def _without(top: str, hidden: Sequence[str]) -> list[str]:
    """Return paths that together cover a tree without some folders in it."""
    if top in hidden:
        return []
    if not any(_within(path, [top]) for path in hidden):
        return [top]
    return [path for entry in sorted(Path(top).iterdir()) for path in _without(str(entry), hidden)]


def _open_to_all(path: str) -> bool:
    """Return whether every user may reach and read a path."""
    file = Path(path)
    if not file.stat().st_mode & stat.S_IROTH:
        return False
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in file.parents)


def _package_paths(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the files of packages and of their dependencies, but no others."""
    wanted = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
    if not wanted:
        return []
    by_module = metadata.packages_distributions()
    done: set[str] = set()
    tops: dict[str, str] = {}
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
                        f"package {name!r} is not installed, so code in the sandbox cannot import it"
                    ) from None
                continue
            tops |= _top_levels(dist)
            wanted += [
                match[0] for r in dist.requires or () if ";" not in r and (match := re.match(r"[\w.-]+", r))
            ]
    return sorted(tops.items())


def _top_levels(dist: metadata.Distribution) -> dict[str, str]:
    tops: dict[str, str] = {}
    for file in dist.files or ():
        top = file.parts[0]
        if top not in ("..", "__pycache__", "bin") and not top.endswith((".dist-info", ".pth")):
            tops[top] = str(Path(str(dist.locate_file(top))).resolve())
    if not tops and (spec := util.find_spec(dist.name)) and spec.origin:
        tops[dist.name] = str(Path(spec.origin).parent)
    return {name: path for name, path in tops.items() if Path(path).exists()}
