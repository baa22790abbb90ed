"""What the processor can do, and what others leave of it, is read from Linux's descriptions."""

from __future__ import annotations

import pytest

from agentenv.core import processor

EPYC = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512bw\nbugs\t\t: a : b\n"


@pytest.fixture(autouse=True)
def forget():
    cached = processor.computes_bfloat16
    cached.cache_clear()
    yield
    cached.cache_clear()


@pytest.mark.parametrize(
    ("text", "computes"),
    [
        (EPYC.replace("avx2", "avx512_bf16"), True),
        (EPYC.replace("avx2", "amx_tile") + "\nprocessor\t: 1\nflags\t\t: fpu\n", True),
        (EPYC, False),
        ("Processor: ARMv8\nFeatures: fp asimd\n", False),
        ("", False),
        (None, False),
    ],
)
def test_processors_with_instructions_for_bfloat16_are_known(text, computes, tmp_path, monkeypatch):
    """Also where the system does not describe its processor."""
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")

    assert processor.computes_bfloat16() is computes


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/pod/one\n", {"pod/one/cpu.max": "max 100000\n", "pod/cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("3:cpu,cpuacct:/x\n", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("3:cpu,cpuacct:/x\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("2:memory:/x\n", {"cpu.max": "100000 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 8),
    ],
)
def test_cores_are_counted_within_the_quota_of_the_groups(own, files, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(processor, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(processor, "GROUPS", tmp_path)
    monkeypatch.setattr(processor, "_cores", lambda: frozenset(range(8)))

    assert processor.usable_cores() == cores


def times(*cores: tuple[int, int]) -> str:
    """Return Linux's table with the busy and the idle ticks of each core."""
    lines = [f"cpu{number} {busy} 0 0 {idle} 0 0 0 0 0 0" for number, (busy, idle) in enumerate(cores)]
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 1 2 3"])


def test_busy_cores_are_those_that_were_not_idle_between_two_readings():
    before, after = times((100, 50), (7, 9), (0, 0)), times((120, 50), (12, 24), (20, 0))

    assert processor.busy_cores(before, after, {0, 1}) == pytest.approx(1.25)
    assert processor.busy_cores(before, before, {0, 1}) == 0


@pytest.mark.parametrize(
    ("busy", "load", "free"),
    [(0.1, 3.0, 4), (3.0, 0.0, 4), (2.2, 5.0, 2), (4.0, 9.0, 1)],
)
def test_free_cores_are_what_others_leave_now_and_over_the_last_minute(busy, load, free, monkeypatch):
    monkeypatch.setattr(processor, "_cores", lambda: frozenset(range(4)))
    monkeypatch.setattr(processor, "usable_cores", lambda: 4)
    monkeypatch.setattr(processor, "WINDOW_S", 1e-9)
    monkeypatch.setattr(processor.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(processor, "busy_cores", lambda before, after, cores: busy)
    monkeypatch.setattr(processor.os, "getloadavg", lambda: (load, 0.0, 0.0))

    assert processor.free_cores() == free
