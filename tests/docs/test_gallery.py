"""The gallery has a picture of every page of the viewer, at every width and in both themes, in little space."""

from __future__ import annotations

import runpy
from pathlib import Path

PICTURES = runpy.run_path(str(Path(__file__).with_name("pictures.py")))
PAGE = (Path(__file__).parents[2] / "docs" / "internals" / "gallery.md").read_text()


def test_every_page_has_its_pictures_and_they_are_small():
    wanted = {
        f"{name}-{width}-{theme}.webp"
        for name in PICTURES["PAGES"]
        for width in PICTURES["SIZES"]
        for theme in ("light", "dark")
    }
    kept = {path.name: path.stat().st_size for path in PICTURES["FOLDER"].iterdir()}

    assert set(kept) == wanted
    assert [name for name in sorted(wanted) if f"(../images/gallery/{name})" not in PAGE] == []
    assert sum(kept.values()) < 2_000_000
