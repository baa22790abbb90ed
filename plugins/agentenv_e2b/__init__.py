"""Sandboxes that use E2B's protocol: a client of E2B's cloud, and a server with the same protocol.

`E2BSandbox` stands in the entry-point group `agentenv.sandboxes` under the name `e2b`.
"""

from agentenv_e2b.backend import E2BSandbox, E2BSession
from agentenv_e2b.server import E2BServer, new_key, serve, serve_forever

__all__ = ["E2BSandbox", "E2BServer", "E2BSession", "new_key", "serve", "serve_forever"]
