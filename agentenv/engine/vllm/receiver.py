"""The side of a vLLM worker that receives weights from a trainer; vLLM loads it (`plugin`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from agentenv.engine.vllm.wire import Channel, Rendezvous

__all__ = ["Receiver"]

_base: Any = import_module("vllm.distributed.weight_transfer.base")
_reload: Any = import_module("vllm.model_executor.model_loader.reload")


@dataclass
class Meeting(_base.WeightTransferInitInfo):
    """The fields of `Rendezvous`, as vLLM wants them."""

    host: str = ""
    port: int = 0
    size: int = 2
    transport: str = "gloo"
    timeout_s: float = 120.0


@dataclass
class Described(_base.WeightTransferUpdateInfo):
    """The fields of `Part.description`, as vLLM wants them."""

    names: list[str] = field(default_factory=list[str])
    dtypes: list[str] = field(default_factory=list[str])
    shapes: list[list[int]] = field(default_factory=list[list[int]])
    size: int = 0
    checksum: int = 0


class Receiver(_base.WeightTransferEngine):
    """Receives weights in the form of a checkpoint and loads them into the worker's model."""

    init_info_cls = Meeting
    update_info_cls = Described
    _channel: Channel | None = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Join the trainer's group; a trainer that came back makes a new one."""
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._channel = Channel(Rendezvous(**vars(init_info)), rank)
        self._channel.connect()

    def start_weight_update(self) -> None:
        """Prepare the model for weights in the form of a checkpoint."""
        _reload.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one part. The base class would wait for a GPU, which need not be there."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Described) -> None:
        """Receive the bytes of one part and load its tensors."""
        if self._channel is None:
            raise RuntimeError("the trainer has not yet said where to meet (/init_weight_transfer_engine)")
        self.model.load_weights(self._channel.receive(vars(update_info), self.device))

    def finish_weight_update(self) -> None:
        """Put the new weights to use, if all parts arrived as they were sent."""
        if self._channel is not None:
            self._channel.verify()
        _reload.finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Close the connections."""
        self._channel = None
