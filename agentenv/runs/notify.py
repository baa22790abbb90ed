"""Send a notice when a run fails: one for each cause, however many episodes and processes it affects.

1. A cause is the exception's type, the last line of code in its traceback, and where it happened.
   Of all processes that share a directory, only one sends a notice of a cause.
2. A notice that cannot be sent is logged. The exception that caused it is raised unchanged.
3. The sender decides who gets the notice; `through_apprise` makes a sender from addresses.
"""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path

from agentenv.core.errors import DependencyMissing
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.visible import logger, visible

__all__ = ["Notice", "Notifier", "through_apprise"]

_log = logger(__name__)
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_MAX_MESSAGE = 500
"""Largest number of characters sent through apprise, because some of its services refuse long texts."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A failure to report."""

    where: str
    """The run, or the environment and the boundary of an episode."""
    type: str
    message: str
    traceback: str

    @property
    def fingerprint(self) -> str:
        """Digest that is equal for equal causes. The message is left out, because it may vary by episode."""
        frames = _FRAME.findall(self.traceback)
        return _digest(repr((self.where, self.type, frames[-1:])))

    @classmethod
    def of(cls, where: str, error: BaseException) -> Notice:
        """Return the notice of an exception."""
        text = "".join(traceback.format_exception(error))
        return cls(where, type(error).__name__, str(error), text)


class Notifier:
    """Sends one notice for each cause.

    ```python
    notifier = Notifier(send, directory=run_directory / "notices")
    with notifier.watching("training"):
        runner.run_groups(spec, tasks, on_trajectory=notifier.episode)
    ```

    Args:
        send: sends a notice. It runs in a thread of its own, and may raise.
        directory: directory that the processes of a run share, so that only one of them sends a notice.
            With None each process sends its own.
        wait_s: longest wait, in seconds, for unsent notices at the end of `watching`.
    """

    def __init__(
        self, send: Callable[[Notice], object], *, directory: Path | None = None, wait_s: float = 10.0
    ) -> None:
        self._send = send
        self._directory = directory
        self._wait_s = wait_s
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._sending: list[threading.Thread] = []

    def episode(self, record: Trajectory) -> None:
        """Send a notice if the episode failed. This method can be passed as `on_trajectory`."""
        error: EpisodeError | None = record.error
        if error is not None:
            where = f"{record.env_id}, {error.boundary}"
            self.tell(Notice(where, error.type, error.message, error.traceback))

    @contextmanager
    def watching(self, where: str) -> Generator[None]:
        """Send a notice of an exception raised inside and raise it again; wait for unsent notices."""
        try:
            yield
        except Exception as error:
            self.tell(Notice.of(where, error))
            raise
        finally:
            self.wait()

    def tell(self, notice: Notice, *, once_for: str | None = None) -> bool:
        """Send a notice unless one of the same cause was sent; return whether the cause was new.

        Args:
            notice: the notice to send.
            once_for: name that replaces the cause, so that only one notice with this name is sent.
        """
        if not self._claim(notice.fingerprint if once_for is None else _digest(once_for)):
            return False
        thread = threading.Thread(target=self._try, args=(notice,), name="agentenv-notice", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be had: what was raised may be about just that
            self._try(notice)
        else:
            self._sending = [one for one in self._sending if one.is_alive()] + [thread]
        return True

    def wait(self) -> None:
        """Wait until all notices are sent, or until the time limit."""
        for thread in self._sending:
            thread.join(self._wait_s)

    def _claim(self, fingerprint: str) -> bool:
        with self._lock:
            if fingerprint in self._told:
                return False
            self._told.add(fingerprint)
        if self._directory is None:
            return True
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / fingerprint).touch(exist_ok=False)
        except OSError as error:
            if isinstance(error, FileExistsError) and self._directory.is_dir():
                return False
            _log.warning("several processes may send a notice of the same cause: %s", error)
        return True

    def _try(self, notice: Notice) -> None:
        try:
            self._send(notice)
        except Exception:  # noqa: BLE001 - the boundary of a notice
            _log.warning("a notice was not sent: %s in %s", notice.type, notice.where, exc_info=True)


def through_apprise(addresses: Sequence[str]) -> Callable[[Notice], None]:
    """Return a sender of notices to addresses of apprise (`mailto://...`, `ntfys://...`).

    Raises:
        DependencyMissing: Apprise is not installed.
    """
    try:
        apprise = import_module("apprise")
    except ImportError:
        raise DependencyMissing.of("apprise", "notify", purpose="a notice to an address") from None

    def send(notice: Notice) -> None:
        told = apprise.Apprise()
        refused = [address for address in addresses if not told.add(address)]
        text = f"{notice.type}: {notice.message}"[:_MAX_MESSAGE]
        if not told.notify(title=visible(f"failed: {notice.where}"), body=visible(text)) or refused:
            # The addresses are not logged, because they may hold a password.
            _log.warning("the notice did not reach all of %d addresses", len(addresses))

    return send


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
