"""The conversation of one episode with the model, on tokens or on text, cut to the limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.runner.conversation.conversation import Conversation as Conversation
    from agentenv.runner.conversation.conversation import Reply as Reply
    from agentenv.runner.conversation.text import ChatConversation as ChatConversation
    from agentenv.runner.conversation.tokens import TokenConversation as TokenConversation

__all__ = door(__name__)
