"""The second round of attacks: state that the kernel shares between processes, files of the same user, disk.

Each row is a category, a name, the code, and what must come of it (see `attacks.Case`).
"""

from __future__ import annotations

from typing import Any

__all__ = ["NEW"]

NS = ("namespace",)
LL = ("landlock",)
STDLIB = "import fcntl, json\npath = json.__file__\nfd = os.open(path, os.O_RDONLY)\n"
BUFFER = "b = ctypes.create_string_buffer(256); a = ctypes.addressof(b)\n"

KERNEL: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "kernel",
        "slots of asynchronous input and output",
        BUFFER
        + "refused('io_setup', sc, 206 if X86 else 0, 65536, a)\nrefused('submit', sc, 209 if X86 else 2, 0, 1, a)",
        {"quick": True},
    ),
    (
        "kernel",
        "POSIX timers, which hold pending signals",
        BUFFER + "for clock in (0, 1, 2): refused('timer', sc, 222 if X86 else 107, clock, 0, a)",
        {"quick": True},
    ),
    (
        "kernel",
        "pending signals",
        BUFFER
        + "signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65)); ctypes.memmove(a + 8, b'\\xff' * 4, 4); n = 0\n"
        "try:\n while n < 100000: sc(129 if X86 else 138, os.getpid(), 40, a); n += 1\nexcept OSError as e: print('few', e.errno)\n"
        "print('BREACH' if n > 200 else 'bounded', n)",
        {"out": "bounded", "quick": True},
    ),
    (
        "kernel",
        "more pending signals, queues and locked memory",
        "import resource\nfor r in (resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK): refused(r, resource.setrlimit, r, (1 << 30, 1 << 30))",
        {},
    ),
    (
        "kernel",
        "a lease on the interpreter's files",
        STDLIB + "for kind in (0, 1): refused('lease', fcntl.fcntl, fd, 1024, kind)",
        {"quick": True},
    ),
    (
        "kernel",
        "a lease on a file of one's own",
        "import fcntl\nopen('f', 'w').close(); fd = os.open('f', 0); refused('lease', fcntl.fcntl, fd, 1024, 0)",
        {},
    ),
    (
        "kernel",
        "a lock on the interpreter",
        STDLIB
        + "for p in (path, sys.executable):\n f = os.open(p, os.O_RDONLY)\n for how in (2, 6, 1): refused('flock', fcntl.flock, f, how)",
        {"quick": True},
    ),
    (
        "kernel",
        "a record lock for writing on the interpreter",
        STDLIB + "refused('lockf', fcntl.lockf, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        {},
    ),
    (
        "kernel",
        "watches on the standard library",
        BUFFER
        + "refused('inotify', sc, 253 if X86 else 26, 0)\nrefused('inotify', sc, 294 if X86 else 26, 0)\nrefused('add', sc, 254 if X86 else 27, 3, a, 2)",
        {"quick": True},
    ),
    (
        "kernel",
        "directory notices",
        "import fcntl\nfd = os.open(os.path.dirname(os.__file__), os.O_RDONLY)\nrefused('notify', fcntl.fcntl, fd, 1026, 1)",
        {},
    ),
    (
        "kernel",
        "writing all disks, and files dropped from memory",
        STDLIB
        + "os.sync(); sc(306 if X86 else 267, fd); os.fsync(fd); os.fdatasync(fd); os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED); print('nothing happened')",
        {"out": "nothing happened"},
    ),
    (
        "kernel",
        "signals of a pipe to another process",
        (
            "import fcntl\nr, w = os.pipe()\nfor cmd, arg in ((8, BYSTANDER), (10, 9), (15, 0)): refused(cmd, fcntl.fcntl, r, cmd, arg)\n"
            "refused('async', fcntl.fcntl, r, fcntl.F_SETFL, 0x2000)\nos.write(w, b'x')"
        ),
        {"quick": True},
    ),
    (
        "kernel",
        "signals of a socket to another process",
        (
            "import fcntl, struct\ns, t = socket.socketpair()\nfor cmd in (0x8901, 0x8902): refused(hex(cmd), fcntl.ioctl, s, cmd, struct.pack('i', BYSTANDER))\n"
            "refused('async', fcntl.ioctl, s, 0x5452, struct.pack('i', 1))\nt.send(b'x')"
        ),
        {"quick": True},
    ),
    (
        "kernel",
        "addresses of the machine's network through any socket",
        "import fcntl\ns, t = socket.socketpair()\nfor cmd in (0x8912, 0x8915, 0x8927, 0x8910, 0x8913, 0x8942): refused(hex(cmd), fcntl.ioctl, s, cmd, b'lo' + bytes(62))",
        {"quick": True},
    ),
    (
        "kernel",
        "pipes of a megabyte",
        "import fcntl\nr, w = os.pipe(); refused('size', fcntl.fcntl, w, 1031, 1 << 20)\nprint(fcntl.fcntl(w, 1032))",
        {"out": "refused"},
    ),
    (
        "kernel",
        "programs on a socket",
        BUFFER
        + "s, t = socket.socketpair()\nfor option in (26, 50, 51, 52): refused(option, s.setsockopt, 1, option, bytes(16))",
        {},
    ),
    (
        "kernel",
        "filters, core scheduling and other settings",
        BUFFER
        + "for option, x in ((22, (2, a)), (59, (1, 0, 0, a)), (62, (1, 0, 0, 0)), (35, (1, a)), (53, (0, 0)), (57, (1,)), (67, (1,))): refused(option, sc, 157 if X86 else 167, option, *x)",
        {"quick": True},
    ),
    (
        "kernel",
        "advice on memory of others",
        "import mmap\nm = mmap.mmap(-1, 1 << 20); at = ctypes.addressof(ctypes.c_char.from_buffer(m))\nfor advice in (12, 20, 21, 25, 100, 101): refused(advice, sc, 28 if X86 else 233, at, 1 << 20, advice)",
        {},
    ),
    (
        "kernel",
        "what others have read",
        BUFFER
        + "import mmap\nm = mmap.mmap(-1, 4096); at = ctypes.addressof(ctypes.c_char.from_buffer(m))\nrefused('mincore', sc, 27 if X86 else 232, at, 4096, a)\nrefused('cachestat', sc, 451, 0, a, a, 0)",
        {},
    ),
    (
        "kernel",
        "barriers on all processors",
        "for command in (0, 1, 2, 4, 8, 16): refused('membarrier', sc, 324 if X86 else 283, command, 0, 0)",
        {},
    ),
    (
        "kernel",
        "gifts between pipes, keys of memory, shadow stacks",
        BUFFER
        + "r, w = os.pipe()\nfor n, x in ((275 if X86 else 76, (r, 0, w, 0, 1, 0)), (276 if X86 else 77, (r, w, 1, 0)), (330 if X86 else 289, (0, 0)), (453, (0, 4096, 0))): refused(n, sc, n, *x)",
        {},
    ),
    (
        "kernel",
        "layers of rules of one's own",
        BUFFER
        + "refused('create', sc, 444, a, 8, 0)\nrefused('restrict', sc, 446, 3, 0)\nrefused('filter', sc, 317 if X86 else 277, 1, 0, a)",
        {},
    ),
    (
        "kernel",
        "lists of locks of others",
        BUFFER
        + "refused('robust', sc, 274 if X86 else 100, HOST_PID, a, a)\nrefused('robust', sc, 274 if X86 else 100, 1, a, a)",
        {},
    ),
    (
        "kernel",
        "processors and priorities of others",
        "refused('affinity', os.sched_setaffinity, HOST_PID, {0})\nrefused('io', sc, 251 if X86 else 30, 1, HOST_PID, 0)\nrefused('nice', os.nice, 5)",
        {},
    ),
    (
        "kernel",
        "watches of events",
        (
            "import select\nn, kept = 0, []\ntry:\n while True:\n  e = select.epoll(); kept.append(e)\n  for fd in [os.pipe()[0]] + [k.fileno() for k in kept[:-1]]:\n   try: e.register(fd); n += 1\n   except (FileExistsError, PermissionError): pass\n"
            "except OSError: pass\nprint('BREACH' if n > 20000 else 'bounded', n)"
        ),
        {"out": "bounded"},
    ),
    (
        "kernel",
        "descriptors in flight",
        (
            "n, kept = 0, []\ntry:\n while n < 100000:\n  s, t = socket.socketpair(); s.setblocking(False)\n  try:\n   while n < 100000: socket.send_fds(s, [b'x'], [0] * 200); n += 200\n  except BlockingIOError: pass\n"
            "  kept.append(t); s.close()\nexcept OSError as e: print('refused', e.errno)\nprint('BREACH' if n > 20000 else 'bounded', n)"
        ),
        {"out": "bounded"},
    ),
    (
        "kernel",
        "numbers of processes of the machine",
        "n = 0\nend = time.monotonic() + 1\nwhile time.monotonic() < end:\n pid = os.fork()\n if pid == 0: os._exit(0)\n os.waitpid(pid, 0); n += 1\nprint('done')",
        {"out": "done", "tiers": NS},
    ),
    (
        "kernel",
        "processes with a share of the parent's state",
        "for flags in (0x2000 | 17, 0x10000, 0x800):\n try:\n  pid = sc(56 if X86 else 220, flags, 0, 0, 0, 0)\n  if pid == 0: libc._exit(0)\n except OSError as e: pass\nprint('done')",
        {"out": "done", "tiers": NS},
    ),
]

