"""SkyRL's own server of the Tinker API, on this machine's CPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from helpers.waiting import wait_until

START_S = 600
"""Importing the server takes minutes on a busy machine."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@dataclass
class SkyRLServer:
    """A server that can be killed and started again with its database and checkpoints."""

    root: Path
    model: str
    """Directory of the base model, which is also its name."""
    rank: int = 8
    sequences: int = 8
    """Number of sequences that are sampled or trained at once; each other number is compiled anew."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = {
            "max_lora_adapters": 6,
            "max_lora_rank": self.rank,
            "train_micro_batch_size": self.sequences,
            "sample_max_num_sequences": self.sequences,
        }
        given = {
            "base-model": self.model,
            "backend": "jax",
            "backend-config": json.dumps(options),
            "database-url": f"sqlite:///{self.root / 'server.db'}",
            "checkpoints-base": str(self.root / "checkpoints"),
            "host": "127.0.0.1",
            "port": str(self.port),
            "session-timeout-sec": "30",
            "session-cleanup-interval-sec": "5",
        }
        (self.root / "checkpoints").mkdir(exist_ok=True)
        folder = Path(sys.executable).parent
        with (self.root / "server.log").open("ab") as log:
            # SkyRL starts its engine by the command of its parent, which must be `uv run`.
            self.process = subprocess.Popen(
                [folder / "uv", "run", "--no-project", "--active", "-m", "skyrl.tinker.api"]
                + [part for name, value in given.items() for part in (f"--{name}", value)],
                cwd=self.root,
                env={
                    **os.environ,
                    "VIRTUAL_ENV": str(folder.parent),
                    "PATH": f"{folder}:{os.environ['PATH']}",
                    "JAX_PLATFORMS": "cpu",
                    # What was compiled once is found again by a server that is started after a kill.
                    "JAX_COMPILATION_CACHE_DIR": str(self.root / "compiled"),
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._ready, seconds=START_S)

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.root / "server.log").read_text()[-3000:]
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as answer:
            return answer.status == 200
        return False

    def kill(self) -> None:
        """End the server and its engine as a machine that loses its power does."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
