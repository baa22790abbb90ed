"""`agentenv list`: list the installed environments and tools without importing them."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import typer

from agentenv.cli.answer import print_json
from agentenv.cli.options import JsonOption

__all__ = ["run"]


def run(
    words: list[str] = typer.Argument(None, metavar="WORD...", help="Show only what contains these words."),
    load: bool = typer.Option(
        False, "--load", help="Import each environment and tool to show its description, or its error."
    ),
    worlds: bool = typer.Option(
        False, "--worlds", help="Show the worlds alone, with tasks, oracle, licence, time and what is broken."
    ),
    models: bool = typer.Option(
        False, "--models", help="Show the forms of model strings alone, with the key that each wants."
    ),
    as_json: bool = JsonOption,
) -> None:
    """List the environments and tools that are installed, and the libraries whose environments have names.

    The exit code is 1 if --load finds an environment or a tool that cannot be loaded.
    """
    from agentenv.envs.registry import registry
    from agentenv.tools.registry import tool_registry

    if worlds:
        _show_worlds(words or [], as_json=as_json)
        return
    if models:
        _show_models(words or [], as_json=as_json)
        return
    rows = [
        {
            "id": entry.name,
            "origin": entry.origin,
            "description": entry.item.description if entry.item else "",
            "tasks": _num_tasks(entry.item) if load and entry.item else None,
            "error": entry.error,
            "needs": entry.needs,
        }
        for entry in registry.listing(load=load)
    ]
    tools = [
        {
            "name": entry.name,
            "target": entry.target,
            "origin": entry.origin,
            "description": entry.item.description if entry.item else "",
            "error": entry.error,
        }
        for entry in tool_registry.listing(load=load)
    ]
    peers = _worlds(words or [])
    rows = [row for row in rows if all(word.lower() in str(row).lower() for word in words or [])]
    tools = [tool for tool in tools if all(word.lower() in str(tool).lower() for word in words or [])]
    _print(rows, peers, tools, words, as_json=as_json)
    if any(row["error"] for row in [*rows, *peers, *tools]):
        raise typer.Exit(1)


def _worlds(words: list[str]) -> list[dict[str, Any]]:
    """Return a row for each world that contains all words."""
    from agentenv.envs.worlds import world_registry

    rows = [
        {
            "name": f"{entry.name}:{entry.item.form if entry.item else '...'}",
            "origin": entry.origin,
            "description": entry.item.description if entry.item else "",
            "error": entry.error,
            "needs": entry.item.install if entry.item and entry.item.missing else "",
            "facts": asdict(entry.item.facts) if entry.item and entry.item.facts else {},
        }
        for entry in world_registry.listing(load=True)
    ]
    return [row for row in rows if all(word.lower() in str(row).lower() for word in words)]


def _show_worlds(words: list[str], *, as_json: bool) -> None:
    """Print what is known of each world."""
    rows = _worlds(words)
    if as_json:
        print_json({"worlds": rows})
    else:
        for row in rows:
            print(f"{row['name']}  {row['description']}")
            state = row["error"] or (f"not installed: {row['needs']}" if row["needs"] else "installed")
            for name, value in {"state": state, **row["facts"]}.items():
                if value:
                    print(f"  {name:<8} {value}")
    if any(row["error"] for row in rows):
        raise typer.Exit(1)


def _show_models(words: list[str], *, as_json: bool) -> None:
    """Print the forms of model strings, and whether the keys that they want are set."""
    from agentenv.engine.forms import engine_registry

    rows = [
        {
            "form": entry.item.form if entry.item else f"{entry.name}:...",
            "origin": entry.origin,
            "key": (key := entry.item.key if entry.item else ""),
            "set": bool(os.environ.get(key)),
            "needs": entry.needs,
            "error": entry.error,
        }
        for entry in engine_registry.listing(load=True)
    ]
    rows = [row for row in rows if all(word.lower() in str(row).lower() for word in words)]
    if as_json:
        print_json({"models": rows})
        return
    width = max((len(str(row["form"])) for row in rows), default=0)
    for row in rows:
        key = f"{row['key']} is {'set' if row['set'] else 'not set'}" if row["key"] else "no key"
        print(f"  {row['form']:<{width}}  {row['error'] or key}{_needs(row)}".rstrip())


def _print(
    rows: list[dict[str, Any]],
    peers: list[dict[str, Any]],
    tools: list[dict[str, str]],
    words: list[str],
    *,
    as_json: bool,
) -> None:
    if as_json:
        print_json({"environments": rows, "libraries": peers, "tools": tools})
        return
    width = max((len(str(row["id"])) for row in rows), default=0)
    print(f"environments ({len(rows)})")
    for row in rows:
        size = "" if row["tasks"] is None else f" · {row['tasks']} tasks"
        text = f"cannot be loaded: {row['error']}" if row["error"] else f"{row['description']}{size}"
        print(f"  {row['id']:<{width}}  {text or row['origin']}{_needs(row)}".rstrip())
    print(f"environments of other libraries, by name ({len(peers)})")
    for peer in peers:
        text = f"cannot be loaded: {peer['error']}" if peer["error"] else peer["description"]
        print(f"  {peer['name']:<{width}}  {text}{_needs(peer)}")
    print(f"tools ({len(tools)})")
    for tool in tools:
        text = (
            f"cannot be loaded: {tool['error']}" if tool["error"] else tool["description"].partition("\n")[0]
        )
        print(f"  {tool['name']:<{width}}  {text or tool['target']}")
    if not rows and not peers and not tools and words:
        print("no installed environment or tool contains these words; agentenv list shows all")
    elif not rows and not words:
        print("nothing is installed; write an environment in a file and run: agentenv eval path/to/file.py")


def _needs(row: dict[str, Any]) -> str:
    return f" (needs {row['needs']})" if row["needs"] else ""


def _num_tasks(spec: object) -> str:
    from agentenv.envs.registry import EnvSpec

    if not isinstance(spec, EnvSpec):
        return "?"
    try:
        tasks = spec.task_set()
        return "endless" if tasks.endless else str(len(tasks))
    except Exception as error:  # noqa: BLE001 - a list shows what is broken instead of breaking
        return f"? ({type(error).__name__})"
