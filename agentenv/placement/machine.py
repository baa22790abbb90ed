"""The devices of a machine, and how fast they are taken to be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from agentenv.core.errors import UsageError

__all__ = ["Machine", "Speeds"]

RESERVED = 0.08
"""Share of a device's memory that is left to the driver, kernels, communication and fragments."""
MATRIX_USE = 0.4
"""Share of the published speed of bfloat16 products that a training step reaches (a common value)."""
BANDWIDTH_USE = 0.6
"""Share of the published memory bandwidth that the sampling of tokens reaches (a common value)."""
LINK_BYTES_PER_S = 2e10
"""Speed at which tensors are taken to move between a device and main memory (a common value)."""
MAIN_MEMORY_BYTES_PER_S = 1e11
"""Speed at which all processes together are taken to step an optimiser in main memory (a common value)."""
DISK_BYTES_PER_S = 2e9
"""Speed at which weights are taken to reach a server through a directory, written and read."""

_SPEEDS = {
    24: ("RTX 4090", 165e12, 1.0e12),
    40: ("A100 40 GB", 312e12, 1.55e12),
    48: ("L40S", 362e12, 0.86e12),
    80: ("H100", 989e12, 3.35e12),
    141: ("H200", 989e12, 4.8e12),
    180: ("B200", 2250e12, 8.0e12),
}
"""Published dense bfloat16 products per second and bytes of memory per second, by gigabytes of memory."""
_MACHINE = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds that a device is taken to reach."""

    products_per_s: float
    """Floating-point operations of matrix products per second, in bfloat16."""
    bytes_per_s: float
    """Bytes of its memory that it reads or writes per second."""

    def __str__(self) -> str:
        return f"{self.products_per_s / 1e12:,.0f} TFLOP/s in a layer, {self.bytes_per_s / 1e12:,.2f} TB/s"


@dataclass(frozen=True, slots=True)
class Machine:
    """So many equal devices in one machine."""

    gpus: int
    gigabytes: int
    """Memory of each device in units of 10^9 bytes."""
    measured: Speeds | None = None
    """The speeds of a device, if they were measured; None takes a share of what is published for its kind."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the machine written as `8x80`: eight devices of 80 GB.

        Raises:
            UsageError: The text is not of this form.
        """
        found = _MACHINE.fullmatch(text)
        if found is None or not int(found[1]) or not int(found[2]):
            raise UsageError(
                f"{text!r} is not a number of GPUs and their memory",
                remedy="write it as 8x80: eight GPUs of 80 GB",
            )
        return cls(int(found[1]), int(found[2]))

    @property
    def bytes(self) -> int:
        """Number of bytes of each device."""
        return self.gigabytes * 10**9

    @property
    def usable(self) -> int:
        """Number of bytes of each device that a training may use."""
        return int(self.bytes * (1 - RESERVED))

    @property
    def kind(self) -> str:
        """Name of the device whose speed is used."""
        return self._speed[0]

    @property
    def products_per_s(self) -> float:
        """Number of floating-point operations of matrix products that a device makes per second."""
        return self._speed[1] * MATRIX_USE if self.measured is None else self.measured.products_per_s

    @property
    def bytes_per_s(self) -> float:
        """Number of bytes of its memory that a device reads per second."""
        return self._speed[2] * BANDWIDTH_USE if self.measured is None else self.measured.bytes_per_s

    @property
    def _speed(self) -> tuple[str, float, float]:
        size = max((known for known in _SPEEDS if known <= self.gigabytes), default=min(_SPEEDS))
        return _SPEEDS[size]

    def __str__(self) -> str:
        return f"{self.gpus}x{self.gigabytes}"
