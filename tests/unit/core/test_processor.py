"""Whether the processor computes in bfloat16 is read from Linux's description of it."""

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
    ],
)
def test_processors_with_instructions_for_bfloat16_are_known(text, computes, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")

    assert processor.computes_bfloat16() is computes


def test_a_system_that_does_not_describe_its_processor_computes_in_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "missing")

    assert processor.computes_bfloat16() is False
