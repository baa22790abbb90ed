"""A training whose weights are at a server of the Tinker API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv.core import UsageError, cache_directory, logger
from agentenv.engine import check_options, padded
from agentenv.render import ChatTokenizer
from agentenv.training import GRPOConfig, find_teacher
from agentenv.training.learners import ScoresRows
from agentenv_tinker.engine import TinkerEngine, load_tokenizer, open_service
from agentenv_tinker.learner import TinkerLearner
from agentenv_tinker.probe import Traits, known_traits
from agentenv_tinker.refuse import refuse_unable
from agentenv_tinker.service import Service

__all__ = ["open", "refuse"]

log = logger(__name__)


def refuse(config: GRPOConfig, options: Mapping[str, Any]) -> None:
    """Refuse a training that its server cannot do, which is measured for this if need be.

    Raises:
        UsageError: The server cannot do what an option asks for.
        TrainingFailed: It does with gradients what no known server does.
        EngineUnavailable: It does not answer.
    """
    refuse_unable(config, Traits(), config.model)  # most of it shows without the server
    service, _, _, traits = _measured(config.model, config, None, options)
    service.close()
    refuse_unable(config, traits, service.name)


def open(
    model: str, config: GRPOConfig, tokenizer: ChatTokenizer | None, options: Mapping[str, Any] | None
) -> tuple[TinkerLearner, TinkerEngine, ChatTokenizer]:
    """Return the learner on a server, the engine that samples from it, and the model's tokenizer.

    Args:
        model: the model string.
        config: the run's options.
        tokenizer: the tokenizer that the user passed, if any.
        options: options of the engine.

    Raises:
        UsageError: The server cannot do what an option asks for.
        TrainingFailed: It does with gradients what no known server does.
        EngineUnavailable: It does not answer.
    """
    service, engine, tokenizer, traits = _measured(model, config, tokenizer, options)
    for line in traits.lines():
        log.info("%s: %s", service.name, line)
    teacher: ScoresRows | None = find_teacher(config, service.model, tokenizer)
    learner = TinkerLearner(
        service,
        config,
        traits=traits,
        vocab_size=padded(tokenizer.vocab_size),
        max_length=engine.max_context_tokens,
        teacher=teacher,
    )
    return learner, engine, tokenizer


def _measured(
    model: str, config: GRPOConfig, tokenizer: ChatTokenizer | None, options: Mapping[str, Any] | None
) -> tuple[Service, TinkerEngine, ChatTokenizer, Traits]:
    """Return a connection to the server, what samples there, the tokenizer, and what the server does."""
    if config.engine not in {"", model}:
        raise UsageError(
            f"{model} is sampled at its own server, and not on {config.engine}", remedy="leave engine out"
        )
    given = dict(options or {})
    where = given.pop("tokenizer", "")
    service = open_service(model, given)
    check_options(TinkerEngine, model, given)
    tokenizer = tokenizer or (ChatTokenizer.load(where) if where else load_tokenizer(service.model))
    engine = TinkerEngine(service, tokenizer, **given)
    traits = known_traits(service, tokenizer.vocab_size, cache_directory() / "tinker.json")
    return service, engine, tokenizer, traits
