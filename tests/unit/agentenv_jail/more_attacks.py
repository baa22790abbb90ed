"""More cases of the attack suite: category, name, code, and what must come of it (see `attacks.Case`)."""

from __future__ import annotations

from typing import Any

__all__ = ["MORE"]

NS = ("namespace",)
ANY = "ok|error|killed|memory|timeout|output_limit"

MORE: list[tuple[str, str, str, dict[str, Any]]] = [
    # dos
    (
        "dos",
        "fork bomb of sessions",
        "while True:\n try:\n  if os.fork() == 0: os.setsid()\n except OSError: time.sleep(0.01)",
        {"status": "timeout", "timeout_s": 1.0, "tiers": NS},
    ),
    (
        "dos",
        "the limit's signals ignored",
        (
            "import resource\nfor n in (signal.SIGALRM, signal.SIGXCPU, signal.SIGTERM, signal.SIGVTALRM, signal.SIGPROF):\n"
            " signal.signal(n, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU))\n"
            "while True: pass"
        ),
        {"status": "timeout", "timeout_s": 0.5},
    ),
    (
        "dos",
        "the first thread leaves, another goes on",
        "def f():\n while True: pass\nthreading.Thread(target=f).start()\nsc(60 if X86 else 93, 0)",
        {"status": "timeout", "timeout_s": 0.5},
    ),
    (
        "dos",
        "memory behind a first thread that left",
        (
            "import mmap\nx = mmap.mmap(-1, 200 << 20)\ndef f():\n time.sleep(0.05)\n for i in range(0, len(x), 4096): x[i] = 1\n time.sleep(60)\n"
            "threading.stack_size(1 << 18)\nthreading.Thread(target=f).start()\nsc(60 if X86 else 93, 0)"
        ),
        {"status": "memory"},
    ),
    (
        "dos",
        "memory of a process that cannot be looked at",
        "libc.prctl(4, 0, 0, 0, 0)\nx = bytearray(230 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(60)",
        {"status": "memory"},
    ),
    (
        "dos",
        "flood of both streams",
        "def f(n):\n while True: os.write(n, b'x' * 65536)\nthreading.Thread(target=f, args=(2,)).start()\nf(1)",
        {"status": "output_limit", "quick": True},
    ),
    (
        "dos",
        "sparse files",
        "for n in range(200):\n with open(f's{n}', 'wb') as f: f.truncate(8 << 20)\nprint('made')",
        {"status": "ok|killed|error"},
    ),
    (
        "dos",
        "buffers of sockets",
        (
            "n, kept = 0, []\ntry:\n while True:\n  pair = socket.socketpair(); kept.append(pair); pair[0].setblocking(False)\n"
            "  try:\n   while True: n += pair[0].send(b'x' * 65536)\n  except BlockingIOError: pass\nexcept OSError: pass\n"
            "print('BREACH' if n > 1 << 27 else 'bounded')"
        ),
        {"out": "bounded"},
    ),
    (
        "dos",
        "an argument list too long",
        (
            "try: subprocess.run(['/bin/true'], env={'A' * 10: 'x' * (3 << 20)}); print('BREACH')\n"
            "except OSError as e: print('refused', e.errno)"
        ),
        {"out": "refused"},
    ),
    # what lies in the directory when it is collected
    (
        "read",
        "links and pipes in place of results",
        (
            "os.symlink(SECRET_FILE, 'a'); os.symlink('/etc/shadow', 'b'); os.symlink('.', 'loop'); os.mkfifo('fifo')\n"
            "os.mkdir('d'); os.symlink('/proc/self/environ', 'd/env'); os.symlink('/', 'root'); print('laid')"
        ),
        {"out": "laid", "quick": True},
    ),
    (
        "out",
        "names of files that are no text",
        "for n in (b'\\xff\\xfe', b'a\\nb', b'\\x22], \\x22exit\\x22: 9', b'x' * 255, b'\\x1b[2J'):\n open(n, 'wb').write(b'1')\nprint('made')",
        {"out": "made", "quick": True},
    ),
    (
        "dos",
        "directories that nobody may enter",
        (
            "os.mkdir('d'); open('d/f', 'w').close(); os.chmod('d', 0); os.chmod('.', 0)\n"
            "os.chmod(os.environ['TMPDIR'], 0); print('locked')"
        ),
        {"out": "locked", "quick": True},
    ),
    (
        "state",
        "marks on the directories",
        (
            "def marks(d):\n try: return os.listxattr(d)\n except OSError: return []\n"
            "for d in ('.', os.environ['TMPDIR']):\n s = os.stat(d)\n print('BREACH' if s.st_mtime_ns == 12345 or 'user.left' in marks(d) else 'clean')\n"
            " try: os.setxattr(d, 'user.left', b'1')\n except OSError: pass\n os.utime(d, ns=(12345, 12345))"
        ),
        {"out": "clean\nclean", "quick": True},
    ),
    # priv
    (
        "priv",
        "personalities",
        "for p in (0x0040000, 0x8, 0x0400000): refused('personality', sc, 135 if X86 else 92, p)",
        {},
    ),
    (
        "priv",
        "enter other namespaces",
        (
            "for p in ('1', 'self', str(os.getppid() or 1)):\n for kind in ('mnt', 'user', 'pid', 'net'):\n"
            "  def f():\n   fd = os.open(f'/proc/{p}/ns/{kind}', 0); sc(308 if X86 else 268, fd, 0)\n  refused((p, kind), f)"
        ),
        {"quick": True},
    ),
    (
        "priv",
        "namespaces by a program",
        "r = subprocess.run(['unshare', '-Urmpf', 'id'], capture_output=True)\nprint('BREACH' if r.returncode == 0 else 'refused')",
        {"out": "refused", "tiers": NS},
    ),
    (
        "priv",
        "a core of the process",
        "import resource\nprint(resource.getrlimit(resource.RLIMIT_CORE), flush=True); os.abort()",
        {"out": r"^\((0, 0|1, 1)\)$", "status": "killed", "exit_code": -6},
    ),
    (
        "priv",
        "real calls of refused machinery",
        (
            "b = ctypes.create_string_buffer(256); a = ctypes.addressof(b)\n"
            "for n, x in ((425, (8, a)), (323 if X86 else 282, (1,)), (321 if X86 else 280, (0, a, 64)), (298 if X86 else 241, (a, 0, -1, -1, 0)),\n"
            " (250 if X86 else 219, (0, -3, 0)), (448, (0, 0)), (447, (0,)), (317 if X86 else 277, (1, 0, a))): refused(n, sc, n, *x)"
        ),
        {"quick": True},
    ),
    (
        "priv",
        "trace a child of one's own",
        (
            "pid = os.fork()\nif pid == 0:\n time.sleep(5); os._exit(0)\n"
            "for request in (16, 0x4206): refused('ptrace', sc, 101 if X86 else 117, request, pid, 0, 0)"
        ),
        {"tiers": NS},
    ),
    # kill, forge
    (
        "kill",
        "signals by every door",
        (
            "for p in (HOST_PID, BYSTANDER, os.getppid() or 1, 1):\n for n, a in ((129 if X86 else 138, (p, 9, 0)), (234 if X86 else 131, (p, p, 9)), (200 if X86 else 130, (p, 9))):\n"
            "  try: sc(n, *a)\n  except OSError: pass\n try: signal.pidfd_send_signal(os.pidfd_open(p), 9)\n except OSError: pass\nprint('done')"
        ),
        {"out": "done", "quick": True},
    ),
    (
        "kill",
        "stopped daemons of a reaper of orphans",
        "libc.prctl(36, 1, 0, 0, 0)\nfor _ in range(5):\n if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)\n  os._exit(0)\ntime.sleep(0.1); print('left')",
        {"out": "left", "tiers": NS},
    ),
    (
        "forge",
        "the exit of a brother of one's own making",
        "pid = sc(56 if X86 else 220, 0x8000 | 17, 0, 0, 0, 0)\nif pid == 0: libc._exit(0)\ntime.sleep(0.1); os._exit(9)",
        {"status": "error", "exit_code": 9, "tiers": NS},
    ),
    (
        "forge",
        "the word that a job starts",
        (
            "import struct\nword = struct.pack('=c4d', b'b', time.monotonic(), 1e9, 0.0, 0.0)\nfor n in range(3, 64):\n"
            " try: os.write(n, word); print('BREACH', n)\n except OSError: pass\nwhile True: pass"
        ),
        {"status": "timeout", "timeout_s": 0.5},
    ),
    (
        "forge",
        "a verdict on the streams",
        'for n in (1, 2): os.write(n, b\'{"exit": 0, "reason": "", "started": true}\\n\')\nsys.exit(3)',
        {"status": "error", "exit_code": 3},
    ),
    ("rc", "a negative code", "sys.exit(-1)", {"status": "error", "exit_code": 255}),
    ("rc", "a code beyond all bounds", "sys.exit(1 << 70)", {"status": "error|ok"}),
]
