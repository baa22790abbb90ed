"""Test and measure agentenv on one GPU in at most ten minutes, and write one JSON file and one page.

    python benchmarks/gpu.py [--into build/gpu]         # as `make gpu` does
    python benchmarks/gpu.py --device cpu --quick       # tries the same parts without a GPU, in small

The parts run one after another: the tests marked `gpu`; attention over packs by flex attention and under a
mask of all pairs; layers of an 8B model at 32k tokens; a trainer step against a plain padded one and TRL's;
vLLM through agentenv against vLLM alone; a whole GRPO step with vLLM; and full weights brought to a server
through a directory and over connections. A part that fails, lacks a package or runs out of time says so on
the page, and the others run all the same.

The exit code is 0 if every part has its figures, 1 if one has none, and 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
NO_GPU = 3
"""Exit code without a GPU."""
SMALL = "smollm2"


@dataclass(frozen=True)
class Part:
    """Something to run, as a process of its own."""

    title: str
    command: list[str]
    needs: tuple[str, ...] = ()
    """Packages without which it has no figures."""
    environment: Mapping[str, str] = field(default_factory=dict)


def parts(options: argparse.Namespace) -> dict[str, Part]:
    """Return the parts by the name of their file of figures."""
    cpu, quick = options.device == "cpu", ["--quick"] * options.quick
    threads = ["--threads", str(min(16, os.cpu_count() or 1))]

    def script(name: str, *words: str) -> list[str]:
        target = str(options.into / f"{name}.json")
        return [sys.executable, str(HERE / f"{name}.py"), *words, "--json", target]

    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "--timeout",
        "240",
    ]
    cells = ["--cells", "tiny", *([] if options.quick else ["bf16", "bf16-long"])]
    shared = "0.2" if cpu else "0.4"
    model = str(options.into / "model") if options.model == SMALL else options.model
    return {
        "tests": Part(
            "Tests marked gpu",
            [*tests, str(HERE.parent / "tests"), f"--junitxml={options.into / 'tests.xml'}"],
            ("pytest",),
            {"AGENTENV_TEST_DEVICE": options.device},
        ),
        "packs": Part(
            "Attention over packs: flex attention, a mask of all pairs, padded rows",
            script("packs", "--device", options.device, *quick),
            ("torch", "transformers"),
        ),
        "large": Part(
            "Layers of the shape of Qwen3-8B at 8k and 32k: plain, offloaded, sharded by one process",
            script("large", "--device", options.device, *quick),
            ("torch", "transformers"),
        ),
        "trainer": Part(
            "A trainer step: ours, plain padded, TRL",
            script("trainer", "--device", options.device, *threads, *quick, *cells),
            ("torch", "transformers"),
        ),
        "grpo_step": Part(
            "A whole GRPO step: with vLLM, with the transformers engine, TRL",
            script("grpo_step", "--model", model, "--vllm-share", shared, *threads, *quick),
            ("torch", "transformers", "vllm"),
        ),
        "own_server": Part(
            "Tokens a second: vLLM through agentenv, and vLLM alone",
            script("own_server", "--model", model, "--share", shared, *quick),
            ("vllm",),
        ),
        "weights": Part(
            "Full weights to a server: through a directory and over connections",
            script("weights", "--serve", model, "--share", shared, "--ways", "disk", "gloo", "nccl"),
            ("vllm",),
        ),
    }


def write_model(target: Path, dtype: str) -> None:
    """Write the packaged small model as a plain directory, because vLLM reads no .gguf file of this kind."""
    from transformers import AutoTokenizer

    from agentenv.engine.hf import load_model, locate

    files = locate(SMALL)
    load_model(files, dtype=dtype, device="cpu").save_pretrained(target)
    AutoTokenizer.from_pretrained(files.path, gguf_file=files.gguf_file).save_pretrained(target)


def lacking(part: Part) -> str:
    """Return why a part cannot run here; empty if it can."""
    missing = [name for name in part.needs if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def run(name: str, part: Part, into: Path, left_s: float) -> dict[str, Any]:
    """Run a part and return what came of it."""
    began = time.perf_counter()
    reason = lacking(part) or ("" if left_s > 0 else "no time was left for it")
    if reason:
        return {"title": part.title, "failed": reason, "seconds": 0.0, "figures": None}
    print(f"\n== {name}: {part.title}", flush=True)
    log = into / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **part.environment},
            start_new_session=True,
        )
        try:
            failed = ended(process, left_s)
        finally:  # nothing of a part outlives this process, whatever ends it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    print(log.read_text(errors="replace")[-2000:], flush=True)
    figures = read(into, name)
    if not failed and figures is None:
        failed = "it wrote no figures"
    seconds = time.perf_counter() - began
    return {"title": part.title, "failed": failed, "seconds": round(seconds, 1), "figures": figures}


def ended(process: subprocess.Popen[bytes], left_s: float) -> str:
    """Wait for a process, and end it and its children when the time is over; return why it failed."""
    try:
        code = process.wait(left_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return f"the time was over after {left_s:.0f} s"
    return f"it ended with the exit code {code}" if code else ""


def read(into: Path, name: str) -> Any:
    """Return the figures that a part wrote; None if there are none."""
    if name == "tests":
        return counted(into / "tests.xml")
    file = into / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def counted(file: Path) -> dict[str, int] | None:
    """Return how many tests passed, failed and were skipped; None if none ran."""
    if not file.exists():
        return None
    suites = ElementTree.parse(file).getroot().iter("testsuite")
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for key in total:
            total[key] += int(suite.get(key, 0))
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    return {"passed": passed, "failed": failed, "skipped": total["skipped"]} if total["tests"] else None


def machine(device: str) -> dict[str, Any]:
    """Return what the figures depend on."""
    found: dict[str, Any] = {"device": device, "python": platform.python_version()}
    for name in ("torch", "transformers", "vllm", "trl", "flash-attn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if device == "cuda":
        import torch

        one = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": one.name,
            "gpus": torch.cuda.device_count(),
            "GB": round(one.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
        }
    return found


def page(found: Mapping[str, Any]) -> str:
    """Return the results as a page of Markdown."""
    facts = ", ".join(f"{name} {value}" for name, value in found["machine"].items() if value is not None)
    lines = ["# agentenv on a GPU", "", f"{facts}; {found['seconds']:.0f} seconds in all.", ""]
    if found["machine"]["device"] == "cpu":
        lines += ["No GPU was used: these figures only show that the parts run.", ""]
    for name, part in found["parts"].items():
        lines += [f"## {part['title']}", "", f"`{name}`, {part['seconds']:.0f} s", ""]
        if part["failed"]:
            lines += [f"No complete figures: {part['failed']}.", ""]
        if part["figures"] is not None:
            lines += [*table(part["figures"]), ""]
    return "\n".join(lines)


def table(figures: Any) -> list[str]:
    """Return figures as a table: a row for each record, or for each name."""
    if isinstance(figures, Mapping):
        nested = all(isinstance(value, Mapping) for value in figures.values())
        rows = [
            {"": name, **value} if nested else {"": name, "value": value} for name, value in figures.items()
        ]
    else:
        rows = list(figures)
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return lines + [f"| {' | '.join(cell(row.get(name)) for name in names)} |" for row in rows]


def cell(value: Any) -> str:
    """Return a value as the text of a cell."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(cell, value))
    return "" if value is None else str(value).replace("|", "/")


