"""Engines that sample on vLLM servers, which run already or are started here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.engine.vllm.connect import connect as connect
    from agentenv.engine.vllm.launch import ServeOptions as ServeOptions
    from agentenv.engine.vllm.launch import running_server as running_server
    from agentenv.engine.vllm.launch import serve as serve
    from agentenv.engine.vllm.own import OwnServerEngine as OwnServerEngine
    from agentenv.engine.vllm.own import start_server as start_server
    from agentenv.engine.vllm.pool import ServerPool as ServerPool
    from agentenv.engine.vllm.probe import ServerReport as ServerReport
    from agentenv.engine.vllm.probe import probe as probe
    from agentenv.engine.vllm.server import VLLMServerEngine as VLLMServerEngine

__all__ = door(__name__)
