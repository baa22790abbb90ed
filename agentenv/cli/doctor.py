"""`agentenv doctor`: what is installed, what a template does, whether an engine keeps its promises."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
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
    model: str = typer.Option(
        "",
        "-m",
        "--model",
        help="Ask this model what it promises: any -m of eval. A path alone: look at its chat template.",
    ),
    tokenizer: str = typer.Option("", "--tokenizer", help="Directory of the tokenizer."),
    as_json: bool = JsonOption,
) -> None:
    """Say what is installed, what isolates untrusted code and what a model can do, with remedies.

    Ends with 1 if the model's engine breaks a promise.
    """
    found: dict[str, Any] = {"python": platform.python_version(), "packages": _packages()}
    if model and Path(model).exists():
        found["template"] = _template(model)
    elif model:
        found["model"], found["engine"] = _model(model, tokenizer)
    else:
        found["sandbox"] = _sandbox()
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        _show(found)
    if any(finding["ok"] is False for finding in found.get("engine", ())):
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    print(f"python {found['python']}")
    for name, version, extra in found["packages"]:
        state = version or f"not installed: pip install 'agentenv-rl[{extra}]'"
        print(f"  {'ok' if version else '- '} {name} {state}")
    if "sandbox" in found:
        print(found["sandbox"]["text"])
    for name, text in found.get("model", {}).items():
        print(f"{name}: {text}")
    for finding in found.get("engine", ()):
        print(f"  {finding['line']}")
    if "template" in found:
        print(found["template"]["text"])


def _sandbox() -> dict[str, Any]:
    from agentenv.sandbox.doctor import doctor

    found = doctor()
    return {**asdict(found), "text": found.text()}


def _packages() -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    for name, extra in PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name), extra))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "", extra))
    return found


def _template(path: str) -> dict[str, Any]:
    """Return what the template doctor finds on a model's directory or file; no engine is started."""
    from agentenv.render.doctor import doctor_report
    from agentenv.render.renderer import Renderer
    from agentenv.render.tokenizer import ChatTokenizer

    report = Renderer(ChatTokenizer.load(path)).report
    return {"text": doctor_report(path), **asdict(report)}


def _model(model: str, tokenizer: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return facts about the template, and what the engine answered to the doctor's questions."""
    import asyncio

    from agentenv.engine.doctor import examine_model
    from agentenv.engine.factory import load_engine
    from agentenv.render.renderer import Renderer

    loaded = load_engine(model, tokenizer=tokenizer or None)
    facts = {"engine": loaded.engine.name}
    if loaded.tokenizer is not None:
        report = Renderer(loaded.tokenizer).report
        facts["template"] = f"{report.verdict}, tool calls in the grammar {report.grammar}"
        facts |= {f"reason {place}": text for place, text in enumerate(report.reasons, start=1)}
        facts |= {f"warning {place}": text for place, text in enumerate(report.warnings, start=1)}
        if report.remedy:
            facts["remedy"] = report.remedy

    async def examine() -> list[dict[str, Any]]:
        try:
            findings = await examine_model(loaded)
        finally:
            await loaded.engine.close()
        return [
            {"name": each.name, "ok": each.ok, "detail": each.detail, "line": each.line()}
            for each in findings
        ]

    return facts, asyncio.run(examine())
