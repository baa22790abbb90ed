"""Classes of other trainers, read from their source, because their modules import all of a cluster."""

from __future__ import annotations

import ast
import importlib.util
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Optional

import torch
from pydantic import BaseModel, ConfigDict


def verls_output() -> Any:
    """Return verl's `AgentLoopOutput`, or None without verl."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "experimental/agent_loop/agent_loop.py"
    names = {"Any": Any, "Optional": Optional, "BaseModel": BaseModel, "ConfigDict": ConfigDict}
    return _classes(path, {"AgentLoopMetrics", "AgentLoopOutput"}, names)["AgentLoopOutput"]


def slimes_sample() -> Any:
    """Return slime's `Sample`, or None: slime is no package, so SLIME names a clone of it."""
    if not (clone := os.environ.get("SLIME")):
        return None
    names = {"Any": Any, "Enum": Enum, "dataclass": dataclass, "field": field, "torch": torch}
    return _classes(Path(clone) / "slime/utils/types.py", {"Sample"}, names)["Sample"]


def _classes(path: Path, wanted: set[str], names: dict[str, Any]) -> dict[str, Any]:
    """Execute some classes of a file, which see nothing but these names."""
    body = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in wanted
    ]
    exec(compile(ast.Module(body, []), str(path), "exec", dont_inherit=True), names)
    return names
