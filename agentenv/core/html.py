"""Small pieces of HTML with which results show themselves in notebooks; all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["html_lines", "html_table"]


def html_lines(lines: Iterable[str]) -> str:
    """Return lines of plain text as they would stand in a terminal."""
    text = "\n".join(lines)
    return f'<pre style="white-space:pre-wrap">{escape(text)}</pre>'


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; numbers are shortened, and None, which stands for what is not known, is a dash."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(_cell(value))}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
