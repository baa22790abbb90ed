"""`agentenv doctor`: what is installed, what a model's template does, and what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from typing import Any

import typer

from agentenv.cli.options import JsonOption

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

PACKAGES = (
    ("pydantic", ""),
    ("gymnasium", ""),
    ("tokenizers", ""),
    ("torch", "train"),
    ("transformers", "train"),
    ("peft", "train"),
    ("vllm", "vllm"),
    ("pyarrow", "parquet"),
    ("e2b-code-interpreter", "e2b"),
    ("mcp", "mcp"),
    ("trackio", "track"),
)


@app.command()
def run(
    model: str = typer.Option("", "-m", "--model", help="Look at this model's server and template."),
    tokenizer: str = typer.Option("", "--tokenizer", help="Directory of the tokenizer."),
    as_json: bool = JsonOption,
) -> None:
    """Say what is installed and what a model can do here, with the remedy for what cannot."""
    found: dict[str, Any] = {"python": platform.python_version(), "packages": _packages()}
    if model:
        found["model"] = _model(model, tokenizer)
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    print(f"python {found['python']}")
    for name, version, extra in found["packages"]:
        state = version or f"not installed: pip install 'agentenv-rl[{extra}]'"
        print(f"  {'ok' if version else '- '} {name} {state}")
    for name, text in found.get("model", {}).items():
        print(f"  {name}: {text}")
    print("  isolation for untrusted code: agentenv sandbox")


def _packages() -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    for name, extra in PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name), extra))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "", extra))
    return found


def _model(model: str, tokenizer: str) -> dict[str, str]:
    import asyncio

    from agentenv.engine import load_engine
    from agentenv.render import Renderer

    loaded = load_engine(model, tokenizer=tokenizer or None)
    facts = {"engine": f"{loaded.engine.name} answers to its name"}
    if loaded.tokenizer is None:
        facts["tokens"] = "none: it speaks text only, so it can be evaluated and not trained"
    else:
        report = Renderer(loaded.tokenizer).report
        facts["template"] = f"{report.verdict}, tool calls in the grammar {report.grammar}"
        facts |= {f"reason {place}": text for place, text in enumerate(report.reasons, start=1)}
        facts |= {f"warning {place}": text for place, text in enumerate(report.warnings, start=1)}
        if report.remedy:
            facts["remedy"] = report.remedy
    asyncio.run(loaded.engine.close())
    return facts
