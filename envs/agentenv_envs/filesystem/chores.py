"""The chores: orders for a small file system, and the calls that carry them out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agentenv.core import derive_seed

__all__ = ["Call", "make"]

_FOLDERS = {
    "train": ("docs", "notes", "work", "inbox", "logs", "reports", "music", "code"),
    "test": ("letters", "photos", "drafts", "school", "recipes", "garden", "travel", "books"),
}
_STEMS = (
    "alpha",
    "beta",
    "cedar",
    "delta",
    "ember",
    "falcon",
    "grove",
    "harbor",
    "iris",
    "jade",
    "kite",
    "lotus",
)

Call = tuple[str, dict[str, str]]
"""Name and arguments of a tool call."""

Chore = Callable[[random.Random, dict[str, str], Sequence[str]], tuple[str, list[Call]]]
"""A function that returns an order and the calls that carry it out."""


def _move_all(draw: random.Random, files: dict[str, str], folders: Sequence[str]) -> tuple[str, list[Call]]:
    source, target = folders[0], folders[1]
    kind = draw.choice(sorted({path.rpartition(".")[2] for path in files if path.startswith(f"{source}/")}))
    chosen = [path for path in sorted(files) if path.startswith(f"{source}/") and path.endswith(kind)]
    for path in chosen:
        files.pop(f"{target}/{path.split('/')[1]}", None)
    moved: list[Call] = [
        ("move_file", {"path": path, "target": f"{target}/{path.split('/')[1]}"}) for path in chosen
    ]
    return f"Move all .{kind} files of the folder {source} to the folder {target}.", moved


def _sum_up(draw: random.Random, files: dict[str, str], folders: Sequence[str]) -> tuple[str, list[Call]]:
    numbers = {f"{folders[0]}/{stem}.num": str(draw.randint(10, 999)) for stem in draw.sample(_STEMS, 3)}
    files.update(numbers)
    total = str(sum(map(int, numbers.values())))
    target = f"{folders[1]}/total.txt"
    files.pop(target, None)
    return (
        f"Each .num file of the folder {folders[0]} holds a number. Write their sum into {target}.",
        [
            *(("read_file", {"path": path}) for path in numbers),
            ("write_file", {"path": target, "text": total}),
        ],
    )


def _rename(draw: random.Random, files: dict[str, str], folders: Sequence[str]) -> tuple[str, list[Call]]:
    path = draw.choice(sorted(files))
    target = f"{path.split('/')[0]}/renamed-{draw.randint(100, 999)}.txt"
    return f"Rename the file {path} to {target}.", [("move_file", {"path": path, "target": target})]


def _delete_marked(
    draw: random.Random, files: dict[str, str], folders: Sequence[str]
) -> tuple[str, list[Call]]:
    word = draw.choice(("obsolete", "draft", "secret"))
    marked = sorted(draw.sample(sorted(files), 2))
    for path in marked:
        files[path] = f"{files[path]} {word}"
    return (
        f"Delete every file whose text has the word {word!r} in it.",
        [
            *(("read_file", {"path": path}) for path in sorted(files)),
            *(("delete_file", {"path": p}) for p in marked),
        ],
    )


def _copy(draw: random.Random, files: dict[str, str], folders: Sequence[str]) -> tuple[str, list[Call]]:
    path = draw.choice(sorted(files))
    target = f"{folders[2]}/copy-of-{path.split('/')[1]}"
    return (
        f"Copy the file {path} to {target}.",
        [("read_file", {"path": path}), ("write_file", {"path": target, "text": files[path]})],
    )


_CHORES: Sequence[Chore] = (_move_all, _sum_up, _rename, _delete_marked, _copy)


def make(split: str, number: int) -> tuple[dict[str, object], list[Call]]:
    """Return a task of a split and the tool calls that solve it."""
    draw = random.Random(derive_seed("filesystem", split, number))
    folders = draw.sample(_FOLDERS[split], 3)
    files: dict[str, str] = {}
    for folder in folders[:2]:
        for stem in draw.sample(_STEMS, 3):
            files[f"{folder}/{stem}.{draw.choice(('txt', 'md'))}"] = f"{stem} {draw.randint(0, 99)}"
    order, calls = _CHORES[number % len(_CHORES)](draw, files, folders)
    want = dict(files)
    for name, arguments in calls:
        if name == "write_file":
            want[arguments["path"]] = arguments["text"]
        elif name == "move_file":
            want[arguments["target"]] = want.pop(arguments["path"])
        elif name == "delete_file":
            del want[arguments["path"]]
    return {"id": f"{split}-{number}", "order": order, "files": files, "want": want}, calls
