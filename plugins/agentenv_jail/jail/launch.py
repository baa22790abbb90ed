"""Build the jail once: create namespaces and a root directory of its own, then start the zygote in it.

The host executes this module in a new interpreter, which becomes the guardian. The guardian stays outside
the jail and ends everything when the host ends. Its child, pid 1 of the new pid namespace, moves into the new
root and executes another interpreter there, the zygote, so that no file names and no memory of the host get
into the jail.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import struct
import sys
from typing import Any

from . import kernel
from .kernel import mount, prctl, syscall

__all__ = ["BOOT", "FLAGS", "main"]

FLAGS = ("-s", "-S", "-B", "-P")
"""Interpreter flags: use no site packages, write no byte code, keep the script's directory off the path."""
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from jail.{0} import main; main(sys.argv[2:])"

_ROOT = "/tmp"
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_OPEN_TREE_CLONE, _CLOEXEC, _RECURSIVE, _EMPTY_PATH = 1, 0o2000000, 0x8000, 0x1000
_REC_PRIVATE = 0x4000 | 0x40000
_DEVICES = ("null", "zero", "full", "random", "urandom")


def main(arguments: list[str]) -> None:
    """Run the guardian; `arguments` are the configuration as JSON and the host's process id."""
    config = json.loads(arguments[0])
    control = config["control"]
    try:
        # A descriptor of the process, because its number may be given to another one after it has ended.
        host = os.pidfd_open(int(arguments[1]))
        # The number may have been reused before it was opened; the parent is certain.
        if os.getppid() != int(arguments[1]):
            raise OSError("the host has ended")
        config["core_bytes"] = kernel.core_limit()
        if config["tier"] == "landlock":
            from .zygote import serve

            config["host"] = host
            serve(config)
            return
        first = _enter_namespaces()
    except OSError as error:
        _report(control, error)
        os._exit(1)
    if first == 0:
        _become_zygote(config, control)
    os.close(control)
    _guard(host, first)


def _report(control: int, error: BaseException) -> None:
    """Tell the host why the jail could not be built."""
    os.write(control, json.dumps({"failed": str(error), "errno": getattr(error, "errno", None)}).encode())


