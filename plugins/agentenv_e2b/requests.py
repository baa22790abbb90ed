"""Read what clients of the server ask, and refuse in words what does not have the protocol's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv.core import UsageError
from agentenv.core.serving import parse_json
from agentenv.sandbox import clean_command, clean_environment

__all__ = ["context_of", "environment_of", "lifetime_of", "process_of"]

_LIFETIME_S = 300
_MAX_LIFETIME_S = 24 * 3600
_PREFIX_BYTES = 5
"""Length of what stands before each message of a Connect stream: a byte of flags and the length."""


def lifetime_of(asked: Mapping[str, Any]) -> float:
    """Return the seconds for which a client wants its sandbox.

    Raises:
        UsageError: The time is not a number of seconds, or longer than a day.
    """
    seconds = asked.get("timeout", _LIFETIME_S)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= _MAX_LIFETIME_S:
        raise UsageError(f"timeout must be from 0 to {_MAX_LIFETIME_S} seconds, not {seconds!r:.80}")
    return float(seconds)


def context_of(asked: Mapping[str, Any]) -> str | None:
    """Return the id of the context in which code is to run; None for the default one.

    Raises:
        UsageError: The id is not a short text.
    """
    id = asked.get("context_id")
    if id is not None and not (isinstance(id, str) and len(id) <= 100):
        raise UsageError(f"context_id must be a text of at most 100 characters, not {id!r:.80}")
    return id


def environment_of(value: object) -> dict[str, str]:
    """Return the environment variables that a client wants.

    Raises:
        UsageError: They are not an object with texts.
    """
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"environment variables must be an object with texts, not {value!r:.80}")
    return clean_environment(value)


def process_of(body: bytes) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment variables in the one message of a Connect stream.

    Raises:
        UsageError: The body does not have this form.
    """
    length = int.from_bytes(body[1:_PREFIX_BYTES], "big")
    if len(body) != _PREFIX_BYTES + length or body[0] != 0:
        raise UsageError("the body must be one uncompressed message of a Connect stream")
    message = parse_json(body[_PREFIX_BYTES:])
    process = message.get("process") if isinstance(message, dict) else None
    if not isinstance(process, dict):
        raise UsageError("the message must have a process")
    arguments = process.get("args") or []
    if not isinstance(arguments, list):
        raise UsageError(f"args must be a list of texts, not {arguments!r:.80}")
    # E2B's SDK starts a login shell, whose profiles the jail does not have.
    command = [process.get("cmd"), *(argument for argument in arguments if argument != "-l")]
    return clean_command(command), environment_of(process.get("envs"))