FILES: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "meta",
        "modes of the host's files",
        "for p in (MINE, SECRET_FILE, OPEN_DIR, os.path.dirname(MINE)):\n try: os.chmod(p, 0o777)\n except OSError: pass\nprint('tried')",
        {"out": "tried", "quick": True},
    ),
    (
        "meta",
        "modes taken away",
        "for p in (MINE, SECRET_FILE, OPEN_DIR):\n try: os.chmod(p, 0)\n except OSError: pass\nprint('tried')",
        {"out": "tried"},
    ),
    (
        "meta",
        "modes of the interpreter through an open file",
        STDLIB
        + "for f in (fd, os.open(sys.executable, os.O_RDONLY), os.open(os.path.dirname(path), os.O_RDONLY)):\n try: os.fchmod(f, 0)\n except OSError: pass\nprint('tried')",
        {"out": "tried", "quick": True},
    ),
    (
        "meta",
        "modes through a handle without rights",
        "fd = os.open(MINE, os.O_PATH) if os.path.exists(MINE) else -1\nb = ctypes.create_string_buffer(b''); a = ctypes.addressof(b)\nfor n, x in ((452, (fd, a, 0, 0x1000)), (268 if X86 else 53, (fd, a, 0))):\n try: sc(n, *x)\n except OSError: pass\nprint('tried')",
        {"out": "tried"},
    ),
    (
        "meta",
        "owners",
        "for p in (MINE, SECRET_FILE, os.__file__):\n for f in (os.chown, os.lchown):\n  try: f(p, 1234, 1234)\n  except OSError: pass\nprint('tried')",
        {"out": "tried"},
    ),
    (
        "meta",
        "times",
        STDLIB
        + "for p in (MINE, SECRET_FILE, OPEN_DIR, path, fd):\n try: os.utime(p, (1, 1))\n except OSError: pass\nprint('tried')",
        {"out": "tried", "quick": True},
    ),
    (
        "meta",
        "attributes",
        "for p in (MINE, SECRET_FILE, OPEN_DIR):\n try: os.setxattr(p, 'user.left', b'1')\n except OSError: pass\nprint('tried')",
        {"out": "tried", "quick": True},
    ),
    (
        "meta",
        "attributes read",
        "refused('xattr', os.getxattr, MINE, 'user.secret')\nrefused('list', lambda: os.listxattr(MINE) or 1 / 0 if os.path.exists(MINE) else os.stat(MINE))",
        {"tiers": LL},
    ),
    (
        "meta",
        "a file cut by its name",
        "refused('truncate', os.truncate, MINE, 0)\nrefused('truncate', os.truncate, os.__file__, 0)",
        {"quick": True},
    ),
    (
        "meta",
        "a file cut as it is opened to be read",
        "import json\nfor flags in (os.O_RDONLY, 3, os.O_WRONLY, os.O_RDWR): refused(flags, os.open, MINE, flags | os.O_TRUNC); refused(flags, os.open, json.__file__, flags | os.O_TRUNC)",
        {"quick": True},
    ),
    (
        "meta",
        "names of the host's files",
        "refused('mv', os.rename, MINE, MINE + 'x')\nrefused('rm', os.unlink, MINE)\nrefused('ln', os.link, MINE, 'mine')\nrefused('sym', os.symlink, 'x', OPEN_DIR + '/s')\nrefused('swap', os.replace, 'x', MINE)",
        {},
    ),
    (
        "meta",
        "pipes and sockets beside the host's files",
        "refused('fifo', os.mkfifo, OPEN_DIR + '/f')\ndef f(): s, t = socket.socketpair(); s.bind(OPEN_DIR + '/s')\nrefused('sock', f)",
        {},
    ),
    (
        "meta",
        "a name of the machine's abstract sockets",
        "def f(): s, t = socket.socketpair(); s.bind('\\0taken'); return s\nrefused('bind', f)",
        {"tiers": LL, "quick": True},
    ),
    (
        "meta",
        "links of other processes",
        "for p in (HOST_PID, BYSTANDER, 1):\n if p == 1 and os.getpid() == 1: continue\n for n in ('exe', 'cwd', 'root', 'fd/0', 'ns/net'): refused((p, n), os.readlink, f'/proc/{p}/{n}')",
        {},
    ),
    (
        "meta",
        "a handle without rights opened again",
        "def f(): fd = os.open(SECRET_FILE, os.O_PATH); return open(f'/proc/self/fd/{fd}').read()\nrefused('reopen', f)\ndef g(): fd = os.open(SECRET_FILE, os.O_PATH); return os.read(fd, 9)\nrefused('read', g)",
        {"quick": True},
    ),
    (
        "meta",
        "a program through a handle without rights",
        "def f(): os.execve(os.open(SECRET_FILE, os.O_PATH), ['x'], {})\nrefused('exec', f)",
        {},
    ),
    (
        "meta",
        "a copy by the kernel",
        "def f(): s = os.open(SECRET_FILE, os.O_RDONLY); d = os.open('c', os.O_RDWR | os.O_CREAT); return os.copy_file_range(s, d, 100)\nrefused('copy', f)",
        {},
    ),
]

