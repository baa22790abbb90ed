"""What the checks of engines found, and the images that they show to models."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.core.messages import ContentPart

__all__ = ["IMAGES", "EngineFinding"]

_PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAAA1BMVE"
IMAGES: tuple[ContentPart, ...] = tuple(
    {
        "type": "image_url",
        "image_url": {"url": f"{_PNG}{colour}AAAAD0lEQVR42mNgGAWjgHwAAAJAAAHgTR1EAAAAAElFTkSuQmCC"},
    }
    for colour in ("XcHh4Np/My", "UePNxNVFSg")
)
"""Two images of 64 x 64 pixels, a red and a blue one."""


@dataclass(frozen=True, slots=True)
class EngineFinding:
    """The result of one check of an engine."""

    name: str
    ok: bool | None
    """None if the check does not apply or could not be decided."""
    detail: str
    does: str = ""
    """What the engine does about it; empty if nothing is to be done."""
    stays: str = ""
    """What stays wrong all the same; empty if nothing does."""

    def line(self, width: int = 12) -> str:
        """Return the finding as one line, in which the name takes `width` characters."""
        mark = {True: "ok", False: "WRONG", None: "-"}[self.ok]
        does = f"; the engine {self.does}" if self.does else ""
        stays = f"; stays wrong: {self.stays}" if self.stays else ""
        return f"{mark:6}{self.name:{width}}{self.detail}{does}{stays}"
