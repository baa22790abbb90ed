"""Messages to tokens by appending only, and tokens back to messages."""

from __future__ import annotations

from agentenv.render.base import ParsedTurn, RendererProtocol, TemplateReport, Verdict
from agentenv.render.doctor import doctor_report
from agentenv.render.renderer import Renderer
from agentenv.render.text_protocol import TextProtocol
from agentenv.render.tokenizer import ChatTokenizer, byte_tokenizer

__all__ = [
    "ChatTokenizer",
    "ParsedTurn",
    "Renderer",
    "RendererProtocol",
    "TemplateReport",
    "TextProtocol",
    "Verdict",
    "byte_tokenizer",
    "doctor_report",
]
