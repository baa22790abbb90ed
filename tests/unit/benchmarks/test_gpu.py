"""The one command for a GPU: what it says without one, what it writes, and that a failed part stops no other."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.scripts import load_benchmark
from helpers.waiting import wait_until

gpu = load_benchmark("gpu")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def writes(into: Path, name: str, figures: object) -> list[str]:
    return python(f"open({str(into / f'{name}.json')!r}, 'w').write({json.dumps(figures)!r})")


@pytest.fixture
def into(tmp_path, monkeypatch):
    """A folder of results, and parts that only write what they are told to."""
    rows = [{"how": "ours", "seconds": 0.51234567}, {"how": "a|b", "turn_s": [1.0, 2.5]}]
    parts = {
        "good": gpu.Part("Good", writes(tmp_path, "good", rows)),
        "bad": gpu.Part("Bad", python("import sys; print('it broke'); sys.exit(7)")),
        "silent": gpu.Part("Silent", python("pass")),
        "absent": gpu.Part("Absent", python("pass"), needs=("no_such_package",)),
        "named": gpu.Part("Named", writes(tmp_path, "named", {"ours": {"ms": 2}, "trl": {"ms": 4}})),
    }
    monkeypatch.setattr(gpu, "parts", lambda options: parts)
    return tmp_path


def test_without_a_gpu_it_says_so_and_ends_with_a_code_of_its_own(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu, "usable", lambda device: device == "cpu")

    assert gpu.main(["--into", str(tmp_path / "new")]) == 3
    assert "There is no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_each_part_has_its_figures_or_a_reason(into, capsys):
    code = gpu.main(["--device", "cpu", "--into", str(into)])
    found = json.loads((into / "gpu.json").read_text())

    assert code == 1
    assert {name: part["failed"] for name, part in found["parts"].items()} == {
        "good": "",
        "bad": "it ended with the exit code 7",
        "silent": "it wrote no figures",
        "absent": "not installed: no_such_package",
        "named": "",
    }
    assert found["machine"]["device"] == "cpu"
    assert "it broke" in (into / "bad.log").read_text()
    assert "bad: it ended with the exit code 7" in capsys.readouterr().err


def test_the_page_has_a_table_for_each_part(into):
    gpu.main(["--device", "cpu", "--into", str(into)])
    page = (into / "gpu.md").read_text()

    assert "No GPU was used" in page
    assert (
        "| how | seconds | turn_s |\n| --- | --- | --- |\n| ours | 0.5123 |  |\n| a/b |  | 1, 2.5 |" in page
    )
    assert "|  | ms |\n| --- | --- |\n| ours | 2 |\n| trl | 4 |" in page
    assert "No complete figures: not installed: no_such_package." in page


def test_a_run_of_chosen_parts_that_all_succeed_ends_with_0(into):
    assert gpu.main(["--device", "cpu", "--into", str(into), "--only", "good", "named"]) == 0
    assert list(json.loads((into / "gpu.json").read_text())["parts"]) == ["good", "named"]
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--into", str(into), "--only", "god"])


def test_parts_for_which_no_time_is_left_are_not_started(into):
    assert gpu.main(["--device", "cpu", "--into", str(into), "--only", "good", "--minutes", "0"]) == 1
    found = json.loads((into / "gpu.json").read_text())
    assert found["parts"]["good"]["failed"] == "no time was left for it"
    assert not (into / "good.log").exists()


def test_figures_of_an_earlier_run_are_not_taken_for_new_ones(into):
    (into / "silent.json").write_text("[1]")

    assert gpu.main(["--device", "cpu", "--into", str(into), "--only", "silent"]) == 1


def test_a_part_is_ended_with_its_children_when_the_time_is_over():
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    process = subprocess.Popen(python(f"{child}; time.sleep(600)"), start_new_session=True)

    assert gpu.ended(process, 0.0) == "the time was over after 0 s"
    assert process.poll() is not None

    def gone() -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(gone)


def test_the_real_parts_are_scripts_that_exist_and_take_their_options(tmp_path):
    options = argparse.Namespace(device="cpu", quick=True, into=tmp_path, model="smollm2")
    for name, part in load_benchmark("gpu").parts(options).items():
        if name != "tests":
            assert Path(part.command[1]).exists(), part.command
            assert f"--json {tmp_path / name}.json" in " ".join(part.command)
    tests = load_benchmark("gpu").parts(options)["tests"]
    assert tests.environment == {"AGENTENV_TEST_DEVICE": "cpu"}


@pytest.mark.parametrize(
    ("xml", "counts"),
    [
        (
            '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/></testsuites>',
            {"passed": 2, "failed": 2, "skipped": 1},
        ),
        ('<testsuites><testsuite tests="0" failures="0" errors="0" skipped="0"/></testsuites>', None),
    ],
)
def test_tests_are_counted(tmp_path, xml, counts):
    (tmp_path / "tests.xml").write_text(xml)

    assert gpu.read(tmp_path, "tests") == counts
