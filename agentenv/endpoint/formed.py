"""Sampling settings of a reply that must have a form."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from agentenv.core.errors import UsageError
from agentenv.endpoint.placing import Place
from agentenv.endpoint.request import Asked
from agentenv.engine.base import ChatEngine, Engine, MayFollowGrammars, Sampling, TakesForms

__all__ = ["formed"]


def formed(
    sampling: Sampling, asked: Asked, place: Place, engine: Engine | ChatEngine, counts: Counter[str]
) -> Sampling:
    """Return the settings with the grammar of what the reply must be.

    A chat engine may ask its API for the form by itself. Another engine that cannot sample by a grammar
    answers as it likes, which is counted.

    Raises:
        UsageError: The client began the reply.
        RenderError: No grammar is known for the way in which this model writes.
    """
    if asked.form is None or (isinstance(engine, TakesForms) and engine.takes_forms):
        return sampling
    if place.begun:
        raise UsageError("a reply that is begun cannot be made to call a tool or to be JSON")
    if place.renderer is None or not (isinstance(engine, MayFollowGrammars) and engine.follows_grammars):
        counts["ignored_tool_choice" if asked.form.schema is None else "ignored_output_format"] += 1
        return sampling
    return replace(sampling, grammar=place.renderer.grammar(asked.form))