DISK: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "disk",
        "space reserved",
        "import errno\nn = 0\ntry:\n while n < 4000:\n  fd = os.open(f'f{n}', os.O_RDWR | os.O_CREAT); os.posix_fallocate(fd, 0, 8 << 20); os.close(fd); n += 1\nexcept OSError as e: print('full', e.errno)",
        {"status": "ok|killed", "quick": True},
    ),
    (
        "disk",
        "removed files that stay open",
        "n = 0\ntry:\n while True:\n  fd = os.open(f'f{n}', os.O_RDWR | os.O_CREAT); os.unlink(f'f{n}'); os.write(fd, b'x' * (8 << 20)); n += 1\nexcept OSError as e: print('full', e.errno)\ntime.sleep(30 if n > 20 else 0)",
        {"status": "ok|killed", "quick": True},
    ),
    (
        "disk",
        "removed files that stay mapped",
        (
            "libc.mmap.restype = ctypes.c_void_p; n = 0\ntry:\n while n < 3000:\n  fd = os.open(f'f{n}', os.O_RDWR | os.O_CREAT); os.write(fd, b'x' * (8 << 20)); libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, 0); os.close(fd); os.unlink(f'f{n}'); n += 1\n"
            "except OSError as e: print('full', e.errno)\ntime.sleep(30 if n > 200 else 0)"
        ),
        {"status": "ok|killed"},
    ),
    (
        "disk",
        "files without a name",
        "n = 0\ntry:\n while True: fd = os.open('.', os.O_RDWR | os.O_TMPFILE); os.write(fd, b'x' * (8 << 20)); n += 1\nexcept OSError as e: print('full', e.errno)\ntime.sleep(30 if n > 20 else 0)",
        {"status": "ok|killed"},
    ),
    (
        "disk",
        "directories that cannot be listed",
        "os.mkdir('d', 0o300); n = 0\ntry:\n while True: open(f'd/f{n}', 'wb').write(b'x' * (8 << 20)); n += 1\nexcept OSError as e: print('full', e.errno)",
        {"status": "ok|killed"},
    ),
    (
        "disk",
        "directories too deep for a path",
        "for _ in range(60): os.mkdir('d' * 200); os.chdir('d' * 200)\nn = 0\ntry:\n while True: open(f'f{n}', 'wb').write(b'x' * (8 << 20)); n += 1\nexcept OSError as e: print('full', e.errno)",
        {"status": "ok|killed"},
    ),
    (
        "disk",
        "removed files in flight between sockets",
        (
            "n, kept = 0, []\ntry:\n while n < 3000:\n  s, t = socket.socketpair(); kept += [s, t]; fd = os.open(f'f{n}', os.O_RDWR | os.O_CREAT); os.unlink(f'f{n}'); os.write(fd, b'x' * (8 << 20)); socket.send_fds(s, [b'x'], [fd]); os.close(fd); n += 1\n"
            "except OSError as e: print('full', e.errno)"
        ),
        {"status": "ok|killed"},
    ),
    (
        "disk",
        "a table of files of a thread's own",
        "refused('unshare', sc, 436, 1000, 1001, 2)\nrefused('thread', sc, 56 if X86 else 220, 0x10900, 0, 0, 0, 0)\nrefused('unshare', sc, 272 if X86 else 97, 0x400)",
        {"tiers": LL, "quick": True},
    ),
    (
        "disk",
        "a program that cannot be looked at",
        "refused('dumpable', sc, 157 if X86 else 167, 4, 0)\nfd = os.open('p', os.O_CREAT | os.O_WRONLY, 0o111); os.write(fd, open('/bin/sleep', 'rb').read()); os.close(fd)\nos.execv('./p', ['p', '60'])",
        {"status": "killed|timeout|error", "tiers": LL, "timeout_s": 1.0},
    ),
    (
        "disk",
        "attributes of files",
        "n = 0\ntry:\n for n in range(100000): os.setxattr('.', f'user.{n}', b'x' * 4000)\nexcept OSError: pass\nprint('BREACH' if n > 20000 else 'bounded', n)",
        {"out": "bounded", "status": "ok"},
    ),
    (
        "disk",
        "threads that all write",
        "def f(k):\n n = 0\n while True:\n  open(f'{k}.{n}', 'wb').write(b'x' * (8 << 20)); n += 1\nfor k in range(4): threading.Thread(target=f, args=(k,), daemon=True).start()\ntime.sleep(30)",
        {"status": "killed", "tiers": LL},
    ),
    (
        "disk",
        "one file, written and removed again and again",
        "n, end = 0, time.monotonic() + 1\nwhile time.monotonic() < end:\n with open('f', 'wb') as f: f.write(b'x' * (4 << 20))\n os.unlink('f')\nprint('fine')",
        {"out": "fine"},
    ),
    (
        "dos",
        "threads with small stacks",
        "threading.stack_size(32768); n = 0\ntry:\n while n < 4000: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\nexcept RuntimeError: pass\nprint('BREACH' if n > 3000 else 'few', n, flush=True)\ntime.sleep(1); os._exit(0)",
        {"status": "ok|killed"},
    ),
]

