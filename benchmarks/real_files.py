"""Play files of other projects as their authors wrote them, and say of each in a table how that went.

    python benchmarks/real_files.py --clones DIR --python .venv-peers/bin/python --write

A file is taken from its project at a commit, from a clone `DIR/OWNER+NAME`, which is made if it is missing.
It is played by `agentenv eval`, with two tasks and a model that says what stands here: under its own name
where the library plays it so, else through the few lines of ours that `code` holds. Each says

- `played`: both episodes were scored, and no call of a tool failed,
- `n lines changed`: so it was after lines of theirs were changed,
- `refused`, with what the library said, in one sentence,
- or `failed`, which is a fault of ours.

`--write` puts the table into docs/coming-from.md, where files that were not played keep their line. Nothing
of theirs is kept here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from real_files_list import FILES, PROJECTS, Theirs, label

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coming-from.md"
OURS = os.pathsep.join(str(ROOT / folder) for folder in (".", "envs", "tools", "plugins"))
ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)
TABLE = re.compile(r"(?<=<!--- real files -->\n).*?(?=\n<!--- end -->)", re.DOTALL)
TIME_S = 600
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "INSPECT_EVAL_MODEL": "mockllm/model",
}  # which grades in scorers of Inspect
SAY = '''
import json

CALLS = {calls!r}


def say(messages, task, rng):
    """Make the calls one after another, and then answer."""
    turn = sum(message["role"] == "assistant" for message in messages)
    if turn >= len(CALLS):
        return {answer!r}
    name, arguments = CALLS[turn]
    function = {{"name": name, "arguments": json.dumps(arguments)}}
    call = {{"id": str(turn), "type": "function", "function": function}}
    return {{"role": "assistant", "content": "", "tool_calls": [call]}}
'''


def main() -> int:
    """Play the files, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clones", type=Path, default=ROOT / "build" / "clones")
    parser.add_argument("--python", nargs="*", default=[], help="interpreters with packages of theirs")
    parser.add_argument("--only", default="", help="play files with this in their name")
    parser.add_argument("--write", action="store_true", help="write the table into docs/coming-from.md")
    given = parser.parse_args()
    found: dict[str, str] = {}
    for file in FILES:
        if given.only in f"{file.project}/{file.file}":
            pythons = [*(str(Path(one).absolute()) for one in given.python), sys.executable]
            found[label(file)] = told_of(file, given.clones, pythons)
            print(f"{label(file)}: {found[label(file)]}", flush=True)
    if given.write:
        page = PAGE.read_text(encoding="utf-8")
        lines = dict.fromkeys(map(label, FILES), "untried")
        lines |= {name: word for name, word in [*ROW.findall(page), *found.items()] if name in lines}
        rows = ["| file | |", "|---|---|", *(f"| `{name}` | {word} |" for name, word in lines.items())]
        PAGE.write_text(TABLE.sub(lambda _: "\n".join(rows), page), encoding="utf-8")
    return any(word.startswith("failed") for word in found.values())


def told_of(file: Theirs, clones: Path, pythons: Sequence[str]) -> str:
    """Play one file in the first interpreter that has what it needs."""
    python = next((one for one in pythons if _has(one, PROJECTS[file.project].needs)), None)
    if python is None:
        return f"untried: no interpreter has {', '.join(PROJECTS[file.project].needs)}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bring(file.project, (file.file, *file.beside), clones, folder)
        changed = change(folder / file.file, file.changes)
        (folder / "ours.py").write_text(
            file.code + SAY.format(calls=file.calls, answer=file.answer), encoding="utf-8"
        )
        path = [str(folder / one) for one in ("", *file.path)]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, OURS]), **VARIABLES}
        with served(file, python, folder, variables) as address:
            name = (file.name or file.file).format(address=address)
            told = played(python, name, folder, variables)
    return f"{changed} line{'s' * (changed > 1)} changed" if changed and told == "played" else told


def bring(project: str, paths: Sequence[str], clones: Path, folder: Path) -> None:
    """Write files of a project, of one commit, into a folder."""
    clone = clones / project.replace("/", "+")
    if not clone.exists():
        address = f"https://github.com/{project}"
        subprocess.run(["git", "clone", "--bare", "--filter=blob:none", address, str(clone)], check=True)
    git = ["git", "--git-dir", str(clone / "repo" if (clone / "repo").is_dir() else clone)]
    commit = PROJECTS[project].commit
    listed = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", commit, "--", *paths],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        shown = subprocess.run([*git, "show", f"{commit}:{name}"], capture_output=True, check=False)
        if shown.returncode == 0:  # large pictures may be missing from a clone
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(shown.stdout)


def change(path: Path, changes: Mapping[str, str]) -> int:
    """Replace lines of a file, and return how many."""
    text = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert f"{old}\n" in text, f"{path}: no line {old!r}"
        text = text.replace(f"{old}\n", f"{new}\n")
    if changes:
        path.write_text(text, encoding="utf-8")
    return sum(old.count("\n") + 1 for old in changes)


def played(python: str, name: str, folder: Path, variables: Mapping[str, str]) -> str:
    """Evaluate an environment on two tasks, and return what the table says of it."""
    command = [python, "-m", "agentenv", "eval", name, "-n", "2", "-m", "policy:ours.py:say", "--json"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=dict(variables),
            capture_output=True,
            text=True,
            timeout=TIME_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"failed: took {TIME_S} s"
    if (said := re.search(r"^error: (.*)", done.stderr, re.MULTILINE)) is not None:
        return f"refused: {said[1]}"
    report = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    if report.get("stopped") or report.get("errors"):
        why = report["stopped"].rpartition("same error: ")[2] or str(report["errors"][0])
        return f"refused: {why.rpartition('; ')[0] or why}"
    broken = [tool for tool in report.get("tools", []) if tool["errors"]]
    if broken or not report or report["num_scored"] < report["num_tasks"]:
        return f"failed: {broken or done.stderr[-300:] or report}"
    return "played"


@contextmanager
def served(file: Theirs, python: str, folder: Path, variables: Mapping[str, str]) -> Generator[str]:
    """Run the file's own server while it is played, and yield its address."""
    if not file.serve:
        yield ""
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-m", *file.serve.format(port=port).split()]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=dict(variables), stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(10 * TIME_S):
            try:
                urlopen(f"{address}/health", timeout=1).close()
                break
            except (URLError, OSError):
                try:
                    server.wait(0.1)
                    break
                except subprocess.TimeoutExpired:
                    continue
        yield address
    finally:
        server.terminate()
        server.wait()


def _has(python: str, packages: Sequence[str]) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {list(packages)!r})))"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
