"""Sandboxes that use E2B's protocol: a client of E2B's cloud, and a server with the same protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.sandbox.e2b.backend import E2BSandbox as E2BSandbox
    from agentenv.sandbox.e2b.backend import E2BSession as E2BSession
    from agentenv.sandbox.e2b.server import E2BServer as E2BServer
    from agentenv.sandbox.e2b.server import new_key as new_key
    from agentenv.sandbox.e2b.server import serve as serve
    from agentenv.sandbox.e2b.server import serve_forever as serve_forever

__all__ = door(__name__)
