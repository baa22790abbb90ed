"""Measure latency, throughput, start-up and memory of the local sandbox and of its alternatives.

    python benchmarks/sandbox.py [--quick] [--json PATH]

Every row runs `print(sum(range(1000)))` and checks its output. The alternatives are a bare interpreter
without any isolation, bubblewrap with a new interpreter for each call (if `bwrap` is installed), and a
long-lived Jupyter kernel, which is neither isolated nor fresh (if `jupyter_client` and `ipykernel` are
installed).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

from agentenv.core import SandboxUnavailable
from agentenv.sandbox import create

CODE = "print(sum(range(1000)))"
WANT = "499500\n"


async def timed(call, count, pause_s=0.0, *, limit_s):
    """Return the milliseconds of `count` calls, or of as many as fit into `limit_s` on a busy machine."""
    times = []
    end = time.perf_counter() + limit_s
    for _ in range(count):
        if times and time.perf_counter() > end:
            break
        if pause_s:
            await asyncio.sleep(pause_s)
        began = time.perf_counter()
        out = await call()
        times.append((time.perf_counter() - began) * 1000)
        assert out == WANT, out
    return sorted(times)


def latency(name, times):
    pick = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    row = {key: round(times[min(int(len(times) * share), len(times) - 1)], 2) for key, share in pick.items()}
    return {"what": name, **row, "min": round(times[0], 2), "per_min": round(60_000 / statistics.mean(times))}


async def throughput(name, call, clients, count, limit_s):
    began = time.perf_counter()
    series = await asyncio.gather(*(timed(call, count // clients, limit_s=limit_s) for _ in range(clients)))
    per_min = 60 * sum(map(len, series)) / (time.perf_counter() - began)
    return {"what": f"{name}, {clients} clients", "per_min": round(per_min)}


def process(command):
    async def call():
        # The sandbox runs in its own session too; the kernel may share processors between sessions.
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        return (await child.communicate())[0].decode()

    return call


def pss_mib(root):
    """Return the proportional memory of a process and its descendants, and the number of processes."""
    total, count, pids = 0, 0, [root]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += [int(child) for child in task.read_text().split()]
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        count += 1
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024, count


def pool_memory():
    """Return the memory of the sandbox's processes."""
    for task in Path("/proc/self/task").glob("*/children"):
        for child in task.read_text().split():
            if "jail" in Path(f"/proc/{child}/cmdline").read_text():
                return pss_mib(int(child))
    return 0.0, 0


async def tier_rows(tier, count, size, limit_s):
    options = {"python": "/usr/bin/python3"} if tier == "landlock" and os.geteuid() == 0 else {}
    began = time.perf_counter()
    async with create(tier, size=size, **options) as sandbox:

        async def call():
            return (await sandbox.run_code(CODE)).stdout

        await call()
        start_ms = (time.perf_counter() - began) * 1000
        await timed(call, 30, limit_s=limit_s)
        rows = [
            latency(f"{tier}, pool {size}, one after another", await timed(call, count, limit_s=limit_s)),
            latency(
                f"{tier}, pool {size}, paced by 30 ms", await timed(call, count // 3, 0.03, limit_s=limit_s)
            ),
        ]
        rows += [
            await throughput(f"{tier}, pool {size}", call, clients, count, limit_s)
            for clients in (1, 2, 3, 4)
        ]
        await asyncio.sleep(0.2)
        memory, processes = pool_memory()
        rows.append({"what": f"{tier}, pool {size}, start to first result", "ms": round(start_ms, 1)})
        each = memory / max(size, 1)
        rows.append(
            {
                "what": f"{tier}, memory of {processes} processes (MiB PSS)",
                "mib": round(memory, 1),
                "each": round(each, 1),
            }
        )
        return rows


async def rivals(count, limit_s):
    bare = [sys.executable, "-I", "-S", "-c", CODE]
    rows = [
        latency("bare python -I -S -c (no isolation)", await timed(process(bare), count, limit_s=limit_s))
    ]
    rows += [await throughput("bare python", process(bare), clients, count, limit_s) for clients in (2, 4)]
    if shutil.which("bwrap"):
        jail = [
            "bwrap",
            "--unshare-all",
            "--die-with-parent",
            "--ro-bind",
            "/",
            "/",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
        ]
        rows.append(
            latency("bubblewrap + python", await timed(process([*jail, *bare]), count, limit_s=limit_s))
        )
    else:
        print("skipped: bubblewrap is not installed")
    try:
        from jupyter_client.manager import AsyncKernelManager
    except ImportError:
        print("skipped: jupyter_client and ipykernel are not installed")
        return rows
    manager = AsyncKernelManager(kernel_name="python3")
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready()

    async def call():
        found = []
        await client.execute_interactive(
            CODE, output_hook=lambda m: found.append(m["content"].get("text", ""))
        )
        return "".join(found)

    rows.append(
        latency("Jupyter kernel, kept (not fresh, no isolation)", await timed(call, count, limit_s=limit_s))
    )
    client.stop_channels()
    await manager.shutdown_kernel(now=True)
    return rows


def against_bare(rows):
    """Measure each tier next to a bare interpreter in the same run, because shared machines are noisy."""
    bare = next(row for row in rows if row["what"].startswith("bare python -I"))
    ratios = []
    for tier in ("namespace", "landlock"):
        paced = [row for row in rows if row["what"].startswith(tier) and "paced" in row["what"]]
        most = [row["per_min"] for row in rows if row["what"].startswith(tier) and "clients" in row["what"]]
        if paced:
            ratios.append(
                {
                    "what": f"{tier} against bare python",
                    "p50_share": round(paced[0]["p50"] / bare["p50"], 2),
                    "p90_share": round(paced[0]["p90"] / bare["p90"], 2),
                    "per_min_times": round(max(most) / bare["per_min"], 2),
                }
            )
    return ratios


async def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the executions, and less time for each row"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--size", type=int, default=8)
    options = parser.parse_args()
    count, limit_s = (60, 2.0) if options.quick else (600, 10.0)
    print(f"load before: {os.getloadavg()}, {len(os.sched_getaffinity(0))} cores, uid {os.geteuid()}")
    rows = []
    for tier in ("namespace", "landlock"):
        try:
            rows += await tier_rows(tier, count, options.size, limit_s)
        except SandboxUnavailable as error:
            print(f"skipped: {error}")
    rows += await rivals(count, limit_s)
    rows += against_bare(rows)
    for row in rows:
        print(f"{row['what']:52}", *(f"{name} {value}" for name, value in row.items() if name != "what"))
    if options.json:
        options.json.write_text(
            json.dumps({"load": os.getloadavg(), "python": sys.version, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    asyncio.run(main())
