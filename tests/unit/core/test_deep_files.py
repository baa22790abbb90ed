"""Files that are nested deeper than Python's stack are refused in words, wherever one is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.cli.import_ import read_rows
from agentenv.core.errors import AgentEnvError
from agentenv.core.settings import read_toml
from agentenv.engine.factory import load_engine
from agentenv.envs.tasks import TaskSet

DEEP = "[" * 100_000 + "]" * 100_000
READERS: dict[str, Callable[[Path], object]] = {
    "tasks.json": lambda path: len(TaskSet.of(str(path))),
    "tasks.jsonl": lambda path: len(TaskSet.of(str(path))),
    "settings.toml": read_toml,
    "script.json": lambda path: load_engine(f"scripted:{path}"),
    "episodes.jsonl": lambda path: list(read_rows(path)),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", [DEEP, "1" * 5_000], ids=["deep", "long number"])
def test_a_file_that_python_cannot_read_is_refused_in_words(name, text, tmp_path: Path):
    path = tmp_path / name
    path.write_text(f"a = {text}" if name.endswith("toml") else text)

    with pytest.raises(AgentEnvError, match=name):
        READERS[name](path)
