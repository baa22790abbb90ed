"""Runs in the container of a session, as text for `python3 -c`: each line of input is code to run.

After each piece of code its mark and exit code go to standard output, and the mark to standard error.
"""

import ast
import contextlib
import io
import json
import linecache
import os
import sys
import traceback

NAME = "main.py"


def compiled(source: str, echo: bool) -> list[object]:
    """Compile code; with `echo` the value of a last expression is printed as at Python's prompt."""
    tree = ast.parse(source, NAME)
    last = tree.body.pop() if echo and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    pieces: list[object] = [compile(tree, NAME, "exec")]
    return [*pieces, compile(ast.Interactive([last]), NAME, "single")] if last is not None else pieces


def run(job: dict[str, object], names: dict[str, object]) -> int:
    """Run one piece of code and return its exit code."""
    source = str(job["code"])
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    sys.stdin = io.TextIOWrapper(io.BytesIO(str(job["stdin"]).encode()), encoding="utf-8")
    os.environ.update(job["env"])  # type: ignore[call-overload]
    try:
        for piece in compiled(source, bool(job["echo"])):
            exec(piece, names)  # type: ignore[call-overload]  # noqa: S102 - the purpose of this process
    except SystemExit as asked:
        if asked.code is not None and not isinstance(asked.code, int):
            print(asked.code, file=sys.stderr)  # noqa: T201
        return 0 if asked.code is None else asked.code & 255 if isinstance(asked.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - the program's error is printed as Python prints it
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


def main() -> None:
    """Run every line of standard input until it ends."""
    jobs = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.insert(0, ".")
    names: dict[str, object] = {"__name__": "__main__", "__file__": NAME, "__builtins__": __builtins__}
    for line in jobs:
        job = json.loads(line)
        code = run(job, names)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # replaced by the program
                stream.flush()
        os.write(2, f"{job['mark']}\n".encode())
        os.write(1, f"{job['mark']} {code}\n".encode())


if __name__ == "__main__":
    main()
