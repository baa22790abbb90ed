"""The forms of model strings, and what each of them loads.

Packages add forms in the entry-point group `agentenv.engines`, each under the word before the colon, and its
object is a `ModelForm`. Ours stand there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import UsageError
from agentenv.core.registry import Registry, of_kind
from agentenv.engine.interface import ChatEngine, Engine

if TYPE_CHECKING:
    from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["LoadedModel", "ModelForm", "engine_registry"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine, together with the tokenizer that its renderer needs."""

    engine: Engine | ChatEngine
    tokenizer: ChatTokenizer | None
    """The tokenizer; None for a ChatEngine, which renders messages itself."""


Load = Callable[[str, "str | None", dict[str, Any]], LoadedModel]
"""Loads an engine from what stands after the colon, the directory of another tokenizer, and options."""


@dataclass(frozen=True, slots=True)
class ModelForm:
    """A form of model strings, and how an engine is made of one."""

    load: Load
    """Makes the engine. It refuses options that the engine does not take; see `check_options`."""
    form: str
    """How the string is written, for messages, such as `hf:PATH`; without a colon, it is a whole word."""
    weights: Callable[[str], tuple[str, str]] | None = None
    """Returns the path of the weights that the whole model string names, for training, and the model string
    of the engine, which is empty if the trainer itself generates. None if such a model cannot be trained."""
    learner: Callable[[], Any] | None = None
    """Returns what trains such a model elsewhere, an `agentenv.training.LearnerForm`. None if this machine
    does."""
    key: str = ""
    """Environment variable that holds the key, for models that want one."""

    def __post_init__(self) -> None:
        if self.form.endswith(":"):
            raise UsageError(
                f"the form {self.form!r} does not say what follows the colon", remedy="write x:NAME"
            )


engine_registry = Registry("agentenv.engines", "form of model string", of_kind(ModelForm))
"""The forms of model strings of the installed packages, by the word before the colon."""
