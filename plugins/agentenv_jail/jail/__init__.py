"""The processes of the local jail: they build it, fork workers in it and confine the workers' children.

Everything in this package runs in separate processes, which start with a clean environment. It imports
only the standard library and other modules of this package.
"""

__all__: list[str] = []
"""Empty, because in the jail this package runs without the rest of the library."""
