"""Which processors prefer oneDNN is read from Linux's description of them."""

from __future__ import annotations

import pytest

from agentenv.core import processor

EPYC = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512bw\nbugs\t\t: a : b\n"


@pytest.fixture(autouse=True)
def forget():
    cached = (processor.prefers_onednn, processor.computes_bfloat16)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize(
    ("text", "prefers"),
    [
        (EPYC, True),
        (EPYC + "\nprocessor\t: 1\nvendor_id\t: GenuineIntel\n", True),
        (EPYC.replace("AuthenticAMD", "GenuineIntel"), False),
        (EPYC.replace("avx512f", "sse2"), False),
        ("Processor: ARMv8\nFeatures: fp asimd\n", False),
        ("", False),
    ],
)
def test_only_wide_processors_of_amd_prefer_onednn(text, prefers, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")

    assert processor.prefers_onednn() is prefers


@pytest.mark.parametrize(
    ("flag", "computes"), [("avx512_bf16", True), ("amx_tile", True), ("avx512bw", False)]
)
def test_processors_with_instructions_for_bfloat16_are_known(flag, computes, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(EPYC.replace("avx2", flag))
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")

    assert processor.computes_bfloat16() is computes


def test_a_system_that_does_not_describe_its_processor_keeps_torchs_library(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "missing")

    assert processor.prefers_onednn() is False
    assert processor.computes_bfloat16() is False
