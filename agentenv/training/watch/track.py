"""Trackers: trackio, Weights & Biases and TensorBoard. A tracker is imported only when it is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from agentenv.core.errors import DependencyMissing, UsageError
from agentenv.core.visible import logger

__all__ = ["Trackers", "require_trackers"]

log = logger(__name__)

PACKAGES = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}


class Tracked(Protocol):
    """One run in one tracker."""

    def log(self, metrics: dict[str, float], step: int) -> object:
        """Take the metrics of a step."""
        ...

    def finish(self) -> object:
        """End the run."""
        ...


class Trackers:
    """Sends the metrics of each step to the trackers named in `GRPOConfig.report_to`.

    A tracker that fails during the run is dropped with a warning; `metrics.jsonl` still has the metrics.

    Raises:
        UsageError: A tracker is unknown.
        DependencyMissing: A tracker's package is not installed.
    """

    def __init__(self, names: Sequence[str], *, directory: Path, config: Mapping[str, Any]) -> None:
        self._runs = {name: _open(name, directory, config) for name in names}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics; numbers that are not finite are left out."""
        plain = {name: value for name, value in metrics.items() if isfinite(value)}
        for name, run in list(self._runs.items()):
            try:
                run.log(plain, step=step)
            except Exception as error:  # noqa: BLE001 - a tracker's server must not end the run
                log.warning(
                    "tracker %s failed and is dropped at step %d: %s: %s",
                    name,
                    step,
                    type(error).__name__,
                    error,
                )
                del self._runs[name]

    def close(self) -> None:
        """Finish the trackers' runs."""
        for name, run in self._runs.items():
            try:
                run.finish()
            except Exception as error:  # noqa: BLE001 - it must not hide the error that ended the run
                log.warning("tracker %s could not finish its run: %s: %s", name, type(error).__name__, error)


class _TensorBoard:
    """TensorBoard's writer with the two methods that the others have."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


def require_trackers(names: Sequence[str]) -> None:
    """Check that trackers are known and installed, without importing them.

    Raises:
        UsageError: A tracker is unknown.
        DependencyMissing: A tracker's package is not installed.
    """
    for name in names:
        if name not in PACKAGES:
            raise UsageError(
                f"unknown tracker {name!r} in report_to", remedy=f"use one of {sorted(PACKAGES)}"
            )
        DependencyMissing.require(name, extra="track", purpose=f"report_to={name!r}")


def _open(name: str, directory: Path, config: Mapping[str, Any]) -> Tracked:
    require_trackers([name])
    try:
        module = import_module(PACKAGES[name])
    except ImportError:
        raise DependencyMissing.of(name, "track", purpose=f"report_to={name!r}") from None
    if name == "tensorboard":
        return _TensorBoard(module.SummaryWriter(str(directory / "tensorboard")))
    # Without `dir`, Weights & Biases writes into the working directory.
    options = {"dir": str(directory)} if name == "wandb" else {}
    return module.init(project="agentenv", name=directory.name, config=dict(config), **options)
