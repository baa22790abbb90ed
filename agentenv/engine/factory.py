"""Load the engine and the tokenizer that a model string names; only the named backend is imported.

A model string is a word such as `mock`, or a form and what it names, such as `hf:PATH`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import DependencyMissing, ModelNotFound, UsageError, did_you_mean, nearest
from agentenv.core.files import json_lines, json_value, user_text
from agentenv.core.imports import import_object
from agentenv.core.playing import MessagePolicy, play_oracle
from agentenv.engine.forms import LoadedModel, ModelForm, engine_registry
from agentenv.engine.packaged import PACKAGED, tokenizer_path

if TYPE_CHECKING:
    from agentenv.engine.scripted.scripted import TurnLike
    from agentenv.render.tokenizer import ChatTokenizer

__all__ = [
    "check_options",
    "load_engine",
    "weights_and_engine",
]


def load_engine(model: str, /, *, tokenizer: str | None = None, **options: Any) -> LoadedModel:
    """Load the engine that a model string names.

    Example:
        >>> from agentenv.engine import load_engine
        >>> load_engine("mock").engine.name
        'mock'

    Args:
        model: `hf:PATH`, `vllm:PATH`, `http://HOST:PORT/v1`, `servers:FILE`, `openai:NAME`, `scripted:...` or
            `mock`; `smollm2` is short for `hf:smollm2`, a small model that a Python package contains;
            `policy:FILE.py:FUNCTION` plays a function of the messages, `oracle` the environment's own
            solution, and `random` random calls and answers.
        tokenizer: directory of the tokenizer, if it differs from that of the model.
        options: keyword options of the engine; unknown options are refused.

    Raises:
        ModelNotFound: The string names no model that can be loaded.
        UsageError: The form of the string or an option is unknown.
        DependencyMissing: The engine's package is not installed.
        EngineUnavailable: A server does not answer.
    """
    kind, colon, rest = ("hf", ":", model) if model in PACKAGED else model.partition(":")
    if kind not in engine_registry:
        raise UsageError(
            f"{model!r} names no engine",
            remedy=f"{_hint(model)}the forms are {_forms()}; a package's form is known once it is installed",
        )
    form = engine_registry[kind]
    if colon and ":" not in form.form:
        raise UsageError(
            f"the model string {kind} takes nothing after a colon, but got {rest!r}", remedy=f"write {kind}"
        )
    if not rest and ":" in form.form:
        raise UsageError(f"{model!r} names no model", remedy=f"write {form.form}")
    return form.load(rest, tokenizer, options)


def weights_and_engine(model: str) -> tuple[str, str]:
    """Return the path of the weights that a model string names, and the model string of the engine.

    The engine is empty if the trainer itself generates the episodes.

    Raises:
        EngineUnavailable: A server does not answer.
        ModelNotFound: A server's weights are not on this machine.
        UsageError: A server returns no token ids, so that there is nothing to train on.
    """
    kind, colon, _ = model.partition(":")
    if not colon or kind not in engine_registry:
        return model, ""
    weights = engine_registry[kind].weights
    if weights is None:
        raise UsageError(f"{model} can be evaluated but not trained on", remedy="name weights, as in hf:PATH")
    return weights(model)


def _served_weights(model: str) -> tuple[str, str]:
    probe = import_module("agentenv.engine.vllm.probe").probe
    first = import_module("agentenv.engine.listed").addresses(model)[0]
    import_module("agentenv.engine.reach").check_answers(f"the server {first}", first)
    report = probe(first)
    if report.route == "chat":
        raise UsageError(f"{model} can be evaluated but not trained on, because it returns no token ids")
    if report.model_path is None or not Path(report.model_path).exists():
        raise ModelNotFound(
            f"the weights that {model} serves ({report.model_path}) are not on this machine",
            remedy=f"name both: -m PATH -o engine={model}",
        )
    return report.model_path, model


def _forms() -> str:
    known = [row.item.form for row in engine_registry.listing(load=True) if row.item is not None]
    return ", ".join([*sorted(PACKAGED), *known])


_OF_APIS = re.compile(
    r"(?:openai|anthropic|google|mistralai|deepseek|x-ai)/(?=.)|(?=(?:gpt|chatgpt|claude|gemini|grok|o\d)\b)"
)
"""Beginnings of names of models that are behind chat APIs."""
_OWN_APIS = {"claude": "anthropic", "gemini": "google", "mistral": "mistral"}
"""Forms of model strings of providers, by what the names of their models begin with."""


def _hint(model: str) -> str:
    """Return which model string was meant, as far as that can be guessed."""
    kind = model.partition(":")[0]
    if Path(model).expanduser().exists():
        return f"did you mean hf:{model}? "
    if model.casefold().startswith(tuple(PACKAGED)):
        return f"did you mean {next(name for name in PACKAGED if model.casefold().startswith(name))}? "
    if api := _OF_APIS.match(model):
        name = model[api.end() :]
        own = next((form for begins, form in _OWN_APIS.items() if name.startswith(begins)), "")
        if own in engine_registry:
            return f"did you mean {own}:{name}? "
        return f"did you mean openai:{name}, with -o engine.base_url=ADDRESS for another API? "
    if server := re.fullmatch(r"(?:https?/+)?([\w.-]+:\d+)(?:/.*)?", model):
        return f"did you mean http://{server[1]}/v1? "
    if model.count("/") == 1 and ":" not in model:
        return f"did you mean hf:{model}? "
    # Short names are too much alike: llama3 is no vLLM.
    forms = {name: name for name in PACKAGED} | {name: kind.form for name, kind in engine_registry.items()}
    close = nearest(kind, forms, cutoff=0.6 if ":" in model else 0.8)
    return f"did you mean {forms[close[0]]}? " if close else ""


# Each form loads its engine when it is used, because a run uses one or two of them.


def _mock(_: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    from agentenv.engine.scripted.mock import MockEngine

    codec = _tokenizer(tokenizer) if tokenizer else _byte_tokenizer()
    return LoadedModel(_build(MockEngine, "mock", options, codec), codec)


def _policy(rest: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    return _played(import_object(rest, where="policy"), f"policy:{rest}", tokenizer, options)


def _oracle(_: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    return _played(play_oracle, "oracle", tokenizer, options)


def _random(_: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    from agentenv.engine.scripted.policy import play_random

    return _played(play_random, "random", tokenizer, options)


def _played(policy: MessagePolicy, name: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    from agentenv.engine.scripted.policy import PolicyEngine

    if not callable(policy):
        raise UsageError(f"{name} is {policy!r:.200}", remedy="name a function policy(messages, task, rng)")
    codec = _tokenizer(tokenizer) if tokenizer else _byte_tokenizer()
    return LoadedModel(_build(PolicyEngine, name, {"name": name, **options}, policy, codec), codec)


def _scripted(rest: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    from agentenv.engine.scripted.scripted import ScriptedEngine

    codec = _tokenizer(tokenizer) if tokenizer else _byte_tokenizer()
    is_file = Path(rest).suffix in {".json", ".jsonl", ".py"}  # .py to be refused, not said
    script: list[TurnLike] = _script(rest) if is_file else [rest]
    options = {"repeat_last": not is_file, "name": f"scripted:{rest[:60]}", **options}
    return LoadedModel(_build(ScriptedEngine, "scripted:", options, script, tokenizer=codec), codec)


def _script(path: str) -> list[TurnLike]:
    file = Path(path)
    try:
        is_lines = file.suffix == ".jsonl"
        turns = [turn for _, turn in json_lines(file)] if is_lines else json_value(user_text(file), file)
    except OSError as error:
        remedy = "name a .json or .jsonl file of turns, or write policy:FILE.py:FUNCTION"
        raise ModelNotFound(f"the script {path} cannot be read: {error.strerror}", remedy=remedy) from None
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str | dict | list) for turn in turns)
    ):
        kinds = "texts, assistant messages or lists of token ids"
        raise UsageError(f"the script {path} must be a list of turns ({kinds})")
    return turns


def _transformers(rest: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    load = import_module("agentenv.engine.hf.load")
    files = load.locate(rest)
    if tokenizer is None:
        load.require_tokenizer(files)
    beside = files.tokenizer
    codec = _tokenizer(tokenizer) if tokenizer else _tokenizer(beside.path, beside.gguf_file)
    picked = {name: options.pop(name) for name in ("dtype", "device") if name in options}
    DependencyMissing.require("torch", "transformers", extra="train", purpose="hf: models")
    engine_type = import_module("agentenv.engine.hf.engine").TransformersEngine
    check_options(engine_type, f"hf:{rest}", options)
    model = load.load_model(files, **picked)
    adapter = None if files.base is None else model.active_adapter
    return LoadedModel(
        engine_type(model, codec, **{"name": f"hf:{rest}", "adapter": adapter, **options}), codec
    )


def _vllm(rest: str, tokenizer: str | None, options: dict[str, Any]) -> LoadedModel:
    load = import_module("agentenv.engine.hf.load")
    files = load.locate(rest)
    load.require_whole(files, "vLLM")
    if tokenizer is None:
        load.require_tokenizer(files)
    codec = _tokenizer(tokenizer) if tokenizer else _tokenizer(files.path, files.gguf_file)
    DependencyMissing.require("vllm", extra="vllm", purpose="vllm: models")
    start = import_module("agentenv.engine.vllm.own").start_server
    options = {"name": f"vllm:{rest}", **options}
    engine = _build(start, f"vllm:{rest}", options, files)
    engine.see(codec.images)
    return LoadedModel(engine, codec)


def _http(rest: str, tokenizer: str | None, options: dict[str, Any], scheme: str = "http") -> LoadedModel:
    model = f"{scheme}:{rest}"
    connect = import_module("agentenv.engine.vllm.connect").connect
    check_options(connect, model, options)
    engine, path = connect(model, tokenizer=tokenizer, **options)
    if path is None:
        return LoadedModel(engine, None)
    codec = _tokenizer(path)
    engine.see(codec.images)
    return LoadedModel(engine, codec)


def _build(
    engine_type: Callable[..., Any], model: str, options: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    check_options(engine_type, model, options)
    return engine_type(*args, **kwargs, **options)


def check_options(target: Callable[..., Any], model: str, options: Mapping[str, Any]) -> None:
    """Refuse options that an engine does not take.

    Args:
        target: class or function that makes the engine; its keyword-only parameters are the options.
        model: name of the model for the error message.
        options: the options to check.

    Raises:
        UsageError: An option is unknown.
    """
    parameters = inspect.signature(target).parameters.values()
    known = [item.name for item in parameters if item.kind is item.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            meant = did_you_mean(name, known)
            raise UsageError(
                f"{model} has no option {name!r}", remedy=f"{meant} options: {', '.join(known)}".lstrip()
            )


def _tokenizer(path: str, gguf_file: str | None = None) -> ChatTokenizer:
    return import_module("agentenv.render.tokenizer").ChatTokenizer.load(tokenizer_path(path), gguf_file)


def _byte_tokenizer() -> ChatTokenizer:
    return import_module("agentenv.render.tokenizer").byte_tokenizer()


HF = ModelForm(_transformers, "hf:PATH", lambda model: (model.partition(":")[2], ""))
HTTP = ModelForm(_http, "http://HOST:PORT/v1", _served_weights, key="VLLM_API_KEY")
HTTPS = ModelForm(partial(_http, scheme="https"), "https://HOST/v1", _served_weights, key="VLLM_API_KEY")
MOCK = ModelForm(_mock, "mock")
ORACLE = ModelForm(_oracle, "oracle")
POLICY = ModelForm(_policy, "policy:FILE.py:FUNCTION")
RANDOM = ModelForm(_random, "random")
SCRIPTED = ModelForm(_scripted, "scripted:TEXT or scripted:FILE.json")
SERVERS = ModelForm(
    partial(_http, scheme="servers"), "servers:FILE or servers:http://HOST/FILE", _served_weights
)
VLLM = ModelForm(_vllm, "vllm:PATH", lambda model: (model.partition(":")[2], model))
