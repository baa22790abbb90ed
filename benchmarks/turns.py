"""Read the turns of vLLM's and llama.cpp's own tests, and count what we read otherwise.

With `--sglang`, SGLang's detectors read them too, and counted is what both of them read and we do not.

    python benchmarks/turns.py                                    # llama.cpp
    python benchmarks/turns.py --vllm .venv/vllm/bin/python       # vLLM too, in its own environment
    python benchmarks/turns.py --sglang                           # SGLang's detectors too
    python benchmarks/turns.py --sources FOLDER                   # sources that are already there

The sources are those of the packages llama-cpp-python and vllm (of the version in its environment) on the
index; they stay in `build/turns`. What differs is listed with its reason, which
`tests/field/turn_differences.json` has. The exit code is 1 if a difference has none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from agreement import llama_cpp_turns, turns

ROOT = Path(__file__).parents[1]
WANTED = re.compile(
    r"[^/]+/(?P<name>tests/(?:__init__\.py|(?:tool_parsers|parser)/.*)|examples/.*\.jinja|"
    r"vendor/llama\.cpp/(?:tests/test-chat\.cpp|models/templates/.*))"
)
"""What of a source is kept."""
TOKENIZER = ROOT / "tests" / "data" / "tokenizers" / "qwen3" / "tokenizer.json"
TESTED = ("-c", str(ROOT / "constraints.txt"))
"""Options of uv that take the versions whose differences have reasons; a new one may bring others."""


def source(requirement: str, into: Path) -> Path:
    """Return a folder with what is wanted of a package's source, which is downloaded once."""
    folder = into / re.sub(r"\W+", "-", requirement)
    if folder.exists():
        return folder
    options = [*TESTED, "--no-deps", "--no-binary", ":all:", "--format", "pylock.toml", "-q", "-"]
    command = [_uv(), "pip", "compile", *options]
    locked = subprocess.run(command, input=requirement, capture_output=True, text=True, check=True).stdout
    found = re.search(r'sdist = \{ url = "([^"]+)".*?sha256 = "(\w+)"', locked)
    if found is None:
        raise SystemExit(f"{requirement} has no source on the index")
    with urllib.request.urlopen(found[1]) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != found[2]:
        raise SystemExit(f"the source of {requirement} is not the one that the index names")
    archive = into / "source.tar.gz"
    into.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(data)
    with tarfile.open(archive) as files:
        for member in files:
            if member.isfile() and (match := WANTED.fullmatch(member.name)):
                member.name = match["name"]
                files.extract(member, folder, filter="data")
    archive.unlink()
    return folder


def _uv() -> str:
    own = Path(sys.executable).with_name("uv")
    return str(own) if own.exists() else "uv"


def of_vllm(python: str, tests: Path) -> list[Mapping[str, Any]]:
    """Run vLLM's tests in its own environment, and return what they showed its parsers."""
    record = tests / "turns.json"
    (tests / "pytest.ini").write_text("[pytest]\n")  # or our own options would hold
    plugins = str(ROOT / "tests" / "agreement")
    env = {
        **os.environ,
        "TURNS_RECORD": str(record),
        "TURNS_TOKENIZER": str(TOKENIZER),
        "PYTHONPATH": os.pathsep.join((str(tests), plugins)),
        "HF_HUB_OFFLINE": "1",
    }
    options = ["-q", "-p", "vllm_turns", "-p", "no:cacheprovider", "--tb=no", "--no-summary"]
    options.append("--continue-on-collection-errors")
    folders = ["tests/tool_parsers", "tests/parser"]
    # Tests of streams that fail with another vocabulary have nothing that is recorded here.
    subprocess.run(
        [python, "-m", "pytest", *options, "--confcutdir=tests", *folders], cwd=tests, env=env, check=False
    )
    return json.loads(record.read_text(encoding="utf-8"))


def of_sglang(into: Path, rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that a detector of SGLang's package reads, with the calls that it read."""
    folder, given, read = (into / name for name in ("sglang", "rows.json", "read.json"))
    into.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        options = [*TESTED, "-q", "--no-deps", "--python", sys.executable, "--target", str(folder)]
        subprocess.run([_uv(), "pip", "install", *options, "sglang"], check=True)
    given.write_text(json.dumps(rows), encoding="utf-8")
    script = ROOT / "tests" / "agreement" / "sglang_turns.py"
    subprocess.run([sys.executable, str(script), str(folder), str(given), str(read)], check=True)
    return json.loads(read.read_text(encoding="utf-8"))


def version_of(python: str) -> str:
    """Return the version of vLLM in an environment."""
    asked = "import vllm; print(vllm.__version__.partition('+')[0])"
    said = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout
    return said.split()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter with vLLM and pytest")
    parser.add_argument("--sglang", action="store_true", help="read all of them with SGLang's detectors, too")
    parser.add_argument("--sources", type=Path, default=ROOT / "build" / "turns")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    llama_cpp = source("llama-cpp-python", options.sources) / "vendor" / "llama.cpp"
    folders = [llama_cpp / "models" / "templates"]
    recorded = {"llama.cpp": list(llama_cpp_turns.recorded(llama_cpp))}
    if options.vllm:
        vllm = source(f"vllm=={version_of(options.vllm)}", options.sources)
        folders.append(vllm / "examples")
        recorded["vLLM"] = of_vllm(options.vllm, vllm)
    if options.sglang:
        recorded["SGLang"] = of_sglang(options.sources, [row for rows in recorded.values() for row in rows])
    figures: dict[str, Any] = {}
    unexplained: list[str] = []
    for name, rows in recorded.items():
        result = turns.compare(rows, folders)
        print(*result.differ, sep="\n")
        left_out = ", ".join(f"{family} {count}" for family, count in sorted(result.left_out.items()))
        print(f"{name}: {len(result.differ)} of {result.equal + len(result.differ)} turns are read otherwise")
        print(f"{name}: left out, for no template here plays them in their format: {left_out or 'none'}")
        if result.alone:
            print(f"{name}: {result.alone} more turns it reads otherwise than the tests expect")
        figures[name] = {"equal": result.equal, "differ": len(result.differ)}
        unexplained += result.unexplained
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")
    print(*unexplained, sep="\n", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
