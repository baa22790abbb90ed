"""Sampling settings of a reply that must have a form."""

from __future__ import annotations

from dataclasses import replace

from agentenv.core.errors import UsageError
from agentenv.endpoint.placing import Place
from agentenv.endpoint.request import Asked
from agentenv.engine.base import ChatEngine, Engine, MayFollowGrammars, Sampling

__all__ = ["formed"]


def formed(sampling: Sampling, asked: Asked, place: Place, engine: Engine | ChatEngine) -> Sampling:
    """Return the settings with the grammar of what the reply must be.

    Raises:
        UsageError: The engine cannot sample by a grammar, or the client began the reply.
        RenderError: No grammar is known for the way in which this model writes.
    """
    if asked.form is None:
        return sampling
    if place.begun:
        raise UsageError("a reply that is begun cannot be made to call a tool or to be JSON")
    if place.renderer is None or not (isinstance(engine, MayFollowGrammars) and engine.follows_grammars):
        raise UsageError(
            f"{engine.name} cannot be made to call a tool or to answer with JSON",
            remedy="leave out tool_choice and the output format, or use an engine that can, such as hf:",
        )
    return replace(sampling, grammar=place.renderer.grammar(asked.form))
