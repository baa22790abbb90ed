"""The doctor shows what each installed backend says of itself."""

from __future__ import annotations

from agentenv.sandbox import BackendFinding, SandboxDiagnosis


def test_the_diagnosis_prints_what_a_tier_holds_under_it():
    finding = BackendFinding("landlock", True, "runs", ("files",), ("names",))

    text = SandboxDiagnosis("landlock", (finding,), "Linux", ()).text()

    assert "  ok  landlock: runs\n      holds: files\n      open:  names" in text
