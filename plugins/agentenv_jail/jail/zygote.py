"""The zygote: a process in the jail that forks a worker for each request of the host."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from . import kernel, preload, seccomp, usage, worker
from .child import NOBODY
from .files import remove_tree
from .messages import send_descriptors

__all__ = ["main", "serve"]


def main(arguments: list[str]) -> None:
    """Run the zygote as pid 1 of the jail."""
    serve(json.loads(arguments[0]))


def serve(config: dict[str, Any]) -> None:
    """Answer requests until the host closes the control socket or ends."""
    control = socket.socket(fileno=config["control"])
    config["zygote"] = os.getpid()
    try:
        own = _prepare(config)
    except Exception as error:  # noqa: BLE001 - the boundary: whatever went wrong, the host is told
        reason = f"{type(error).__name__}: {error}"
        control.send(json.dumps({"failed": reason, "errno": getattr(error, "errno", None)}).encode())
        os._exit(1)
    control.send(b'{"ready": true}')
    try:
        _answer(config, control, own)
    finally:
        _finish(config)


def _answer(config: dict[str, Any], control: socket.socket, own: int) -> None:
    """Fork a worker for each request until the host has ended."""
    host = config.get("host", -1)
    watched = [control.fileno()] + ([host] if host != -1 else [])
    while True:
        readable = select.select(watched, [], [])[0]
        request = control.recv(64) if control.fileno() in readable else b""
        if host in readable or not request:
            return
        _collect()
        try:
            _spawn(config, control, own)
        except BlockingIOError as error:  # the limit of processes is reached for the moment
            control.send(json.dumps({"failed": str(error), "errno": error.errno}).encode())


def _prepare(config: dict[str, Any]) -> int:
    """Load modules, build the filter and return the descriptor of the zygote's own pid namespace."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    namespaces = config["tier"] == "namespace"
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if namespaces else -1
    preload.preload(config)
    if namespaces:
        # All modules are loaded, so the code in the jail need not see how the jail is built.
        kernel.umount("/jail/jail")
    else:
        usage.check_measurable(NOBODY if os.geteuid() == 0 else -1)
    config["filter"] = seccomp.build(fork=namespaces, landlock=config["abi"])
    null = os.open("/dev/null", os.O_RDWR)
    # Only now: until the zygote is ready, its errors are for the host to read.
    os.dup2(null, 2)
    os.close(null)
    sys.argv = ["main.py"]
    # A collection in a child writes to the headers of all objects, and the kernel would copy each of their
    # pages.
    gc.collect()
    gc.freeze()
    return own


def _spawn(config: dict[str, Any], control: socket.socket, own: int) -> None:
    """Fork a worker; send the host the other ends of its sockets and a pidfd of the worker."""
    job, host_job = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    status, host_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with job, host_job, status, host_status:
        if own != -1:
            kernel.unshare(kernel.CLONE_NEWPID)  # the next child becomes pid 1 of a new namespace
        try:
            pid = kernel.fork()
            if pid == 0:
                worker.run(config, job.fileno(), status.fileno())
        finally:
            if own != -1:
                kernel.setns(own, kernel.CLONE_NEWPID)
        _inits.add(pid)
        handle = os.pidfd_open(pid)
        send_descriptors(control, b"w", [host_job.fileno(), host_status.fileno(), handle])
        os.close(handle)


def _collect() -> None:
    """Reap inits that have ended."""
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            _inits.discard(pid)
    except ChildProcessError:
        _inits.clear()


def _finish(config: dict[str, Any]) -> None:
    """End the process. Without namespaces it first ends its workers and removes their directories itself."""
    if config["tier"] == "landlock":
        for pid in _inits:
            os.kill(pid, signal.SIGTERM)
        for pid in _inits:
            os.waitpid(pid, 0)
        remove_tree(str(config["base"]))
    os._exit(0)


_inits: set[int] = set()
