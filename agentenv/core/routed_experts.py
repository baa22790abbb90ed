"""The experts of a mixture that tokens were sent to, in a compact form that travels with the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from agentenv.core.errors import AlignmentError

__all__ = ["RoutedExperts"]


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Ids of the experts that consecutive tokens were sent to, in each layer.

    Raises:
        AlignmentError: The data is no whole number of tokens.
    """

    data: bytes
    """The ids as unsigned integers in little-endian order: token by token, layer by layer."""
    layers: int
    """Number of layers, from the first to the last one that has a router, or of all layers."""
    choices: int
    """Number of experts that a token is sent to in each layer."""
    width: int = 1
    """Bytes of one id: 1 for up to 256 experts, else 2."""

    def __post_init__(self) -> None:
        known = self.width in (1, 2) and min(self.layers, self.choices) >= 1
        if not known or len(self.data) % self.token_bytes:
            raise AlignmentError(
                f"{len(self.data)} bytes are no ids of {self.width} bytes of the experts for {self.choices} "
                f"choices in each of {self.layers} layers"
            )

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.data) // self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Number of bytes for one token."""
        return self.layers * self.choices * self.width

    @classmethod
    def of(cls, ids: Any) -> Self:
        """Return the ids of a NumPy array of shape [tokens, layers, choices] and the type uint8 or uint16.

        Raises:
            AlignmentError: The array has another shape or type.
        """
        if ids.ndim != 3 or str(ids.dtype) not in {"uint8", "uint16"}:
            raise AlignmentError(f"ids of experts have the shape {tuple(ids.shape)} and the type {ids.dtype}")
        little = ids.astype(ids.dtype.newbyteorder("<"), copy=False)
        return cls(little.tobytes(), ids.shape[1], ids.shape[2], ids.dtype.itemsize)

    def array(self) -> Any:
        """Return the ids as a NumPy array of shape [tokens, layers, choices]; nobody may change it."""
        import numpy as np

        return np.frombuffer(self.data, f"<u{self.width}").reshape(-1, self.layers, self.choices)

    def part(self, start: int, stop: int) -> Self:
        """Return the ids of the tokens from `start` to `stop`."""
        size = self.token_bytes
        return replace(self, data=self.data[start * size : stop * size])

    def then(self, others: Sequence[RoutedExperts]) -> Self:
        """Return the ids of these tokens and of further ones after them.

        Raises:
            AlignmentError: The others have another number of layers, choices or bytes.
        """
        for other in others:
            if (other.layers, other.choices, other.width) != (self.layers, self.choices, self.width):
                raise AlignmentError(
                    f"an episode has ids of experts for {self.choices} choices in each of {self.layers} "
                    f"layers, and then for {other.choices} in {other.layers}"
                )
        return replace(self, data=b"".join([self.data, *(other.data for other in others)]))
