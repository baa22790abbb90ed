"""Switch between the LoRA adapters of a model and the base model; at most one adapter is active."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.engine.hf.peft_internals import with_adapter

__all__ = ["AdapterSwitch", "adapter_names", "base_model"]


def adapter_names(model: Any) -> list[str]:
    """Return the names of the peft adapters of a model; the list is empty for a plain model."""
    return list(getattr(model, "peft_config", ()))


def base_model(model: Any) -> Any:
    """Return the model inside a peft wrapper; a model without the wrapper is returned itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class AdapterSwitch:
    """Switches the adapters of a peft model for the time of forward passes.

    Afterwards the settings of the trainer (active adapters, parameters with gradients) are restored.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.current: str | None = None
        """The adapter that the live rows use; None means the base model."""

    def check(self, name: str | None) -> None:
        """Raise UsageError if the model has no adapter of this name."""
        names = adapter_names(self._model)
        if name is not None and name not in names:
            known = ", ".join(names) or "none"
            raise UsageError(
                f"the model has no adapter {name!r}", remedy=f"use one of the loaded adapters: {known}"
            )

    @contextmanager
    def on(self) -> Generator[None]:
        """Run forward passes with the current adapter, or with the base model."""
        if not adapter_names(self._model):
            yield
            return
        with with_adapter(self._layers(), self.current):
            yield

    def _layers(self) -> list[Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        # The wrappers hold what an adapter replaces as a whole, such as `modules_to_save`.
        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        return [module for module in self._model.modules() if isinstance(module, kinds)]
