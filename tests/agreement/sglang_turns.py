"""Read turns with the detectors of calls in SGLang's package, of which nothing else is needed or loaded.

    python sglang_turns.py FOLDER ROWS OUT    # FOLDER has the package; ROWS and OUT are JSON

What the detectors import for servers alone is left empty. OUT has the rows of families that have a detector,
with the names and arguments that it read as `sglang`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import logging
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

DETECTORS = {
    "ApertusToolParser": "apertus2509",
    "DeepSeekV31ToolParser": "deepseekv31",
    "DeepSeekV32EngineToolParser": "deepseekv32",
    "DeepSeekV3ToolParser": "deepseekv3",
    "DeepSeekV4EngineToolParser": "deepseekv4",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm47",
    "Gemma4EngineToolParser": "gemma4",
    "GigaChat3-10B-A1.8B": "gigachat3",
    "GigaChat3ToolParser": "gigachat3",
    "Glm47MoeModelToolParser": "glm45",
    "Hermes2ProToolParser": "hermes",
    "HunyuanA13BToolParser": "hunyuan",
    "Internlm2ToolParser": "interns1",
    "Kimi-K3": "kimi_k3",
    "KimiK2ToolParser": "kimi_k2",
    "LFM2.5-8B-A1B": "lfm2",
    "Lfm2ToolParser": "lfm2",
    "Llama3JsonToolParser": "llama3",
    "Llama4PythonicToolParser": "pythonic",
    "MiniCPM5XMLToolParser": "minicpm5",
    "MiniMax-M2": "minimax-m2",
    "MiniMax-M3": "minimax-m3",
    "MinimaxM2ToolParser": "minimax-m2",
    "MinimaxM3ToolParser": "minimax-m3",
    "MistralToolParser": "mistral",
    "PoolsideV1ToolParser": "poolside_v1",
    "PythonicToolParser": "pythonic",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "Qwen3EngineToolParser": "qwen3_coder",
    "Spark2.5": "spark25",
    "Step3p5ToolParser": "step3p5",
    "StepFun3.5-Flash": "step3p5",
    "deepseek-ai-DeepSeek-V3.1": "deepseekv31",
    "deepseek-ai-DeepSeek-V3.2": "deepseekv32",
    "deepseek-ai-DeepSeek-V4": "deepseekv4",
    "deepseek_v32": "deepseekv32",
    "deepseek_v4": "deepseekv4",
    "gemma4": "gemma4",
    "glm47_moe": "glm47",
    "google-gemma-4-31B-it": "gemma4",
    "inclusionai-ling-3.0-flash": "ling3",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax-m2",
    "minimax_m3": "minimax-m3",
    "muse-glimmer": "muse",
    "nemotron_v3": "qwen3_coder",
    "openai-gpt-oss-120b": "gpt-oss",
    "openbmb-MiniCPM5-1B": "minicpm5",
    "poolside-Laguna-S-2.1": "poolside_v1",
    "qwen3": "qwen3_coder",
    "step3p5": "step3p5",
}
"""The detector for each family of the recorded turns."""
_OWN = "sglang.srt.function_call"


class _Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each one that is not there, and for SGLang's own but its detectors."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if name.startswith(_OWN) or (top != "sglang" and importlib.machinery.PathFinder.find_spec(top)):
            return None
        found = top in sys.builtin_module_names or top in sys.stdlib_module_names
        return None if found else importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(__path__=[], __name__=spec.name, __spec__=spec, __file__="")

    def exec_module(self, module: Any) -> None:
        pass


def main(folder: str, rows: str, out: str) -> None:
    sys.path.insert(0, folder)
    for name in ("sglang", "sglang.srt"):
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
    sys.meta_path.insert(0, _Nothing())
    logging.disable()
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    read: list[Any] = []
    for row in json.loads(Path(rows).read_text(encoding="utf-8")):
        if row["family"] in DETECTORS:
            functions = [SimpleNamespace(description="", strict=False, **tool) for tool in row["tools"]]
            tools = [SimpleNamespace(type="function", function=function) for function in functions]
            detector = FunctionCallParser.ToolCallParserEnum[DETECTORS[row["family"]]]()
            calls = detector.detect_and_parse(row["text"], tools).calls
            read.append({**row, "sglang": [[call.name, call.parameters] for call in calls]})
    Path(out).write_text(json.dumps(read), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
