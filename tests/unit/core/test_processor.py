"""Which processors prefer oneDNN is read from Linux's description of them."""

from __future__ import annotations

import pytest

from agentenv.core import processor

EPYC = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512bw\nbugs\t\t: a : b\n"


@pytest.fixture(autouse=True)
def forget():
    processor.prefers_onednn.cache_clear()
    yield
    processor.prefers_onednn.cache_clear()


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


def test_a_system_that_does_not_describe_its_processor_keeps_torchs_library(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "missing")

    assert processor.prefers_onednn() is False
