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
    return {path.format(**fill): text for path, text in ((p, _fill(t, fill)) for p, t in _FILES.items())}


def _fill(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


_FILES = {
    "pyproject.toml": """[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "@dist@"
version = "0.1.0"
description = "The environment @env_id@ for language-model agents."
requires-python = ">=3.11"
dependencies = ["agentenv-rl"]

[project.optional-dependencies]
dev = ["pytest>=8", "pytest-asyncio>=1"]

[project.entry-points."agentenv.envs"]
"@env_id@" = "@module@:SPEC"

[tool.hatch.build.targets.wheel]
include = ["@module@.py"]

[tool.pytest.ini_options]
asyncio_mode = "auto"
""",
    "{module}.py": '''"""@env_id@: count the pencils in some boxes, with a tool that multiplies."""

from __future__ import annotations

import agentenv as ae


class @title@(ae.ToolEnv):
    """Boxes of pencils: how many pencils are there?"""

    def start(self, boxes: int, pencils: int) -> str:
        self.want = boxes * pencils
        return f"There are {boxes} boxes of {pencils} pencils. How many pencils are there?"

    @ae.tool
    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: the first number.
            b: the second number.
        """
        return a * b

    def reward(self, answer: str) -> float:
        return float(answer.strip().rstrip(".").split(" ")[-1] == str(self.want))


def oracle(messages: list[ae.Message], task: dict[str, int], rng: object) -> str:
    """Solve a task; the checker plays it, and it must score 1."""
    return str(task["boxes"] * task["pencils"])


SPEC = ae.register(
    "@env_id@",
    @title@,
    tasks={
        "train": [{"boxes": b, "pencils": 7 * b + 2} for b in range(20, 120)],
        "test": [{"boxes": b, "pencils": 7 * b + 3} for b in range(20, 60)],
    },
    max_turns=4,
)
''',
    "test_{module}.py": '''"""The environment passes the checker, and scores right and wrong answers."""

from __future__ import annotations

import @module@
from agentenv.testing import check_env, play


async def test_environment_passes_the_checker():
    report = await check_env(@module@.SPEC, tasks=5, fuzz_calls=50)

    assert report.ok, str(report)


async def test_right_and_wrong_answers_score_one_and_zero():
    task = @module@.SPEC.task_set()[0]
    right = await play(@module@.SPEC, @module@.oracle, task)
    wrong = await play(@module@.SPEC, lambda messages, task, rng: "no idea", task)

    assert right.reward == 1.0
    assert wrong.reward == 0.0
''',
    "README.md": """# @dist@

![agentenv check](https://img.shields.io/badge/dynamic/json?url=@report@&query=%24.summary&label=agentenv%20check)

The environment `@env_id@`: boxes of pencils, and a tool that multiplies.

    pip install -e '.[dev]'
    agentenv check @env_id@
    agentenv eval @env_id@ -m mock -n 20 -k 4
    pytest

| | |
|---|---|
| tasks | 100 for training, 40 held out; made by the code |
| reward | 1 if the last word of the answer is the right number, else 0 |
| tools | `multiply` |
| turns | at most 4 |
| licence | choose one, for the code and for the data |

The badge shows `check.json` of the main branch; replace OWNER in its address. To renew the file:

    agentenv check @env_id@ --json > check.json
""",
    ".gitignore": """__pycache__/
dist/
runs/
""",
    ".github/workflows/test.yml": """name: test
on: [push, pull_request]
jobs:
  test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: { python-version: "3.12" }
      - run: pip install -e '.[dev]'
      - run: agentenv check @env_id@ --json > check.json
      - run: pytest
""",
}
