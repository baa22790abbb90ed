"""Benchmarks that people cite, as environments: one folder a world, found by the prefix of its names.

Each folder's `WORLD` stands in the entry-point group `agentenv.worlds`. Importing a folder imports nothing of
the benchmark's own package.
"""

__all__: list[str] = []