FORGE: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "forge",
        "the limit of processor time",
        "os.kill(os.getpid(), signal.SIGXCPU)",
        {"status": "killed", "exit_code": -24, "quick": True},
    ),
    (
        "forge",
        "the kill at that limit",
        "os.kill(os.getpid(), signal.SIGKILL)",
        {"status": "killed", "exit_code": -9},
    ),
    (
        "forge",
        "the words of a lack of memory",
        "print('MemoryError', file=sys.stderr); sys.exit(1)",
        {"status": "error", "exit_code": 1, "quick": True},
    ),
    (
        "forge",
        "the words of a limit",
        "print('[time limit of 5 s reached]', file=sys.stderr); sys.exit(1)",
        {"status": "error", "exit_code": 1},
    ),
    (
        "forge",
        "a verdict too long for one message",
        "for n in range(900): open(f'{n:04}' + 'x' * 240, 'w').close()\nprint('made')",
        {"out": "made", "quick": True},
    ),
    (
        "forge",
        "a verdict at the edge of one message",
        "for n in range(124): open(f'{n:04}' + 'x' * 246, 'wb').write(b'y' * 9)\nprint('made')",
        {"out": "made"},
    ),
    (
        "out",
        "output that the code reads back",
        "fd = -1\ntry: fd = os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK)\nexcept OSError: pass\nend = time.monotonic() + 0.5\nwhile time.monotonic() < end:\n os.write(1, b'x')\n if fd != -1:\n  try: os.read(fd, 4096)\n  except OSError: pass\n",
        {"status": "ok", "quick": True},
    ),
    ("out", "no standard output", "sys.stdout = None", {"status": "ok", "exit_code": 0, "quick": True}),
    ("out", "standard output closed", "sys.stdout.close()", {"status": "ok", "exit_code": 0}),
    (
        "out",
        "a text as exit code without standard error",
        "sys.stderr = None\nsys.exit('why')",
        {"status": "error", "exit_code": 1, "err": "why"},
    ),
]

