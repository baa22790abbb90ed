"""What a user passes to `GRPOTrainer` is made ours or refused, before anything is loaded or played."""

from __future__ import annotations

import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from agentenv.core.errors import UsageError
from agentenv.render.tokenizer import ChatTokenizer
from agentenv.training.loading import load_tokenizer

__all__ = [
    "own_tokenizer",
    "require_callable",
    "require_engine",
    "require_function_of_one",
    "require_kind",
    "require_model",
]


def own_tokenizer(given: Any) -> ChatTokenizer | None:
    """Return a tokenizer of ours from one of transformers, a processor, or the path or id of a model.

    Raises:
        ModelNotFound: The path holds no tokenizer.
        UsageError: The object is no fast tokenizer.
    """
    if given is None:
        return None
    return load_tokenizer(str(given)) if isinstance(given, (str, Path)) else ChatTokenizer.of(given)


def require_model(given: Any) -> None:
    """Refuse a model that is neither named nor a causal language model of transformers."""
    if given is None or isinstance(given, (str, Path)):
        return
    if hasattr(given, "_orig_mod"):
        raise UsageError(
            "model is compiled, which hides the layers that a training reads and changes",
            remedy="pass the model itself: before torch.compile(...), or its _orig_mod",
        )
    # A model without a head, such as an encoder or the decoder alone, cannot generate.
    known = isinstance(given, nn.Module) and hasattr(given, "config")
    if not known or not getattr(given, "can_generate", lambda: True)():
        raise UsageError(
            f"model must be a path, a Hub id or a causal language model of transformers, not {_kind(given)}",
            remedy="load it with AutoModelForCausalLM.from_pretrained(...), or name it",
        )
    if any(weight.is_meta for weight in given.parameters()):
        raise UsageError("the weights of model are on the meta device, which holds none", remedy="load them")


def require_engine(given: Any) -> None:
    """Refuse an engine that cannot generate, such as its name."""
    if given is not None and not (hasattr(given, "name") and callable(getattr(given, "generate", None))):
        raise UsageError(
            f"engine must be an object with name and generate, not {_kind(given)}",
            remedy="name a server in GRPOConfig(engine=...), or pass an Engine",
        )


def require_kind(name: str, kind: type, given: Any) -> None:
    """Refuse an object of another kind; None stands for none."""
    if given is not None and not isinstance(given, kind):
        raise UsageError(f"{name} must be of the kind {kind.__name__}, not {_kind(given)}")


def require_callable(**given: Any) -> None:
    """Refuse what is to be a function of the user and cannot be called; None stands for none."""
    for name, function in given.items():
        if function is not None and not callable(function):
            raise UsageError(f"{name} must be a function, not {_kind(function)}")


def require_function_of_one(**given: Any) -> None:
    """Refuse what is to be a function of one argument and cannot be called with one; None stands for none."""
    require_callable(**given)
    for name, function in given.items():
        if function is None:
            continue
        if inspect.iscoroutinefunction(function):
            raise UsageError(
                f"{name} is asynchronous, and would not be awaited", remedy="write def, not async def"
            )
        try:
            with suppress(ValueError):  # a function of C may have no signature
                inspect.signature(function).bind(None)
        except TypeError as error:
            raise UsageError(f"{name} must be a function of one argument: {error}") from None


def _kind(given: Any) -> str:
    return f"the {'class' if isinstance(given, type) else type(given).__name__} {given!r:.80}"
