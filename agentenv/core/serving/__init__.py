"""What all servers of this library share: who may ask, which bodies they read, and how they listen.

A server of ours starts code: an environment's tools, a sandbox, a viewer that reads files. Web pages that a
person opens can send requests to it too, and so can other users of the machine. Every server therefore asks
one `Guard` before it does anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.core.serving.body import parse_json as parse_json
    from agentenv.core.serving.body import parse_json_beginning as parse_json_beginning
    from agentenv.core.serving.guard import Guard as Guard
    from agentenv.core.serving.guard import Refused as Refused
    from agentenv.core.serving.guard import new_token as new_token
    from agentenv.core.serving.listening import Served as Served
    from agentenv.core.serving.listening import guarded as guarded
    from agentenv.core.serving.listening import listen as listen
    from agentenv.core.serving.listening import read_body as read_body
    from agentenv.core.serving.listening import read_object as read_object
    from agentenv.core.serving.listening import time_for_body as time_for_body

__all__ = door(__name__)
