"""An endpoint through which agents with a loop of their own ask the model, so that every token is recorded.

An agent of any SDK that speaks OpenAI's or Anthropic's API gets the address of a `Session`. The session keeps
the tokens as they were sampled, over sub-agents, retries and conversations that the agent shortens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.endpoint.captured import Captured as Captured
    from agentenv.endpoint.captured import Choice as Choice
    from agentenv.endpoint.captured import OpenSequence as OpenSequence
    from agentenv.endpoint.matching import Match as Match
    from agentenv.endpoint.matching import Node as Node
    from agentenv.endpoint.matching import ReplyTree as ReplyTree
    from agentenv.endpoint.request import Answer as Answer
    from agentenv.endpoint.request import Asked as Asked
    from agentenv.endpoint.request import NotAnswered as NotAnswered
    from agentenv.endpoint.server import Endpoint as Endpoint
    from agentenv.endpoint.server import serve_sessions as serve_sessions
    from agentenv.endpoint.session import Session as Session
    from agentenv.endpoint.session import SessionOptions as SessionOptions

__all__ = door(__name__)
