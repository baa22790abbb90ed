"""Models behind the providers' own APIs (Claude, Gemini, Mistral, Bedrock, Groq), over pydantic-ai.

Its forms of model strings stand in the entry-point group `agentenv.engines`, as those of any package do. What
a message holds beside its text, such as thinking with its signature, is kept as pydantic-ai writes it, and
goes back to the same provider.
"""

from agentenv_providers.engine import ProviderEngine

__all__ = ["ProviderEngine"]
