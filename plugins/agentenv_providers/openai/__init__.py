"""Models behind APIs that speak OpenAI's chat completions, over aiohttp alone.

The form of model strings `openai:NAME` is loaded without the client, because a run uses one or two forms.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from agentenv.core import UsageError
from agentenv.engine import LoadedModel, ModelForm, check_answers, check_options

__all__ = ["OPENAI"]


def _load(rest: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    if tokenizer is not None:
        raise UsageError("openai: models work on text and take no tokenizer", remedy="leave tokenizer out")
    engine_type = import_module("agentenv_providers.openai.engine").OpenAIChatEngine
    check_options(engine_type, f"openai:{rest}", options)
    engine = engine_type(rest, **options)
    check_answers(f"{engine.name} at {engine.address}", engine.address)
    return LoadedModel(engine, None)


OPENAI = ModelForm(_load, "openai:NAME", key="OPENAI_API_KEY")
