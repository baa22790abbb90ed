"""The transformers engine, which runs one model in this process and decodes many rows at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.core.transformers_internals import attention_of as attention_of
    from agentenv.engine.hf.adapters import base_model as base_model
    from agentenv.engine.hf.attention import apply_soft_cap as apply_soft_cap
    from agentenv.engine.hf.engine import TransformersEngine as TransformersEngine
    from agentenv.engine.hf.load import ModelFiles as ModelFiles
    from agentenv.engine.hf.load import directory_of as directory_of
    from agentenv.engine.hf.load import load_model as load_model
    from agentenv.engine.hf.load import locate as locate

__all__ = door(__name__)
