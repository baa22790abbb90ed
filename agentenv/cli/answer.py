"""Keep standard output for the one JSON object that a verb with `--json` answers with.

Environments, libraries and programs that they start print what they like. It goes to standard error, so that
whoever reads the JSON finds nothing else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["json_alone", "print_json"]

_answers: list[list[str]] = []
"""The answers of the verbs that are running, which are printed once nothing else can be."""


def print_json(value: Any) -> None:
    """Print a value as the answer of a verb, on one line."""
    line = json.dumps(value) + "\n"
    if _answers:
        _answers[-1].append(line)
    else:
        sys.stdout.write(line)


@contextmanager
def json_alone() -> Generator[None]:
    """Send everything but the answer to standard error while a verb runs, also what child processes print."""
    out, saved = sys.stdout, os.dup(1)
    out.flush()
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    _answers.append([])
    try:
        yield
    finally:
        sys.stdout = out
        os.dup2(saved, 1)
        os.close(saved)
        out.write("".join(_answers.pop()))
