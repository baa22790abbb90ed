"""`make gpu` and the packing for its machine: what is brought, in which order it runs, and what the page says."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.scripts import BENCHMARKS, load_benchmark

gpu = load_benchmark("gpu")


def load_wheels():
    path = str(BENCHMARKS.parent / ".ci" / "gpu-wheels")
    loader = importlib.machinery.SourceFileLoader("gpu_wheels", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_wheels", loader))
    loader.exec_module(module)
    return module


wheels = load_wheels()


def report(*packages: str) -> dict:
    pairs = (package.split("==") for package in packages)
    return {"install": [{"metadata": {"name": name, "version": version}} for name, version in pairs]}


def test_what_a_machine_has_is_not_packed_however_its_name_is_written():
    present = wheels.names_in(
        "Huggingface_Hub==1.33.0\ntyping.extensions\n\n# a remark\ntorch @ file:///torch.whl\n"
    )

    assert present == {"huggingface-hub", "typing-extensions", "torch"}
    found = report(
        "huggingface-hub==2.4.0", "typing_extensions==4.16", "pydantic_core==2.50", "agentenv-rl==1"
    )
    assert wheels.lacking(found, present) == ["pydantic-core==2.50"]


def test_the_libraries_of_cuda_come_with_torch_or_are_packed_with_it():
    found = report("torch==2.11.0", "nvidia-cudnn-cu13==9.19", "cuda-bindings==13.5", "gymnasium==1.4.0")

    assert wheels.lacking(found, {"torch"}) == ["gymnasium==1.4.0"]
    assert wheels.lacking(found, set()) == sorted(
        ["torch==2.11.0", "nvidia-cudnn-cu13==9.19", "cuda-bindings==13.5", "gymnasium==1.4.0"]
    )


def test_wheels_for_an_older_c_library_are_taken_too_under_each_of_their_names():
    tags = wheels.platforms("manylinux_2_28_x86_64")

    assert tags[0] == "manylinux_2_28_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"} <= set(tags)
    assert "manylinux_2_29_x86_64" not in tags
    assert wheels.platforms("macosx_14_0_arm64") == ["macosx_14_0_arm64"]


def test_what_is_too_large_is_named():
    sizes = {"torch.whl": 500 * 2**20, "small.whl": 2**20, "this repository": 13 * 2**20}

    assert wheels.too_large(sizes, 600) == ""
    said = wheels.too_large(sizes, 64)
    assert "514.0 MiB are more than the 64" in said
    assert "torch.whl 500.0, this repository 13.0" in said


def options(tmp_path: Path, *words: str):
    return gpu.arguments(["--device", "cpu", "--small", "--into", str(tmp_path), *words])


def test_parts_that_tell_most_come_first_and_only_the_last_need_vllm(tmp_path):
    parts = gpu.parts(options(tmp_path))

    assert list(parts)[:8] == ["facts", "exact", "tests", "learn", "packs", "engines", "trainer", "large"]
    assert ["vllm" in part.needs for part in parts.values()] == [False] * 8 + [True] * 3
    files = [word for word in parts["tests"].command if word.endswith(".py")]
    assert all(Path(file).exists() for file in files), (
        "the tests are named, because collecting all takes a minute"
    )


def script(tmp_path: Path, text: str, name: str = "facts", needs: tuple[str, ...] = ()):
    """A part that runs some Python, with the path of its figures as `figures`."""
    body = f"import pathlib, sys\nfigures = pathlib.Path({str(tmp_path / name)!r} + '.json')\n{text}"
    return gpu.Part("A part", [sys.executable, "-c", body], 60.0, needs)


TOLD = """figures.write_text('[{"what": "product bfloat16", "TFLOPs": 800.0}]')\n"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs parts in the place of the real ones; it returns the exit code and the page."""

    def run(**parts):
        monkeypatch.setattr(gpu, "parts", lambda _: parts)
        code = gpu.main(["--device", "cpu", "--into", str(tmp_path)])
        return code, (tmp_path / "gpu.md").read_text()

    return run


def test_a_part_without_its_packages_is_left_out_and_is_no_failure(run, tmp_path):
    absent = script(tmp_path, TOLD, "vllm", ("a_package_that_is_not_there",))
    code, page = run(facts=script(tmp_path, TOLD), vllm=absent)

    assert code == 0
    assert "Not measured: not installed: a_package_that_is_not_there." in page
    assert "| product bfloat16 | TFLOPs 800 |" in page


def test_a_part_that_fails_keeps_its_figures_and_the_others_run(run, tmp_path):
    code, page = run(facts=script(tmp_path, TOLD + "sys.exit(7)"), exact=script(tmp_path, TOLD, "exact"))

    assert code == 1
    assert "No complete figures: it ended with the exit code 7." in page
    assert page.count("| product bfloat16 | TFLOPs 800 |") == 2


def test_a_part_whose_time_is_over_is_ended_and_keeps_its_figures(tmp_path):
    endless = script(tmp_path, TOLD + "print('begun', flush=True)\nwhile True: pass")
    process = subprocess.Popen(endless.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        assert process.stdout.readline() == b"begun\n"
        said = gpu.ended(process, gpu.ENDING_S)
        process.kill()

    assert said == "its time was over after 8 s"
    assert gpu.read(tmp_path, "facts") == [{"what": "product bfloat16", "TFLOPs": 800.0}]


def test_each_line_of_a_part_is_printed_and_kept_at_once(tmp_path, capsys):
    command = [sys.executable, "-c", "print('one'); print('two', end='')"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        gpu.copied(process, tmp_path / "facts.log")

    assert capsys.readouterr().out == (tmp_path / "facts.log").read_text() == "one\ntwo"


def test_tests_are_counted_by_their_lines_also_if_pytest_was_ended(tmp_path):
    lines = [
        "a.py::test_one PASSED [ 10%]",
        "a.py::test_two[x] FAILED [ 20%]",
        "a.py::test_three SKIPPED (why)",
    ]
    (tmp_path / "tests.log").write_text("\n".join([*lines, "a.py::test_four "]))

    assert gpu.read(tmp_path, "tests") == {"passed": 1, "failed": 1, "error": 0, "skipped": 1}
    assert gpu.counted(tmp_path / "none.log") is None


def told(part: str, *rows: dict) -> dict:
    return {part: {"title": part, "figures": list(rows), "failed": "", "left_out": "", "seconds": 1.0}}


def test_goals_are_judged_on_a_gpu_and_otherwise_not_measured():
    parts = told("facts", {"what": "product bfloat16", "TFLOPs": 800.0}) | told(
        "trainer", {"what": "ours 1.7B 2048+1024x8", "useful_TFLOPs": 200.0}
    )
    found = {"machine": {"device": "cuda", "gpu": "a card"}, "seconds": 2.0, "parts": parts}
    said = dict(zip(gpu.GOALS, (row[""] for row in gpu.goals(found)), strict=True))

    assert said["trainer"] == "missed", "a quarter of the rate is less than 35 %"
    assert [said[name] for name in ("float32", "bfloat16", "packs", "engine")] == ["not measured"] * 4
    found["machine"]["device"] = "cpu"
    assert {row[""] for row in gpu.goals(found)} == {"not measured"}
    assert "No GPU was used" in gpu.page(found)


def test_the_page_of_goals_names_each_of_them():
    page = (BENCHMARKS / "gpu.md").read_text()

    assert all(f"| {wanted} |" in page for wanted, *_ in gpu.GOALS.values())
