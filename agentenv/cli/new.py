"""`agentenv new`: make an installable environment package that passes its checks and its tests."""

from __future__ import annotations

import re
from pathlib import Path

import typer

__all__ = ["app", "files_of"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    name: str = typer.Argument(..., help="Name of the environment, such as shop-math."),
    directory: str = typer.Option(
        "", "--dir", help="Directory to make; named like the environment if empty."
    ),
) -> None:
    """Make a package with an environment, its tests, a README and a CI file."""
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
        for path, text in files_of(words).items():
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


def files_of(words: list[str]) -> dict[str, str]:
    """Return the package's files: the text of each path."""
    module, title = "_".join(words), "".join(word.capitalize() for word in words)
    env_id = f"{words[0]}/{title}-v0"
    dist = "-".join(words)
    report = f"https://raw.githubusercontent.com/OWNER/{dist}/main/check.json"
    fill = {"module": module, "title": title, "env_id": env_id, "dist": dist, "report": report}
    folder = Path(__file__).parent / "template"
    return {
        path.format(**fill): _fill((folder / name).read_text(encoding="utf-8"), fill)
        for path, name in _FILES.items()
    }


def _fill(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "{module}.py": "module.py.txt",
    "test_{module}.py": "test_module.py.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
    ".github/workflows/test.yml": "test.yml.txt",
}
"""The package's files, and those of the folder `template` that they are made from."""
