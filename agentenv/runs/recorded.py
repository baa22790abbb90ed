"""The model, the renderer and the environment that a stored run names."""

from __future__ import annotations

from importlib import import_module

from agentenv.core.errors import UsageError
from agentenv.engine.packaged import PACKAGED, tokenizer_path
from agentenv.envs.registry import EnvSpec, registry, spec
from agentenv.render.renderer import Renderer
from agentenv.render.tokenizer import ChatTokenizer, byte_tokenizer
from agentenv.runs.store.runinfo import RunInfo

__all__ = ["chat_tokenizer_of", "env_of", "model_of", "renderer_of", "tokenizer_of"]


WITHOUT_MODEL = frozenset({"mock", "scripted", "oracle", "random", "policy"})
"""Kinds of engines without a model, which use one token for each byte unless a tokenizer is named."""


def model_of(info: RunInfo) -> str:
    """Return the run's model as an engine string; a training run stores only the path of its model."""
    return f"hf:{info.model}" if info.kind == "train" else info.model


def tokenizer_of(info: RunInfo) -> str:
    """Return the directory of the tokenizer that the run was given; empty if it is the model's own."""
    return str(info.config.get("tokenizer") or "")


def renderer_of(info: RunInfo, tokenizer: str = "") -> Renderer:
    """Return the renderer that made the run's tokens, without loading the run's model.

    See `chat_tokenizer_of` for the arguments and errors.
    """
    return Renderer(chat_tokenizer_of(info, tokenizer))


def chat_tokenizer_of(info: RunInfo, tokenizer: str = "") -> ChatTokenizer:
    """Return the tokenizer that made the run's tokens, without loading the run's model.

    Args:
        info: info of the run.
        tokenizer: directory of the tokenizer; empty for the one that the run names.

    Raises:
        UsageError: The run does not say which tokenizer it used.
        ModelNotFound: The tokenizer cannot be read.
    """
    model = model_of(info)
    kind, _, rest = model.partition(":")
    if codec := tokenizer or tokenizer_of(info):
        return ChatTokenizer.load(tokenizer_path(codec))
    if kind in WITHOUT_MODEL:
        return byte_tokenizer()
    if kind in {"hf", "vllm"} or model in PACKAGED:
        files = import_module("agentenv.engine.hf.load").locate(rest or model).tokenizer
        return ChatTokenizer.load(files.path, files.gguf_file)
    raise UsageError(
        f"the tokenizer of {model or 'this run'} is not known",
        remedy="name its directory with --tokenizer",
    )


def env_of(info: RunInfo, env_id: str) -> EnvSpec:
    """Return the environment, from the run's file if no environment of this id is registered."""
    listed = info.config.get("envs")
    sources = [str(source) for source in listed] if isinstance(listed, (list, tuple)) else []
    return spec(env_id if env_id in registry or len(sources) != 1 else sources[0])