USEFUL: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "useful",
        "a database on disk",
        (
            "import sqlite3\nfor mode in ('wal', 'delete'):\n c = sqlite3.connect(mode + '.db'); c.execute('pragma journal_mode=' + mode); c.execute('create table t(x)')\n"
            " c.executemany('insert into t values (?)', [(n,) for n in range(100)]); c.commit(); c.execute('vacuum'); print(c.execute('select sum(x) from t').fetchone()[0]); c.close()"
        ),
        {"out": "^4950\n4950$", "quick": True},
    ),
    (
        "useful",
        "a shelf",
        "import shelve\nwith shelve.open('s') as s: s['a'] = 1\nwith shelve.open('s') as s: print(s['a'])",
        {"out": "^1$"},
    ),
    (
        "useful",
        "copies and archives",
        "import shutil\nopen('a', 'w').write('x'); shutil.copy2('a', 'b'); shutil.copytree('.', os.environ['TMPDIR'] + '/c'); shutil.make_archive('z', 'zip', '.'); print(os.path.getsize('z.zip') > 100)",
        {"out": "True", "quick": True},
    ),
    (
        "useful",
        "record locks",
        "import fcntl\nf = open('l', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_UN); print('locked')",
        {"out": "locked"},
    ),
    (
        "useful",
        "a memory map of a file",
        "import mmap\nf = open('m', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); m[0] = 1; m.flush(); print(os.path.getsize('m'))",
        {"out": "4096"},
    ),
    (
        "useful",
        "space reserved",
        "f = open('r', 'wb'); os.posix_fallocate(f.fileno(), 0, 1 << 20); print(os.path.getsize('r'))",
        {"out": "1048576"},
    ),
    (
        "useful",
        "shell tools",
        "print(subprocess.run('ls -la; cp -a /etc/passwd p; mv p q; sort q | uniq | wc -l; tar cf x.tar q; gzip x.tar; find . -name q; stat q > /dev/null; date +%Y', shell=True, capture_output=True, text=True, check=True).stdout)",
        {"out": "20\\d\\d$", "tiers": NS},
    ),
    (
        "useful",
        "unix sockets of asyncio",
        (
            "import asyncio\nasync def serve(r, w): w.write(b'x' * 100000); await w.drain(); w.close()\nasync def main():\n s = await asyncio.start_unix_server(serve, path='sock'); r, w = await asyncio.open_unix_connection('sock'); print(len(await r.read())); s.close()\n"
            " p = await asyncio.create_subprocess_exec('echo', 'hi', stdout=-1); print(await p.communicate())\nasyncio.run(main())"
        ),
        {"out": "^100000\n\\(b'hi\\\\n', None\\)$", "tiers": NS},
    ),
]

