"""`agentenv doctor`: show what is installed, examine a template or an engine, and verify stored runs."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from agentenv.cli.answer import print_json
from agentenv.cli.options import JsonOption, RunsDirOption, SettingsOption
from agentenv.core.installed import install_line
from agentenv.core.settings import Section, parse_pairs, read_settings

__all__ = ["run"]


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


def run(
    run: str = typer.Argument("", metavar="RUN", help="Verify the episodes of this run instead."),
    model: str = typer.Option(
        "",
        "-m",
        "--model",
        help="Examine this model's engine (any -m of eval); for a plain path, its chat template. "
        "With RUN: recompute the log-probabilities with this model.",
    ),
    tokenizer: str = typer.Option("", "--tokenizer", help="Directory of the tokenizer."),
    drift: str = typer.Option(
        "ignore",
        "--drift",
        help="With RUN: whether tokens that a full render would not have are wrong (strict), only shown "
        "(ignore) or not looked for (off).",
    ),
    weights_version: int | None = typer.Option(
        None,
        "--weights-version",
        help="With RUN and -m: the version of the weights that the model has; 0 for a training run.",
    ),
    settings: list[str] = SettingsOption,
    runs_dir: str = RunsDirOption,
    as_json: bool = JsonOption,
) -> None:
    """Show what is installed, what isolates untrusted code and what a model can do, with remedies.

    `-m openai:NAME -o engine.base_url=...` asks a chat API a list of short requests, and says what the engine
    does about each that it cannot answer.

    With RUN, verify that its tokens, messages, rewards and log-probabilities agree. The exit code is 1 if a
    check of the model's engine fails, if its chat template is refused, or if parts of the run disagree.
    """
    if run:
        from agentenv.cli.doctor_run import verify

        agrees = verify(
            run,
            runs_dir,
            model=model,
            tokenizer=tokenizer,
            drift=drift,
            weights_version=weights_version,
            as_json=as_json,
        )
        raise typer.Exit(0 if agrees else 1)
    facts: dict[str, Any] = {"python": platform.python_version(), "packages": _packages()}
    if model and Path(model).exists():
        facts["template"] = _template(model)
    elif model:
        facts["model"], facts["engine"] = _model(model, tokenizer, settings or [])
    else:
        facts["sandbox"] = _sandbox()
    if as_json:
        print_json(facts)
    else:
        _show(facts)
    refused = facts.get("template", {}).get("verdict") == "refused"
    if refused or any(finding["ok"] is False for finding in facts.get("engine", ())):
        raise typer.Exit(1)


def _show(facts: dict[str, Any]) -> None:
    print(f"python {facts['python']}")
    for name, version, extra in facts["packages"]:
        state = version or f"not installed: {install_line(extra)}"
        print(f"  {'ok' if version else '- '} {name} {state}")
    if "sandbox" in facts:
        print(facts["sandbox"]["text"])
    for name, text in facts.get("model", {}).items():
        print(f"{name}: {text}")
    for finding in facts.get("engine", ()):
        print(f"  {finding['line']}")
    if "template" in facts:
        print(facts["template"]["text"])


def _sandbox() -> dict[str, Any]:
    from agentenv.sandbox.isolation import doctor

    report = doctor()
    return {**asdict(report), "text": report.text()}


def _packages() -> list[tuple[str, str, str]]:
    packages: list[tuple[str, str, str]] = []
    for name, extra in PACKAGES:
        try:
            packages.append((name, importlib.metadata.version(name), extra))
        except importlib.metadata.PackageNotFoundError:
            packages.append((name, "", extra))
    return packages


def _template(path: str) -> dict[str, Any]:
    """Return the template doctor's report on a model's directory or file, without starting an engine."""
    from agentenv.cli.proof import proved
    from agentenv.render.diagnosis import doctor_report
    from agentenv.render.renderer import Renderer
    from agentenv.render.tokenizer import ChatTokenizer

    renderer = Renderer(ChatTokenizer.load(path))
    turns = dict(proved(renderer)) if renderer.report.verdict != "refused" else {}
    lines = [
        f"  lost           {what}: {why}" if why else f"  read back      {what}"
        for what, why in turns.items()
    ]
    ids = "printed" if renderer.report.prints_ids else "not printed, so clients may renumber them"
    text = "\n".join([doctor_report(path), f"  call ids       {ids}", *lines])
    return {"text": text, **asdict(renderer.report), "turns": turns}


def _model(model: str, tokenizer: str, settings: list[str]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return facts about the chat template, and the findings of the engine's checks."""
    import asyncio

    from agentenv.engine.examination import examine_model
    from agentenv.engine.factory import load_engine
    from agentenv.render.renderer import Renderer

    options = read_settings([parse_pairs(settings)], {"engine": Section()})["engine"]
    if model.startswith("openai:"):
        options.setdefault("retry_s", 20.0)  # an address where nothing answers is told soon
    loaded = load_engine(model, tokenizer=tokenizer or None, **options)
    facts = {"engine": loaded.engine.name}
    if loaded.tokenizer is not None:
        report = Renderer(loaded.tokenizer).report
        facts["template"] = f"{report.verdict}, tool calls in the grammar {report.grammar}"
        facts |= {f"reason {number}": text for number, text in enumerate(report.reasons, start=1)}
        facts |= {f"warning {number}": text for number, text in enumerate(report.warnings, start=1)}
        if report.remedy:
            facts["remedy"] = report.remedy

    async def examine() -> list[dict[str, Any]]:
        try:
            findings = await examine_model(loaded)
        finally:
            await loaded.engine.close()
        width = max(12, *(len(each.name) + 2 for each in findings))
        return [{**asdict(each), "line": each.line(width)} for each in findings]

    return facts, asyncio.run(examine())
