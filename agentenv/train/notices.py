"""A notice to a person when a run fails, through apprise; it never stands in the way of the error."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from agentenv.errors import DependencyMissing

__all__ = ["FailureNotice"]

log = logging.getLogger(__name__)

MAX_MESSAGE = 500


class FailureNotice:
    """Sends one notice for the failure of a run, however many processes fail with it.

    Raises:
        DependencyMissing: Addresses are given and apprise is not installed.
    """

    def __init__(self, addresses: Sequence[str], *, directory: Path) -> None:
        self._addresses = tuple(addresses)
        self._directory = directory
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        shared = "-".join(filter(None, map(os.environ.get, names)))
        self._launch = shared or f"{os.getpid()}-{time.time_ns()}"
        if not addresses:
            return
        try:
            import_module("apprise")
        except ImportError:
            raise DependencyMissing.of("apprise", "notify", purpose="GRPOConfig.notify") from None

    def send(self, error: BaseException, *, steps: int) -> bool:
        """Tell the addresses; return whether this process did. What goes wrong here is only logged."""
        if not self._addresses:
            return False
        try:
            if not self._is_first():
                return False
            sender = import_module("apprise").Apprise()
            refused = [address for address in self._addresses if not sender.add(address)]
            text = f"after {steps} steps: {type(error).__name__}: {error}"[:MAX_MESSAGE]
            sent = bool(sender.notify(title=f"training run {self._directory.name} failed", body=text))
        except Exception as failure:  # noqa: BLE001 - the run's own error must come through
            log.warning("the failure notice could not be sent: %s: %s", type(failure).__name__, failure)
            return False
        if refused or not sent:
            log.warning("the failure notice did not reach every one of %d addresses", len(self._addresses))
        return sent

    def _is_first(self) -> bool:
        """Return whether no process of this launch was here before: the first one makes a file."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            (self._directory / f".failed-{self._launch}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
