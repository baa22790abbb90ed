"""Models behind chat APIs: OpenAI's (`openai`), and those of other providers over pydantic-ai (`engine`)."""

from typing import TYPE_CHECKING

from agentenv.core import door

if TYPE_CHECKING:
    from agentenv_providers.engine import ProviderEngine as ProviderEngine
    from agentenv_providers.openai.engine import OpenAIChatEngine as OpenAIChatEngine

__all__ = door(__name__)
