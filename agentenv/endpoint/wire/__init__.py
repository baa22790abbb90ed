"""The wire formats of the endpoint: OpenAI's chat completions and responses, and Anthropic's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.endpoint.wire.chat import ChatCompletions as ChatCompletions
    from agentenv.endpoint.wire.common import Conversations as Conversations
    from agentenv.endpoint.wire.common import Wire as Wire
    from agentenv.endpoint.wire.messages import Messages as Messages
    from agentenv.endpoint.wire.responses import Responses as Responses

__all__ = door(__name__)