REPLY = "import struct\nreply = struct.Struct('=QiBddQ')\n"
SEND = "def send(*m):\n for x in m:\n  try: os.write(3, x)\n  except OSError as e: break\n"

SESSION: list[tuple[str, str, str, dict[str, Any]]] = [
    ("session", name, code, {"status": "ok|error|killed|timeout|output_limit|memory", "session": True, "timeout_s": 2.0, **options})
    for name, code, options in [
        ("a message that is JSON", SEND + "send(b'{\"id\": 1, \"exit\": NaN}')", {"status": "killed", "quick": True}),
        ("nested brackets", SEND + "send(b'[' * 60000)", {"status": "killed"}),
        ("numbers that are none", SEND + REPLY + "send(reply.pack(1, 0, 0, float('nan'), float('inf'), 0))", {"status": "killed", "quick": True}),
        ("numbers beyond all bounds", SEND + REPLY + "send(reply.pack(1, 2**31 - 1, 0, 1e308, -1e308, 2**64 - 1))", {"status": "killed"}),
        ("the reply to another step", SEND + REPLY + "send(*(reply.pack(n, 0, 0, 0.0, 0.0, 0) for n in (0, 2, 3, 2**64 - 1)))", {"status": "killed"}),
        ("descriptors with a reply", REPLY + "s = socket.socket(fileno=os.dup(3))\nsocket.send_fds(s, [reply.pack(1, 0, 0, 0.0, 0.0, 0)], [0] * 250)", {"quick": True}),
        ("descriptors with brackets", "s = socket.socket(fileno=os.dup(3))\nfor n in range(50): socket.send_fds(s, [b'[' * 1000], [0] * 100)", {"status": "killed|error"}),
        ("a flood of messages", "import fcntl\nfcntl.fcntl(3, 4, os.O_NONBLOCK)\nend = time.monotonic() + 0.5\nwhile time.monotonic() < end:\n try: os.write(3, b'x')\n except OSError: pass", {"status": "killed"}),
        ("messages of every length", SEND + "send(*(b'x' * n for n in (1, 40, 60000, 60041, 100000, 200000)))", {"status": "killed"}),
        ("an empty message", "s = socket.socket(fileno=os.dup(3)); s.send(b'')", {}),
        ("a reason of any bytes", SEND + REPLY + "send(reply.pack(1, 0, 2, 0.0, 0.0, 0) + bytes(range(256)) * 200)", {"status": "ok|killed"}),
        ("the channel closed", "os.close(3)", {}),
        ("the channel replaced", "os.dup2(os.open('/dev/null', 2), 3)", {}),
        ("jobs that the code receives", "def f():\n while True:\n  try: os.read(3, 1 << 20)\n  except OSError: return\nthreading.Thread(target=f, daemon=True).start()", {}),
        ("stopped", "os.kill(os.getpid(), signal.SIGSTOP)", {"status": "timeout"}),
        ("files that never end", "os.pread = lambda *a: b'x' * 60000\nprint('set')", {"out": "set"}),
        ("files that are no files", "os.mkfifo('f'); print('made')", {"out": "made"}),
        ("a link to a device as a file", "os.symlink('/dev/zero', 'f'); print('made')", {"out": "made"}),
        ("a link to a secret as a file", "os.symlink(SECRET_FILE, 'f'); print('made')", {"out": "made", "quick": True}),
        ("functions of the launcher replaced", "for m in list(sys.modules.values()):\n for n in ('_reply', '_step', '_receive'):\n  if hasattr(m, n): setattr(m, n, lambda *a: 1 / 0)\nf = sys._getframe()\nwhile f:\n if '_reply' in f.f_globals: f.f_globals['_reply'] = lambda *a: None\n f = f.f_back", {}),
        ("output after the step", "def f():\n while True: os.write(1, b'x' * 1000)\nthreading.Thread(target=f, daemon=True).start()", {}),
        ("a child that replies", SEND + REPLY + "if os.fork() == 0: send(reply.pack(1, 0, 0, 0.0, 0.0, 0)); os._exit(0)\ntime.sleep(0.2)", {"tiers": NS}),
    ]
]  # fmt: skip

NEW = [*KERNEL, *FILES, *DISK, *FORGE, *USEFUL, *SESSION]
