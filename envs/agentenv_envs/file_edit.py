"""Repair a small Python module with tools that read and change files.

Each task is a module with one mistake and a description of what it should do. The model may look,
edit and run; at the end the sandbox calls the function on inputs that were never shown, and the host
compares what comes back: the expected values never enter the sandbox.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from agentenv.errors import ToolError, UsageError
from agentenv.messages import Message
from agentenv.registry import register
from agentenv.sandbox.checks import clean_path
from agentenv.seeding import derive_seed
from agentenv.tool import tool
from agentenv_envs.sandboxed import SandboxedEnv
from agentenv_tools.python import answer_of

__all__ = ["FileEdit", "oracle", "tasks"]

_MAX_FILE_CHARS = 100_000
_MAX_PATH_CHARS = 200


class _Module(NamedTuple):
    """A module, the line that gets broken, and how it may be broken."""

    goal: str
    source: str
    right: str
    wrong: tuple[str, ...]
    inputs: tuple[tuple[object, ...], ...]


_MODULES: dict[str, _Module] = {
    "median": _Module(
        "median(values) returns the middle of the sorted values, or the mean of the two middle ones",
        """\
def median(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
""",
        "return (ordered[half - 1] + ordered[half]) / 2",
        (
            "return ordered[half]",
            "return (ordered[half] + ordered[half + 1]) / 2",
            "return (ordered[half - 1] + ordered[half]) // 2",
        ),
        (([3, 1, 2],), ([4, 1, 3, 2],), ([5],), ([1, 2],), ([9, 9, 1, 0, 4, 4],)),
    ),
    "balanced": _Module(
        "balanced(text) tells whether every bracket of ()[]{} in the text is closed by it"
        "s own kind, in order",
        """\
PAIRS = {')': '(', ']': '[', '}': '{'}


def balanced(text):
    open_ones = []
    for letter in text:
        if letter in PAIRS.values():
            open_ones.append(letter)
        elif letter in PAIRS:
            if not open_ones or open_ones.pop() != PAIRS[letter]:
                return False
    return not open_ones
""",
        "return not open_ones",
        ("return True", "return len(open_ones) <= 1"),
        (("([]{})",), ("(",), ("([)]",), ("",), ("))",), ("a(b)c[",), ("((",)),
    ),
    "fibonacci": _Module(
        "fibonacci(n) returns the n-th Fibonacci number, counting from fibonacci(0) = 0, fibonacci(1) = 1",
        """\
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
""",
        "return a",
        ("return b", "return a + b"),
        ((0,), (1,), (2,), (10,), (30,)),
    ),
    "search": _Module(
        "search(values, wanted) returns the first index of wanted in the sorted list, or -1",
        """\
def search(values, wanted):
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(values) and values[low] == wanted else -1
""",
        "if values[middle] < wanted:",
        ("if values[middle] <= wanted:", "if values[middle] > wanted:"),
        (([1, 3, 5], 3), ([1, 1, 1], 1), ([], 1), ([1, 2, 2, 2, 9], 2), ([1, 3], 4), ([2, 4, 6, 8], 8)),
    ),
    "words": _Module(
        "words(text) counts words without regard to case, and returns a dictionary",
        """\
def words(text):
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts
""",
        "counts[word] = counts.get(word, 0) + 1",
        ("counts[word] = counts.get(word, 1) + 1", "counts[word] = 1"),
        (("a b A",), ("",), ("one two two",), ("X x X y",)),
    ),
    "runs": _Module(
        "runs(text) returns the run lengths of a text as a list of [letter, count]",
        """\
def runs(text):
    found = []
    for letter in text:
        if found and found[-1][0] == letter:
            found[-1][1] += 1
        else:
            found.append([letter, 1])
    return found
""",
        "found.append([letter, 1])",
        ("found.append([letter, 0])", "found.insert(0, [letter, 1])"),
        (("aab",), ("",), ("abc",), ("zzzz",), ("aabbaa",)),
    ),
}


class FileEdit(SandboxedEnv):
    """Find and repair one mistake."""

    system_prompt = "Repair the module with the tools. Say so when you are done."

    async def start(self, module: str, broken: str) -> str:
        """Lay out the files."""
        await self.sandbox()
        known = _MODULES[module]
        self.name = f"{module}.py"
        self.files = {self.name: known.source.replace(known.right, broken)}
        return f"{self.name} has a mistake. It should do this: {known.goal}. Repair it."

    @tool
    def list_files(self) -> str:
        """List the files."""
        return "\n".join(sorted(self.files))

    @tool
    def view(self, path: str) -> str:
        """Show a file.

        Args:
            path: Name of the file.
        """
        return self._file(path)

    @tool
    def replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file.

        Args:
            path: Name of the file.
            old: The text to replace.
            new: The text to put there.
        """
        content = self._file(path)
        if (count := content.count(old) if old else 0) != 1:
            raise ToolError(f"the text to replace occurs {count} times in {path}; it must occur exactly once")
        return self.write(path, content.replace(old, new))

    @tool
    def write(self, path: str, content: str) -> str:
        """Write a whole file.

        Args:
            path: Name of the file.
            content: What it shall contain.
        """
        try:
            clean = clean_path(path[: 2 * _MAX_PATH_CHARS])
        except UsageError as error:
            raise ToolError(str(error)) from error
        if len(clean) > _MAX_PATH_CHARS:
            raise ToolError(f"a file name has at most {_MAX_PATH_CHARS} characters, not {len(clean):,}")
        if len(content) > _MAX_FILE_CHARS or len(self.files) > 100:
            raise ToolError(f"at most 100 files of {_MAX_FILE_CHARS:,} characters")
        self.files[clean] = content
        return f"{clean} written"

    @tool
    async def run(self, code: str) -> str:
        """Run Python code beside the files; it can import them.

        Args:
            code: Python source text.
        """
        sandbox = await self.sandbox()
        return answer_of(await sandbox.run_code(code, files=self.files, echo=True))

    async def reward(self, module: str) -> float:
        """Give 1 if the function returns the right values for the hidden inputs."""
        known = _MODULES[module]
        sandbox = await self.sandbox()
        code = (
            f"import json, sys\nfrom {module} import {module} as function\n"
            "print('\\n' + json.dumps([function(*one) for one in json.load(sys.stdin)]))"
        )
        result = await sandbox.run_code(code, files=self.files, stdin=json.dumps(known.inputs))
        try:
            got = json.loads(result.stdout.rstrip("\n").rpartition("\n")[2])
        except ValueError:
            return 0.0
        return float(result.ok and got == _expected(module))

    def _file(self, path: str) -> str:
        if path not in self.files:
            raise ToolError(f"no file {path!r:.100}; there are: {', '.join(sorted(self.files))}")
        return self.files[path]


def _expected(module: str) -> object:
    """Run our own, right module on the hidden inputs."""
    names: dict[str, object] = {}
    known = _MODULES[module]
    exec(known.source, names)  # noqa: S102 - our own text, from above
    function = names[module]
    assert callable(function)
    return json.loads(json.dumps([function(*one) for one in known.inputs]))


def tasks(split: str) -> Iterator[dict[str, object]]:
    """Yield the tasks of a split: the last way of breaking each module is held out."""
    for module, known in sorted(_MODULES.items()):
        chosen = known.wrong[-1:] if split == "test" else known.wrong[:-1]
        for broken in chosen:
            name = f"{module}-{derive_seed(module, broken) % 10**8:08d}"
            yield {"id": name, "module": module, "broken": broken}


def _train() -> list[dict[str, object]]:
    return list(tasks("train"))


def _test() -> list[dict[str, object]]:
    return list(tasks("test"))


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Write the right module over the broken one, then say so.

    Not `replace`: what stands in the place of the mistake may occur elsewhere in the module, too.
    """
    if any(message["role"] == "tool" for message in messages):
        return {"role": "assistant", "content": "Done."}
    module = str(task["module"])
    arguments = {"path": f"{module}.py", "content": _MODULES[module].source}
    function = {"name": "write", "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],  # pyright: ignore[reportReturnType]
    }


register(
    "agentenv/FileEdit-v0",
    FileEdit,
    tasks={"train": _train, "test": _test},
    max_turns=8,
    sandbox="auto",
)
