"""The viewer: runs, groups and episodes token by token, in one HTML file that needs nothing else.

The page is plain JavaScript and CSS with the data inside. Nothing is loaded from anywhere, so it opens
from disk, as an artefact of a build, or in a notebook. Text from models and tools enters the page as
text nodes only, and a content security policy forbids every script but the page's own.
"""

from __future__ import annotations

from agentenv.view.page import Show, build_page, show, write_page

__all__ = ["Show", "build_page", "show", "write_page"]
