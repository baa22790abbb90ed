"""Turn Python functions into tools: a schema for the model, checked arguments, one answer for each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.tools.content import Image as Image
    from agentenv.tools.content import to_content as to_content
    from agentenv.tools.definition import ToolOptions as ToolOptions
    from agentenv.tools.process import close_idle_workers as close_idle_workers
    from agentenv.tools.registry import make_tool as make_tool
    from agentenv.tools.registry import register_tool as register_tool
    from agentenv.tools.registry import tool_registry as tool_registry
    from agentenv.tools.run import abandoned_threads as abandoned_threads
    from agentenv.tools.tool import Tool as Tool
    from agentenv.tools.tool import tool as tool
    from agentenv.tools.toolbox import Toolbox as Toolbox

__all__ = door(__name__)
