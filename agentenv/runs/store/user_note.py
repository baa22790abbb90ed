"""`note.json`: what a person wrote about a run; the writer of the run does not touch this file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from agentenv.core.errors import UsageError
from agentenv.runs.store.codec import loads
from agentenv.runs.store.runinfo import write_text_atomically

__all__ = ["USER_NOTE", "UserNote"]

USER_NOTE = "note.json"
_MAX_CHARS = 2_000
_MAX_TAGS = 20
_MAX_TAG_CHARS = 40


@dataclass(frozen=True, slots=True)
class UserNote:
    """A text and tags that a person gave to a run.

    Raises:
        UsageError: The text or a tag is too long, a tag is empty or has a space, or there are too many tags.
    """

    text: str = ""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.text) > _MAX_CHARS:
            raise UsageError(
                f"the note has {len(self.text):,} characters",
                remedy=f"shorten it to {_MAX_CHARS:,}, and keep longer texts in a file",
            )
        if len(self.tags) > _MAX_TAGS:
            raise UsageError(f"the run has {len(self.tags)} tags", remedy=f"keep at most {_MAX_TAGS}")
        for tag in self.tags:
            if not tag or len(tag) > _MAX_TAG_CHARS or any(character.isspace() for character in tag):
                raise UsageError(
                    f"the tag {tag!r:.60} cannot be used",
                    remedy=f"a tag is one word of at most {_MAX_TAG_CHARS} characters",
                )

    @classmethod
    def read(cls, directory: Path) -> UserNote:
        """Return the note of a run; it is empty if there is none, or if the file cannot be read."""
        path = directory / USER_NOTE
        try:
            data = loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            return cls(str(data.get("text", "")), tuple(map(str, data.get("tags", ()))))
        except (AttributeError, OSError, TypeError, UsageError, ValueError):
            return cls()

    def write(self, directory: Path) -> None:
        """Write the note of a run; an empty note removes the file.

        Raises:
            StoreError: The file cannot be written.
        """
        if self == UserNote():
            (directory / USER_NOTE).unlink(missing_ok=True)
        else:
            write_text_atomically(directory / USER_NOTE, json.dumps(asdict(self), indent=1))
