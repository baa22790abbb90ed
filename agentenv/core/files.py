"""Open the files of a run, which are regular files and nothing else, and read texts that users wrote.

A run directory may come from somebody else. Opening a pipe in it would wait for its other end for ever, and
writing through a link would change a file outside of the run.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from agentenv.core.errors import StoreError, UsageError

__all__ = [
    "json_lines",
    "json_value",
    "make_directory",
    "open_regular",
    "read_regular",
    "reading",
    "user_text",
    "write_regular",
]

# Windows has neither links without a privilege nor pipes among files.
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_REMEDY = "remove it, or restore the run's own file from a copy"


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file with the flags of `os.open`, and return its handle.

    Raises:
        StoreError: The path is a link, a pipe, a device or a directory.
        OSError: The file cannot be opened for another reason, such as that it does not exist.
    """
    try:
        handle = os.open(path, flags | _SAFE, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreError(f"{path} is a link, and files of a run are not", remedy=_REMEDY) from None
        if error.errno in {errno.ENXIO, errno.EISDIR}:
            raise StoreError(f"{path} is not a regular file", remedy=_REMEDY) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise StoreError(f"{path} is not a regular file", remedy=_REMEDY)
    return handle


def reading(path: Path) -> BinaryIO:
    """Open a regular file to read it; see `open_regular`."""
    return os.fdopen(open_regular(path), "rb")


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; see `open_regular`."""
    with reading(path) as file:
        return file.read()


def write_regular(path: Path, data: bytes) -> None:
    """Replace the content of a regular file, which is made if need be; see `open_regular`."""
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)


def make_directory(path: Path) -> Path:
    """Make a directory of a run if it is not there, and return it.

    Raises:
        StoreError: It is a link, through which files outside of the run would be written.
        OSError: It cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise StoreError(f"{path} is a link, and files of a run are not", remedy=_REMEDY)
    return path


def user_text(path: Path) -> str:
    """Return the text of a file that a user wrote, without a mark of the byte order.

    Raises:
        OSError: The file cannot be read.
        UsageError: It is not UTF-8, or a device, which may have no end.
    """
    with path.open("rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            raise UsageError(f"{path} is a device and not a file")
        data = file.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        meant = "UTF-16" if data[:2] in {b"\xff\xfe", b"\xfe\xff"} else "LATIN1"
        raise UsageError(
            f"{path}, line {line} is not UTF-8 text: it has the byte 0x{data[error.start]:02x}",
            remedy=f"save the file as UTF-8, as iconv does: iconv -f {meant} -t UTF-8 {path} > NEW",
        ) from None


def json_lines(path: Path, *, error: type[UsageError] = UsageError) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line of a JSONL file that a user wrote, but of blank lines.

    Raises:
        OSError: The file cannot be read.
        UsageError: A line is not JSON; the message has the line and the column.
    """
    from pydantic_core import from_json  # three times as fast as json, and the same values

    # `splitlines` also splits at characters that JSON allows within a text, such as U+2028.
    for number, line in enumerate(user_text(path).split("\n"), start=1):
        if line and not line.isspace():
            try:
                value = from_json(line)
            except ValueError:
                value = json_value(line, path, line=number, error=error)
            yield number, value


def json_value(text: str, path: Path, *, line: int = 1, error: type[UsageError] = UsageError) -> Any:
    """Return the JSON value of a text of a file that a user wrote.

    Args:
        text: the text.
        path: the file, for errors.
        line: the line of the file at which the text begins.
        error: class of the error to raise.

    Raises:
        UsageError: The text is not JSON; the message has the line and the column.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as wrong:
        where = f"line {line + wrong.lineno - 1}, column {wrong.colno}"
        raise error(f"{path}, {where} is not JSON: {wrong.msg}") from wrong
    except (ValueError, RecursionError) as wrong:  # a number of thousands of digits, or lists as deep
        raise error(f"{path}, line {line} cannot be read: {wrong}") from wrong
