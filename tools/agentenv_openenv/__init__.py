"""OpenEnv: the world `openenv:URL`, and a server that lets OpenEnv's clients play our environments.

`world.WORLD` stands in the entry-point group `agentenv.worlds`; `server.serve` serves an environment. The
adapter that plays an environment of OpenEnv's is `agentenv.envs.adapters.OpenEnv`.
"""

__all__: list[str] = []
