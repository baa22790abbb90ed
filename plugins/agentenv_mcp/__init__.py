"""Tools of MCP servers as tools of an environment."""

from agentenv_mcp.tools import mcp_tools

__all__ = ["mcp_tools"]
