"""Count what a reader of the library has to follow: the files that run in an episode, and those that load.

Run as a program to see the figures and the files: `python -m tests.helpers.walk [--files]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from agentenv.engine import ScriptedEngine
from agentenv.envs import ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.runs.store import RunWriter
from agentenv.testing import tool_call
from agentenv.tools import tool

LIBRARY = Path(__file__).parents[2] / "agentenv"


class Adder(ToolEnv):
    """One sum, and a tool that adds."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reward(self, answer: str) -> float:
        return float(str(self.want) in answer)


@dataclass
class Walk:
    """The calls of our own functions, in the order in which they ran."""

    functions: set[tuple[str, str, int]] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    """Calls for each file."""
    changes: int = 0
    """How often a call was in another file than the call before it."""
    _last: str = ""

    @property
    def files(self) -> set[str]:
        """Files whose functions ran."""
        return set(self.calls)

    def seen(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; `sys.setprofile` calls this."""
        code = frame.f_code
        if event != "call" or code.co_name == "<module>" or not code.co_filename.startswith(_PREFIX):
            return
        name = code.co_filename.removeprefix(_PREFIX)
        self.calls[name] += 1
        self.functions.add((name, code.co_qualname, code.co_firstlineno))
        self.changes += name != self._last
        self._last = name


_PREFIX = f"{LIBRARY}/"


def walked(play: Callable[[], object]) -> Walk:
    """Return the walk of a function, in all threads that it starts."""
    walk = Walk()
    threading.setprofile(walk.seen)
    sys.setprofile(walk.seen)
    try:
        play()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return walk


def episode_walk() -> Walk:
    """Return the walk of playing one episode with one tool call on its tokens, and storing it.

    The same episode was played before, so that nothing is counted that happens once in a process.
    """

    script = [tool_call("add", a=2, b=3), "It is 5."]
    tokenizer: Any = byte_tokenizer()

    # `asyncio.run` writes the result into the text of an error that nobody sees, which calls our `repr`.
    loop = asyncio.new_event_loop()

    def play() -> None:
        engine = ScriptedEngine(script, tokenizer=tokenizer)
        runner = Runner(engine, Renderer(tokenizer))
        record = loop.run_until_complete(runner.run_episode(Adder(), {"x": 2, "y": 3}))
        assert record.reward == 1.0, record
        writer.append(record)

    with (
        tempfile.TemporaryDirectory() as folder,
        RunWriter.create("demo/Adder-v0", runs_dir=folder) as writer,
    ):
        try:
            play()
            return walked(play)
        finally:
            loop.close()


def step_walk() -> Walk:
    """Return the walk of `trainer.step` on two groups of episodes, after the same step was made before."""
    # Here, because it takes seconds to load torch.
    import torch

    from helpers.training import group, tiny, trainer_of

    trainer = trainer_of(tiny(dtype=torch.float32), dtype="float32")
    groups = [group("a", [0.0, 1.0]), group("b", [1.0, 0.0, 0.0])]
    trainer.step(groups)
    return walked(lambda: trainer.step(groups))


def loaded_lines(code: str) -> dict[str, int]:
    """Return the lines of each file of the library that a new process has loaded after some code ran."""
    after = (
        "\nimport sys, json\n"
        "print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'agentenv']))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code + after],
        capture_output=True,
        text=True,
        check=True,
        cwd=LIBRARY.parent / "tests",
    )
    paths = [Path(name) for name in json.loads(shown.stdout.splitlines()[-1])]
    return {str(path.relative_to(LIBRARY)): len(path.read_text().splitlines()) for path in paths}


EVALUATION = """
import tempfile

import agentenv as ae
class Adder(ae.ToolEnv):
    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"
    @ae.tool
    def add(self, a: int, b: int) -> int:
        "Add two numbers."
        return a + b
    def reward(self, answer: str) -> float:
        return float(str(self.want) in answer)
ae.register("demo/Adder-v0", Adder, tasks=[{"x": i, "y": 1} for i in range(4)])

ae.evaluate("demo/Adder-v0", "mock", runs_dir=tempfile.mkdtemp())
"""
"""Registers an environment and evaluates it, with the store that a run writes."""

TRAINING = EVALUATION.replace(
    'ae.evaluate("demo/Adder-v0", "mock", runs_dir=tempfile.mkdtemp())',
    """
import pathlib
from helpers.training import saved_tiny
ae.train("demo/Adder-v0", saved_tiny(pathlib.Path(tempfile.mkdtemp())), steps=1, group_size=2, groups_per_step=2,
         runs_dir=tempfile.mkdtemp(), limits={"max_turns": 2, "max_tokens_per_turn": 8})
""",
)
"""Registers an environment and trains one step on it."""


def main() -> None:
    """Print the figures, and with `--files` the files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--files", action="store_true", help="list the files, too")
    show = parser.parse_args().files
    for title, walk in (("episode", episode_walk()), ("trainer.step", step_walk())):
        print(
            f"{title}: {len(walk.files)} files, {len(walk.functions)} functions, {walk.changes} changes of file"
        )
        if show:
            for name, calls in walk.calls.most_common():
                ours = [f[1] for f in sorted(walk.functions) if f[0] == name]
                print(f"  {calls:5} {name}: {', '.join(ours)}")
    for name, code in (("evaluation", EVALUATION), ("training step", TRAINING)):
        loaded = loaded_lines(code)
        print(f"{name}: {len(loaded)} files, {sum(loaded.values())} lines loaded")
        if show:
            for file, lines in sorted(loaded.items()):
                print(f"  {lines:5} {file}")


if __name__ == "__main__":
    main()
