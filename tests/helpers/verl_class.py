"""verl's own class for a sample."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any, Optional

from pydantic import BaseModel, ConfigDict


def verls_own_class() -> Any:
    """Return verl's `AgentLoopOutput`; read from its source, because its module imports all of a cluster."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "experimental/agent_loop/agent_loop.py"
    wanted = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in {"AgentLoopMetrics", "AgentLoopOutput"}
    ]
    names = {"Any": Any, "Optional": Optional, "BaseModel": BaseModel, "ConfigDict": ConfigDict}
    code = compile(ast.Module(wanted, []), str(path), "exec", dont_inherit=True)
    exec(code, names)
    return names["AgentLoopOutput"]
