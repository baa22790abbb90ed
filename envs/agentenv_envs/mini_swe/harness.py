"""Run examples of a library's docstrings, and record what each of them shows.

The text of this module is sent into the sandbox as the program, so it uses the standard library alone. It
reads a job from its standard input and leaves the outputs in a file. It knows no expected outputs: those
stay on the host, which compares.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["OUTPUTS", "output_of", "outputs_of"]

OUTPUTS = "agentenv_outputs.json"
"""File in the working directory that gets the outputs."""
_MAX_CHARS = 1000
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def outputs_of(module: ModuleType, examples: list[str]) -> list[str]:
    """Run examples one after the other with a copy of the module's names, as doctest does."""
    space = dict(vars(module))
    return [output_of(example, space) for example in examples]


def output_of(example: str, space: dict[str, Any]) -> str:
    """Return what an example prints and shows, and the name of the error that it raises.

    Messages of errors are left out, because a repair may word them differently. Addresses are left out, too.
    """
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        try:
            exec(compile(example, "<example>", "single", dont_inherit=True), space)  # noqa: S102
        except BaseException as error:  # noqa: BLE001 - an example may raise anything
            print(f"raises {type(error).__name__}")  # noqa: T201
    text = _ADDRESS.sub("0x...", written.getvalue().rstrip("\n"))
    if len(text) <= _MAX_CHARS:
        return text
    checksum = zlib.crc32(text.encode("utf-8", "replace"))
    return f"{text[:_MAX_CHARS]}... ({len(text)} characters, checksum {checksum})"


def main() -> None:
    """Run the job of the standard input."""
    job = json.load(sys.stdin)
    module = importlib.import_module(job["module"])
    outputs = [outputs_of(module, examples) for examples in job["sessions"]]
    Path(OUTPUTS).write_text(json.dumps(outputs), encoding="utf-8")


if __name__ == "__main__":
    main()
