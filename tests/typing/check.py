"""Check that pyright and mypy, both strict, report the wrong lines of `user_code.py` and no others.

The file is copied to an empty directory, so that agentenv is to it an installed, typed package.

    python tests/typing/check.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CODE = Path(__file__).with_name("user_code.py")
CACHE = Path(__file__).parents[2] / "build" / "mypy"


def run(module: str, *arguments: str, at: Path) -> str:
    """Return what a checker printed, run in a directory."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=at, capture_output=True, text=True, check=False).stdout


def pyright(at: Path) -> dict[int, str]:
    """Return the errors of pyright by line."""
    (at / "pyrightconfig.json").write_text(json.dumps({"include": [CODE.name], "typeCheckingMode": "strict"}))
    out = run("pyright", "-p", str(at), "--pythonpath", sys.executable, "--outputjson", at=at)
    found = json.loads(out)["generalDiagnostics"]
    return {
        each["range"]["start"]["line"] + 1: each["message"] for each in found if each["severity"] == "error"
    }


def mypy(at: Path) -> dict[int, str]:
    """Return the errors of mypy by line."""
    out = run("mypy", "--strict", "--cache-dir", str(CACHE), CODE.name, at=at)
    found = re.findall(rf"^{re.escape(CODE.name)}:(\d+): error: (.*)$", out, re.M)
    if not found:
        raise SystemExit(f"mypy said nothing about {CODE.name}:\n{out}")
    return {int(line): message for line, message in found}


def main() -> None:
    """Print each line on which a checker is mistaken; exit with 1 if there is one."""
    lines = CODE.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    mistakes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        shutil.copy(CODE, at)
        for checker in (pyright, mypy):
            found = checker(at)
            name = checker.__name__
            mistakes += [
                f"{CODE.name}:{number}: {name} does not report {lines[number - 1].strip()}"
                for number in sorted(wrong - set(found))
            ]
            mistakes += [
                f"{CODE.name}:{number}: {name} reports: {found[number]}"
                for number in sorted(set(found) - wrong)
            ]
    print("\n".join(mistakes) or f"{CODE.name}: pyright and mypy report the {len(wrong)} wrong lines only")
    raise SystemExit(bool(mistakes))


if __name__ == "__main__":
    main()
