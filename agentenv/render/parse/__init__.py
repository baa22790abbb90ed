"""Parse completions with tool-call grammars, in linear time; malformed calls get a status and never raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.render.parse.grammar import Block as Block
    from agentenv.render.parse.grammar import Grammar as Grammar
    from agentenv.render.parse.grammar import RawCall as RawCall
    from agentenv.render.parse.grammar import Span as Span
    from agentenv.render.parse.grammar import ToolIndex as ToolIndex
    from agentenv.render.parse.grammar import TurnText as TurnText
    from agentenv.render.parse.library import GRAMMARS as GRAMMARS
    from agentenv.render.parse.turn import TurnReader as TurnReader

__all__ = door(__name__)
