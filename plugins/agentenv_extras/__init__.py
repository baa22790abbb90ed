"""Parts that few need: condensers of long documents, and an engine that asks a stronger one for help."""

from agentenv_extras.documents import Keywords, Passages, SummarisePassages
from agentenv_extras.passages import split_passages
from agentenv_extras.router import LessSureThan, RouterEngine

__all__ = [
    "Keywords",
    "LessSureThan",
    "Passages",
    "RouterEngine",
    "SummarisePassages",
    "split_passages",
]