def usable(device: str) -> bool:
    """Return whether the device is there."""
    if device == "cpu":
        return True
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def main(given: Sequence[str] | None = None) -> int:
    """Run the parts and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="small shapes and few repeats")
    parser.add_argument("--into", type=Path, default=Path("build/gpu"), help="folder of the results")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these parts only")
    parser.add_argument("--model", default=SMALL, help="a directory, or smollm2")
    parser.add_argument("--minutes", type=float, default=10.0, help="most minutes of all parts together")
    options = parser.parse_args(given)
    if not usable(options.device):
        print(
            "There is no GPU here that torch can use, so nothing was tested or measured. On a machine with "
            "one, .ci/gpu-wheels brings what is missing. `--device cpu --quick` tries the parts without one.",
            file=sys.stderr,
        )
        return NO_GPU
    options.into.mkdir(parents=True, exist_ok=True)
    chosen = {name: part for name, part in parts(options).items() if name in (options.only or parts(options))}
    for name in options.only or ():
        if name not in chosen:
            parser.error(f"no part {name!r}; the parts are {', '.join(parts(options))}")
    began = time.perf_counter()
    written = options.into / "model"
    needed = any(str(written) in part.command and not lacking(part) for part in chosen.values())
    if needed and not (written / "config.json").exists():
        write_model(written, "float32" if options.device == "cpu" else "bfloat16")
    found: dict[str, Any] = {"machine": machine(options.device), "seconds": 0.0, "parts": {}}
    for name, part in chosen.items():
        for old in (options.into / f"{name}.json", options.into / f"{name}.xml"):
            old.unlink(missing_ok=True)
        left_s = 60 * options.minutes - (time.perf_counter() - began)
        found["parts"][name] = run(name, part, options.into, left_s)
        found["seconds"] = round(time.perf_counter() - began, 1)
        # Written after each part, so that a machine that is taken away leaves what was measured.
        (options.into / "gpu.json").write_text(json.dumps(found, indent=2) + "\n")
        (options.into / "gpu.md").write_text(page(found))
    print(f"\nthe figures are in {options.into / 'gpu.json'}, the page is {options.into / 'gpu.md'}")
    failed = {name: part["failed"] for name, part in found["parts"].items() if part["failed"]}
    for name, reason in failed.items():
        print(f"{name}: {reason}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
