"""Images of a run: each file once, under its hash, in `images/`, and references to them in the records.

A record in memory holds its images as data URLs. In a line of `trajectories.jsonl`, a reference stands in the
place of each, and the file is written before the line. Reading puts the URL back, bit for bit, if the file
is there and has its hash; otherwise the reference stays, and `agentenv verify` says so.
"""

from __future__ import annotations

import base64
import json
import re
from binascii import Error
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentenv.core.errors import DependencyMissing, RenderError
from agentenv.core.files import read_regular
from agentenv.core.images import ImageTokens, hash_of, image_files, suffix_of
from agentenv.core.pictures import picture_of
from agentenv.core.trajectory import TokenSequence, Trajectory

__all__ = ["IMAGES", "REFERENCE", "SETTINGS", "SHOWN", "put_back", "settings_of", "take_out", "with_files"]

IMAGES = "images"
"""Directory of the images inside a run."""
SETTINGS = "processor.json"
"""File in it with the settings by which the model's processor prepares them."""
REFERENCE = "agentenv-image:"
SHOWN = b'"url":"data:image/'
"""Stands in the record of every episode that has images."""
# A quote inside of a JSON string has a backslash before it, so no text of a message looks like these.
_DATA = re.compile(rb'"url":"data:(image/[\w.+-]+);base64,([A-Za-z0-9+/=]+)"')
_REFERENCE = re.compile(rb'"url":"' + REFERENCE.encode() + rb'(([0-9a-f]{64})\.[a-z]+);(image/[\w.+-]+)"')


def take_out(line: bytes, keep: Callable[[str, bytes], None]) -> bytes:
    """Return a record with references in the places of its images, which `keep` is given by name."""

    def refer(match: re.Match[bytes]) -> bytes:
        with suppress(Error, ValueError):
            data = base64.b64decode(match[2], validate=True)
            if base64.b64encode(data) == match[2]:  # another spelling of the same bytes could not be put back
                name = f"{hash_of(data)}.{suffix_of(data) or 'bin'}"
                keep(name, data)
                return b'"url":"%b%b;%b"' % (REFERENCE.encode(), name.encode(), match[1])
        return match[0]

    return _DATA.sub(refer, line)


def put_back(line: bytes, directory: Path) -> bytes:
    """Return a record with its images as data URLs again."""
    if b'"url":"' + REFERENCE.encode() not in line:
        return line

    def whole(match: re.Match[bytes]) -> bytes:
        data = file_of(directory, match[1].decode())
        if data is None or hash_of(data).encode() != match[2]:
            return match[0]
        return b'"url":"data:%b;base64,%b"' % (match[3], base64.b64encode(data))

    return _REFERENCE.sub(whole, line)


def file_of(directory: Path, name: str) -> bytes | None:
    """Return the bytes of an image of a run; None if there is none of this name."""
    if not re.fullmatch(r"[0-9a-f]{64}\.[a-z]+", name):
        return None
    with suppress(OSError):
        return read_regular(directory / IMAGES / name)
    return None


def settings_of(directory: Path) -> dict[str, Any]:
    """Return the settings of a run's processor; empty if it has no images, or they were not told."""
    with suppress(OSError, ValueError):
        return json.loads(read_regular(directory / IMAGES / SETTINGS))
    return {}


def with_files(trajectory: Trajectory) -> Trajectory:
    """Return a record whose images among tokens have their files, which are in its messages."""
    if not any(sequence.images for sequence in trajectory.sequences):
        return trajectory
    said = [*trajectory.messages, *(message for one in trajectory.rewrites for message in one.messages)]
    wanted = {image.sha256 for sequence in trajectory.sequences for image in sequence.images}
    files: dict[str, bytes] = {}
    for data in image_files(said):
        files[hash_of(data)] = data
        if hash_of(data) not in wanted:  # the model saw the picture that is made of it
            with suppress(RenderError, DependencyMissing):
                picture = picture_of(data)
                files[hash_of(picture)] = picture

    def filled(image: ImageTokens) -> ImageTokens:
        return replace(image, data=files.get(image.sha256, b""))

    def seen(sequence: TokenSequence) -> TokenSequence:
        spans = (
            replace(span, images=tuple(map(filled, span.images))) if span.images else span
            for span in sequence.spans
        )
        return replace(sequence, spans=tuple(spans))

    return replace(trajectory, sequences=tuple(map(seen, trajectory.sequences)))
