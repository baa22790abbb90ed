"""OpenEnv: the world `openenv:URL`, and a server that lets OpenEnv's clients play our environments.

`world.WORLD` stands in the entry-point group `agentenv.worlds`. `adapter.OpenEnv` plays an environment of
OpenEnv's, and `server.serve` serves one of ours.
"""

__all__: list[str] = []
