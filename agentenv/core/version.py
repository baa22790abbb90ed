"""The version of the library, from which the build reads the version of the package."""

__all__ = ["__version__"]

__version__ = "0.1.0"
