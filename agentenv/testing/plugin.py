"""The pytest plugin: loaded by pytest on its own wherever agentenv is installed.

It imports nothing of agentenv until a fixture is used, so that it costs other test suites nothing.
"""

from __future__ import annotations

__all__: list[str] = []
