"""Trackers beside `metrics.jsonl`: trackio, Weights & Biases, TensorBoard; imported only when named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

from agentenv.errors import DependencyMissing, UsageError

__all__ = ["Trackers"]

PACKAGES = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}


class Trackers:
    """Sends the metrics of each step to the trackers named in `GRPOConfig.report_to`.

    Raises:
        UsageError: A tracker is unknown.
        DependencyMissing: A tracker's package is not installed.
    """

    def __init__(self, names: Sequence[str], *, directory: Path, config: Mapping[str, Any]) -> None:
        self._writer: Any = None
        self._loggers: list[Any] = []
        for name in names:
            if name not in PACKAGES:
                raise UsageError(f"unknown tracker {name!r} in report_to; one of {sorted(PACKAGES)}")
            try:
                module = import_module(PACKAGES[name])
            except ImportError:
                raise DependencyMissing.of(name, "track", purpose=f"report_to={name!r}") from None
            if name == "tensorboard":
                self._writer = module.SummaryWriter(str(directory / "tensorboard"))
            else:
                # Weights & Biases writes into the working directory unless it is told where.
                where = {"dir": str(directory)} if name == "wandb" else {}
                run = module.init(project="agentenv", name=directory.name, config=dict(config), **where)
                self._loggers.append(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics; numbers that are not finite are left out."""
        plain = {name: value for name, value in metrics.items() if isfinite(value)}
        for one in self._loggers:
            one.log(plain, step=step)
        if self._writer is not None:
            for name, value in plain.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the trackers' runs."""
        for one in self._loggers:
            one.finish()
        if self._writer is not None:
            self._writer.close()
