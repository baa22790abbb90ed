"""The local jail: the process that builds it, forks workers in it, and confines them.

Everything in this package runs in a process of its own, executed fresh with a clean environment,
and imports nothing but the standard library and its neighbours here.
"""

__all__: list[str] = []
"""Empty: in its own process this package stands alone, without the library and its doors."""
