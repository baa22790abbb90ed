"""`agentenv new`: make an installable environment package that passes its checks and its tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import typer

from agentenv.core.files import user_text
from agentenv.core.installed import dependency

__all__ = ["files_from", "files_of", "run"]


def run(
    name: str = typer.Argument(..., help="Name of the environment, such as shop-math."),
    source: str = typer.Option(
        "", "--from", metavar="FILE", help="Make the package of this environment, path/to/file.py."
    ),
    directory: str = typer.Option(
        "", "--dir", help="Directory to make; named like the environment if empty."
    ),
) -> None:
    """Make a package with an environment, its tests, a README and a CI file.

    It depends on agentenv as it is installed here: a clone is named by its path.
    """
    from agentenv.core.errors import StoreError, UsageError

    words = re.findall(r"[a-z0-9]+", name.lower())
    if not words or words[0][0].isdigit():
        raise UsageError(
            f"{name!r} cannot be the name of a package", remedy="start with a letter, as in shop-math"
        )
    root = Path(directory or "-".join(words))
    if root.is_file():
        raise UsageError(f"{root} is a file", remedy="choose a directory with --dir")
    if root.exists() and any(root.iterdir()):
        raise UsageError(f"the directory {root} is not empty", remedy="choose another with --dir")
    try:
        files = files_of(words) if not source else files_from(words, source)
        for path, text in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"cannot write {root}: {error.strerror}", remedy="choose another directory with --dir"
        ) from error
    module = "_".join(words)
    print(f"{root}/ was made. Next:")
    print(f"  agentenv check {root}/{module}.py")
    print(f"  agentenv eval {root}/{module}.py -m mock -n 20 -k 4")
    print(f"  pip install -e {root}    then it is in agentenv list")
    print(f"  cd {root} && pip install -e '.[dev]' && pytest    its tests, with what they need")


def files_from(words: list[str], source: str) -> dict[str, str]:
    """Return the files of a package around the environment of a file.

    Raises:
        UnknownEnvironment: The file has no environment, or several and none is chosen.
        UsageError: What makes the environment is not in the file.
    """
    from agentenv.core.errors import UsageError
    from agentenv.envs.registry import spec

    path = source.partition(":")[0]
    entry, module = spec(source), "_".join(words)
    text = user_text(Path(path)) if path.endswith(".py") else ""
    name = entry.attribute
    if not re.search(rf"^((class|def|async def) {name}\b|{name}\s*[:=])", text, re.MULTILINE):
        raise UsageError(
            f"{source} does not define {name}, which makes {entry.id}",
            remedy="name the file that has it, as in --from adder.py",
        )
    tasks = entry.task_set()
    sizes = [f"{tasks.split(part).num_tasks or 'endless'} {part}" for part in tasks.splits]
    about = {"about": entry.description or _first_line(entry.load()), "tasks": ", ".join(sizes)}
    files = files_of(words, {"env_id": entry.id, "attribute": name, **about})
    test = (_TEMPLATES / "test_taken.py.txt").read_text(encoding="utf-8")
    return files | {f"{module}.py": text, f"test_{module}.py": test.replace("@module@", module)}


def _first_line(described: object) -> str:
    return (getattr(described, "__doc__", None) or "say what it asks for.").strip().split("\n")[0]


def files_of(words: list[str], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the package's files: the text of each path; `given` are words in place of the example's."""
    module, title, dist = "_".join(words), "".join(map(str.capitalize, words)), "-".join(words)
    wanted = dependency()
    fill = {
        "module": module,
        "title": title,
        "env_id": f"{words[0]}/{title}-v0",
        "attribute": "SPEC",
        "about": "boxes of pencils, and a tool that multiplies.",
        "tasks": "100 for training, 40 held out; made by the code",
        "dist": dist,
        "report": f"https://raw.githubusercontent.com/OWNER/{dist}/main/check.json",
        "dependency": wanted,
        "direct": "\n[tool.hatch.metadata]\nallow-direct-references = true\n" if "@" in wanted else "",
        **(given or {}),
    }
    return {
        path.format(**fill): _fill((_TEMPLATES / name).read_text(encoding="utf-8"), fill)
        for path, name in _FILES.items()
    }


def _fill(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


_TEMPLATES = Path(__file__).parent / "template"
_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "{module}.py": "module.py.txt",
    "test_{module}.py": "test_module.py.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
    ".github/workflows/test.yml": "test.yml.txt",
}
"""The package's files, and those of the folder `template` that they are made from."""
