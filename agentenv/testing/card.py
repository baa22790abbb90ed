"""An environment's card: one HTML file that says what it is, for any static host; it needs no script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import metadata
from typing import Any

from agentenv.core.episode_env import Context
from agentenv.core.messages import text_of
from agentenv.core.visible import visible
from agentenv.envs.registry import registry
from agentenv.envs.spec import EnvSpec
from agentenv.runs.stats import clustered_mean
from agentenv.runs.store.reader import Run
from agentenv.testing.checker import CheckReport

__all__ = ["card_of"]

_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 22%, transparent) }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .9rem .25rem 0; text-align: left }
pre { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; white-space: pre-wrap }
pre, td { overflow-wrap: anywhere }
"""


async def card_of(entry: EnvSpec, report: CheckReport, runs: Iterable[Run] = ()) -> str:
    """Return the card of an environment as HTML.

    Args:
        entry: the environment.
        report: what `check_env` found.
        runs: runs whose evaluations of this environment the card lists.
    """
    env = entry.make()
    package = _package_of(entry.id)
    facts = [
        ("package", package and f"{package['name']} {package['version']}"),
        ("licence", package and (package.get("license_expression") or package.get("license"))),
        ("splits", ", ".join(_splits(entry))),
        ("turns", None if entry.max_turns is None else f"at most {entry.max_turns}"),
        ("full marks", f"{env.full_marks:g}"),
        ("oracle", "solves a task by itself" if entry.oracle else None),
        ("check", report.summary),
    ]
    parts = [
        f"<h1>{_text(entry.id)}</h1>",
        f"<p>{_text(entry.description)}</p>",
        _table((), [(name, value or "not stated") for name, value in facts]),
        "<h2>Scores</h2>",
        _table(("model", "split", "episodes", "mean reward", "95 %", "run"), _scores(entry, runs))
        or "<p>None was measured yet.</p>",
        "<h2>What the model sees first</h2>",
    ]
    task = next(iter(entry.task_set()))
    reset = await env.begin(task.data, seed=0, context=Context())
    parts += [f"<h3>{_text(one['role'])}</h3><pre>{_text(text_of(one))}</pre>" for one in reset.messages]
    await env.shutdown()
    if env.tool_schemas:
        parts.append("<h2>Tools</h2>")
    parts += [f"<pre>{_text(json.dumps(schema['function'], indent=2))}</pre>" for schema in env.tool_schemas]
    parts += ["<h2>Check</h2>", f"<pre>{_text(str(report))}</pre>"]
    csp = "default-src 'none'; style-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{csp}">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{_text(entry.id)}</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _text(value: object) -> str:
    return escape("\n".join(map(visible, str(value).split("\n"))))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    top = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(f"<tr>{line}</tr>" for line in ([top] if top else []) + lines)
    return f"<table>{body}</table>" if lines else ""


def _package_of(env_id: str) -> dict[str, Any] | None:
    """Return what the installed package says of itself that brings an environment."""
    point = next((row for row in registry.listing() if row.name == env_id), None)
    if point is None or point.origin == "registered":
        return None
    return metadata.metadata(point.origin).json


def _splits(entry: EnvSpec) -> list[str]:
    tasks = entry.task_set()
    parts = {name: tasks.split(name) for name in tasks.splits}
    return [f"{name} ({'endless' if part.endless else part.num_tasks})" for name, part in parts.items()]


def _scores(entry: EnvSpec, runs: Iterable[Run]) -> list[tuple[object, ...]]:
    """Return a row for each finished evaluation of the environment alone, the newest first."""
    rows: list[tuple[object, ...]] = []
    for run in runs:
        if run.info.kind != "eval" or run.info.env_ids != (entry.id,) or not run.info.closed:
            continue
        by_task: dict[str, list[float]] = {}
        for episode in run.summaries:
            if episode.scored and episode.reward is not None:
                by_task.setdefault(episode.task_id, []).append(episode.reward)
        if not by_task:
            continue
        mean, count = clustered_mean(by_task), sum(map(len, by_task.values()))
        split, interval = run.info.config.get("split") or "-", f"{mean.low:.3f} to {mean.high:.3f}"
        rows.append((run.info.model, split, count, f"{mean.mean:.3f}", interval, run.id))
    return rows
