"""The viewer: shows runs, groups and episodes token by token in one self-contained HTML file.

The page consists of plain JavaScript and CSS and has the data inside. It loads nothing else, so it opens
from disk, from the artefacts of a build, or in a notebook. Text from models and tools enters the page only
as text nodes, and a content security policy forbids every script except the page's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.runs.view.page import Show as Show
    from agentenv.runs.view.page import build_page as build_page
    from agentenv.runs.view.page import show as show
    from agentenv.runs.view.page import write_page as write_page
    from agentenv.runs.view.server import LiveServer as LiveServer

__all__ = door(__name__)
