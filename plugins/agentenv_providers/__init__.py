"""Models behind chat APIs: `openai` speaks OpenAI's, and `engine` those of other providers over pydantic-ai.

Its forms of model strings stand in the entry-point group `agentenv.engines`, as those of any package do. What
a message holds beside its text, such as thinking with its signature, is kept as pydantic-ai writes it, and
goes back to the same provider.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core import door

if TYPE_CHECKING:
    from agentenv_providers.engine import ProviderEngine as ProviderEngine
    from agentenv_providers.openai.client import Pace as Pace
    from agentenv_providers.openai.client import Patience as Patience
    from agentenv_providers.openai.engine import OpenAIChatEngine as OpenAIChatEngine

__all__ = door(__name__)