def _enter_namespaces() -> int:
    """Enter new namespaces and fork; return 0 in pid 1 of the new pid namespace."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        _unshare_user_as_root()
    else:
        kernel.unshare(kernel.CLONE_NEWUSER)
        # Without privileges the kernel takes a map of groups only after setgroups is given up: otherwise a
        # process could leave a group that a file denies access to.
        kernel.write("/proc/self/setgroups", b"deny")
        kernel.write("/proc/self/uid_map", f"0 {uid} 1".encode())
        kernel.write("/proc/self/gid_map", f"0 {gid} 1".encode())
    kernel.unshare(
        kernel.CLONE_NEWNS
        | kernel.CLONE_NEWNET
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
        | kernel.CLONE_NEWPID
        | kernel.CLONE_NEWCGROUP
    )
    guardian = os.pidfd_open(os.getpid())
    # A process never enters the new pid namespace itself, only its next child does.
    first = os.fork()
    if first == 0:
        prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        # The guardian may have ended before the line above, in which case no signal comes.
        if select.select([guardian], [], [], 0)[0]:
            os._exit(1)
    os.close(guardian)
    return first


def _unshare_user_as_root() -> None:
    """Enter a user namespace in which 0 is root, for setting up, and 1000 is the outer user nobody."""
    ready, go = os.pipe()
    parent = os.getpid()
    # Two ids can be mapped only from outside the new namespace, by a process that is still root there.
    helper = os.fork()
    if helper == 0:
        os.close(go)
        os.read(ready, 1)
        try:
            for name in ("uid_map", "gid_map"):
                kernel.write(f"/proc/{parent}/{name}", b"0 0 1\n1000 65534 1")
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(ready)
    try:
        kernel.unshare(kernel.CLONE_NEWUSER)
    finally:
        os.write(go, b"x")
        os.close(go)
        failed = os.waitpid(helper, 0)[1]
    if failed:
        raise OSError(1, "the maps of the user namespace cannot be written")


def _guard(host: int, first: int) -> None:
    """Wait until the host or the zygote ends, then exit, which also ends the zygote."""
    zygote = os.pidfd_open(first)
    select.select([host, zygote], [], [])
    os._exit(0)


def _become_zygote(config: dict[str, Any], control: int) -> None:
    """Build the root, move into it and execute the zygote there."""
    try:
        _hostname()
        _build_root(config)
        _pivot()
        os.set_inheritable(control, True)
        environment = {"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"}
        if config["libraries"]:
            environment["LD_LIBRARY_PATH"] = str(config["libraries"])
        boot = BOOT.format("zygote")
        python = str(config["python"])
        # Code in the jail can read the arguments, so they are empty of the host's paths.
        told = {name: value for name, value in config.items() if name not in ("shown", "hidden")}
        os.execve(python, [python, *FLAGS, "-c", boot, "/jail", json.dumps(told)], environment)
    except OSError as error:
        _report(control, error)
    os._exit(1)


def _hostname() -> None:
    name = b"sandbox"
    ctypes.CDLL(None).sethostname(name, len(name))


def _clone(path: str, *, flags: int) -> int:
    """Return a private copy of a mount tree, with `flags` set on all of it."""
    text = ctypes.create_string_buffer(os.fsencode(path))
    address = ctypes.addressof(text)
    fd = syscall("open_tree", -100, address, _OPEN_TREE_CLONE | _CLOEXEC | _RECURSIVE)
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", flags, 0, 0, 0), 32)
    empty = ctypes.create_string_buffer(b"")
    syscall(
        "mount_setattr",
        fd,
        ctypes.addressof(empty),
        _EMPTY_PATH | _RECURSIVE,
        ctypes.addressof(attributes),
        32,
    )
    return fd


def _attach(fd: int, target: str) -> None:
    empty, place = ctypes.create_string_buffer(b""), ctypes.create_string_buffer(os.fsencode(target))
    syscall("move_mount", fd, ctypes.addressof(empty), -100, ctypes.addressof(place), 4)
    os.close(fd)


def _build_root(config: dict[str, Any]) -> None:
    """Mount a small file system on `_ROOT` and put the files into it that the code may see."""
    # Otherwise mounts would spread to the host, with whose tree the new namespace shares its peers.
    mount("", "/", "", _REC_PRIVATE)
    trees = _trees(config)
    # Devices are bound and not made: mknod needs rights that a user namespace never gives.
    devices = {name: _clone(f"/dev/{name}", flags=_NOSUID | _NOEXEC) for name in _DEVICES}
    mount("tmpfs", _ROOT, "tmpfs", _NOSUID | _NODEV, "size=4m,nr_inodes=4096,mode=0755")
    for target, fd in trees:
        path = _ROOT + target
        if (os.fstat(fd).st_mode & 0o170000) == 0o040000:
            os.makedirs(path, exist_ok=True)
        else:
            _touch(path)
        _attach(fd, path)
    for hidden in config["hidden"]:
        _cover(_ROOT + str(hidden))
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink("/" + name) and not os.path.lexists(f"{_ROOT}/{name}"):
            os.symlink(os.readlink("/" + name), f"{_ROOT}/{name}")
    _devices(devices)
    for name, text in _etc(config):
        _touch(f"{_ROOT}/etc/{name}", text)
    for name in ("work", "tmp", "proc"):
        os.makedirs(f"{_ROOT}/{name}", exist_ok=True)
    mount("proc", f"{_ROOT}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)


def _trees(config: dict[str, Any]) -> list[tuple[str, int]]:
    """Open all trees that go into the jail, before a mount hides any of them."""
    flags = _RDONLY | _NOSUID | _NODEV
    present = [(target, path) for target, path in sorted(config["shown"].items()) if os.path.exists(path)]
    return [(target, _clone(path, flags=flags)) for target, path in present]


def _cover(path: str) -> None:
    """Mount an empty directory or an empty file over a path, so that nothing in it is visible."""
    if os.path.isdir(path):
        mount("tmpfs", path, "tmpfs", _RDONLY | _NOSUID | _NODEV | _NOEXEC, "size=4k,mode=0755")
    elif os.path.isfile(path):
        _attach(_clone("/dev/null", flags=_NOSUID | _NOEXEC), path)


def _touch(path: str, text: str = "") -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _devices(devices: dict[str, int]) -> None:
    for name, fd in devices.items():
        _touch(f"{_ROOT}/dev/{name}")
        _attach(fd, f"{_ROOT}/dev/{name}")
    os.mkdir(f"{_ROOT}/dev/shm")
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        os.symlink(target, f"{_ROOT}/dev/{name}")


def _etc(config: dict[str, Any]) -> list[tuple[str, str]]:
    root = "root:x:0:0:root:/:/bin/false\n" if os.getuid() == 0 else ""
    return [
        ("passwd", root + "sandbox:x:1000:1000:sandbox:/work:/bin/sh\n"),
        ("group", "sandbox:x:1000:\n"),
        ("hosts", "127.0.0.1 localhost\n"),
        ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
    ]


def _pivot() -> None:
    """Replace the root by the new one, unmount the old root, and make the new one read-only."""
    os.chdir(_ROOT)
    dot = ctypes.create_string_buffer(b".")
    # With the same directory twice the old root lies above the new one, and needs no directory in it.
    syscall("pivot_root", ctypes.addressof(dot), ctypes.addressof(dot))
    # Lazily, as the interpreter that runs this still has files of the old root open until it executes the
    # next.
    kernel.umount(".")
    os.chdir("/")
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", _RDONLY | _NOSUID | _NODEV, 0, 0, 0), 32)
    path = ctypes.create_string_buffer(b"/")
    syscall("mount_setattr", -100, ctypes.addressof(path), 0, ctypes.addressof(attributes), 32)


if __name__ == "__main__":
    main(sys.argv[1:])
