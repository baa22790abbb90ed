"""Renderers turn messages into token ids, only ever appending, and turn sampled ids back into messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.render.diagnosis import doctor_report as doctor_report
    from agentenv.render.protocol import ParsedTurn as ParsedTurn
    from agentenv.render.protocol import ReplyForm as ReplyForm
    from agentenv.render.protocol import TemplateReport as TemplateReport
    from agentenv.render.protocol import Verdict as Verdict
    from agentenv.render.renderer import Renderer as Renderer
    from agentenv.render.template import ChatTemplate as ChatTemplate
    from agentenv.render.text_protocol import TextProtocol as TextProtocol
    from agentenv.render.tokenizer import ChatTokenizer as ChatTokenizer
    from agentenv.render.tokenizer import byte_tokenizer as byte_tokenizer

__all__ = door(__name__)
