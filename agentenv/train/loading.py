"""What a training run starts from: the model and its tokenizer, loaded as the transformers engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.engine.hf.load import load_model as load
from agentenv.engine.hf.load import locate
from agentenv.render.tokenizer import ChatTokenizer
from agentenv.train.config import GRPOConfig

__all__ = ["find_model", "load_model", "load_tokenizer"]


def find_model(given: Any, config: GRPOConfig) -> tuple[str, Any]:
    """Return the name of the model to train, and the model.

    Args:
        given: a path or Hub id, or a model of transformers; the configuration's if None.
        config: the run's options.

    Raises:
        ModelNotFound: It cannot be loaded.
        UsageError: No model is named.
    """
    source = config.model if given is None else given
    if not isinstance(source, (str, Path)):
        return config.model, source
    if not str(source):
        raise UsageError("no model: set GRPOConfig.model to a path or Hub id, or pass model=")
    return str(source), load_model(str(source), config)


def load_model(name: str, config: GRPOConfig) -> Any:
    """Load a causal language model, or an adapter on its base: a directory, a .gguf file or a Hub id.

    Raises:
        ModelNotFound: Nothing can be loaded from there.
    """
    wide = config.dtype == "float64"
    model = load(locate(name), dtype="float32" if wide else config.dtype, device=config.device)
    # What peft writes beside an adapter as its base: neither a GGUF's folder nor a place in the Hub's cache.
    place = Path(name).expanduser()
    model.name_or_path = str(place.absolute()) if place.exists() else name
    return model.double() if wide else model


def load_tokenizer(name: str) -> ChatTokenizer:
    """Load the tokenizer that lies beside a model.

    Raises:
        ModelNotFound: There is none.
    """
    files = locate(name).tokenizer
    return ChatTokenizer.load(files.path, gguf_file=files.gguf_file)
