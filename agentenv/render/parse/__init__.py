"""Tool-call grammars over token ids: every call gets a status, nothing raises, all is linear."""

from __future__ import annotations

from agentenv.render.parse.grammar import Block, Grammar, RawCall, Span, ToolIndex
from agentenv.render.parse.library import GRAMMARS
from agentenv.render.parse.scan import TurnText
from agentenv.render.parse.turn import TurnReader

__all__ = ["GRAMMARS", "Block", "Grammar", "RawCall", "Span", "ToolIndex", "TurnReader", "TurnText"]
