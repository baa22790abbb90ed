"""Write the table of docs/reference/settings.md: every setting with its default, from the code.

python tests/docs/settings.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path

from agentenv.core.fields import tables
from agentenv.core.settings import Section, field_docs
from agentenv.runs.sections import EVAL_SECTIONS
from agentenv.training.sections import TRAIN_SECTIONS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
HEAD = """# All settings

[Settings](cli.md#settings) says how they are given. Names that end in `_s` are seconds, in `_tokens` tokens.
This page is made from the code by `python tests/docs/settings.py`.
"""


def page() -> str:
    """Return the page."""
    sections = {**EVAL_SECTIONS, **TRAIN_SECTIONS}
    return HEAD + "".join(part for name, section in sections.items() for part in parts(name, section))


def parts(name: str, section: Section) -> Iterator[str]:
    """Yield the table of a section, and those of the tables in it."""
    if section.kind is None:
        return
    inside = tables(section.kind)
    left_out = {*inside, *section.without}
    own = [field for field in fields(section.kind) if field.name not in left_out]
    rows = "".join(row(section.kind, field) for field in own)
    yield f"\n## {name}\n\n| setting | default | meaning |\n|---|---|---|\n{rows}"
    for table, kind in inside.items():
        yield from parts(f"{name}.{table}", Section(kind))


def row(kind: type, field: Field[object]) -> str:
    """Return the row of a setting, with the first sentence of what stands under its field."""
    made = field.default_factory() if field.default_factory is not MISSING else field.default
    default = "required" if made is MISSING else "none" if made is None else str(made)
    meaning = (
        " ".join(field_docs(kind).get(field.name, "").split())
        .partition(". ")[0]
        .rstrip(".")
        .replace("|", "\\|")
    )
    return f"| `{field.name}` | {default} | {meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
