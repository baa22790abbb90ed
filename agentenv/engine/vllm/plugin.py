"""The plug-in that vLLM loads in each of its processes, so that a server can receive a trainer's weights."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

__all__ = ["BACKEND", "register"]

BACKEND = "agentenv"
"""Name under which vLLM knows the receiving side (`--weight-transfer-config`)."""


def register() -> None:
    """Tell vLLM of the receiving side, which is imported only if a server is started to use it."""
    try:
        factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    except (ImportError, AttributeError):  # a vLLM from before weights could be transferred
        return
    with suppress(ValueError):  # it is registered already
        factory.register_engine(BACKEND, "agentenv.engine.vllm.receiver", "Receiver")
