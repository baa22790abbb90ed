"""All errors that agentenv raises, as one class tree.

    AgentEnvError
    ├── UsageError(ValueError)            a caller's mistake: wrong id, bad option, bad file
    │   ├── UnknownEnvironment(LookupError)
    │   ├── UnknownTool(LookupError)
    │   ├── ToolDefinitionError(TypeError)
    │   ├── TaskError
    │   ├── ModelNotFound(FileNotFoundError)
    │   └── DependencyMissing(ImportError)
    ├── ToolError                         raised *by a tool*; its text is shown to the model
    ├── AlignmentError(ValueError)        token ids, loss mask and logprobs would disagree
    ├── RenderError(ValueError)           a chat template that cannot be rendered exactly
    ├── InfrastructureError(RuntimeError) the episode is aborted, and neither scored nor trained
    │   ├── EngineError                   the engine failed
    │   │   ├── EngineUnavailable         a retry may help: connection, 429, 503
    │   │   └── ContextTooLong            the prompt does not fit the model
    │   ├── SandboxError
    │   │   ├── SandboxUnavailable        this machine offers no isolation; the remedy says what to do
    │   │   └── SandboxCrashed            infrastructure failed
    │   └── ServerUnavailable             a server of tools or of an environment broke off; a retry may help
    ├── EnvironmentMisuse(RuntimeError)   step before reset, step after the end
    └── StoreError(OSError)               a run directory that cannot be written or read
        └── RunNotFound(UsageError)       no run or episode has this name

The text of a `ToolError` is shown to the model; every other error is for a person. The `message` of an error
says what was wrong and names the value, and its `remedy` says what to do; `str(error)` contains both.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

from agentenv.core.installed import install_line

__all__ = [
    "AgentEnvError",
    "AlignmentError",
    "ContextTooLong",
    "DependencyMissing",
    "EngineError",
    "EngineUnavailable",
    "EnvironmentMisuse",
    "InfrastructureError",
    "ModelNotFound",
    "RenderError",
    "RunNotFound",
    "SandboxCrashed",
    "SandboxError",
    "SandboxUnavailable",
    "ServerUnavailable",
    "StoreError",
    "TaskError",
    "ToolDefinitionError",
    "ToolError",
    "TrainingFailed",
    "UnknownEnvironment",
    "UnknownTool",
    "UsageError",
    "did_you_mean",
    "nearest",
]


class AgentEnvError(Exception):
    """Root of all agentenv errors.

    Args:
        args: the message, which says what was wrong and names the value.
        remedy: what to do about it; empty if there is nothing to add to the message.
    """

    remedy: str = ""

    def __init__(self, *args: object, remedy: str = "") -> None:
        super().__init__(*args)
        self.remedy = remedy

    @property
    def message(self) -> str:
        """What was wrong, without the remedy that `str(error)` adds."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class UsageError(AgentEnvError, ValueError):
    """The caller made a mistake, such as a wrong name or value; the message says what to change."""


class UnknownEnvironment(UsageError, LookupError):
    """No environment has this id, file or module."""


class UnknownTool(UsageError, LookupError):
    """No installed or registered tool has this name."""


class ToolDefinitionError(UsageError, TypeError):
    """A function cannot become a tool; the message names the parameter."""


class TaskError(UsageError):
    """A task set or a row of it cannot be used; the message names the row and the field."""


class ModelNotFound(UsageError, FileNotFoundError):
    """There is no model of this name that can be loaded."""


class DependencyMissing(UsageError, ImportError):
    """An optional package is not installed; the remedy is the command that installs it."""

    @classmethod
    def of(cls, package: str, extra: str, *, purpose: str) -> DependencyMissing:
        """Return the error for a missing package; it says what needs the package and how to install it."""
        return cls(f"{purpose} needs {package}", remedy=install_line(extra))

    @classmethod
    def require(cls, *packages: str, extra: str, purpose: str) -> None:
        """Raise this error if one of the packages is not installed, without importing them."""
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            raise cls.of(" and ".join(missing), extra, purpose=purpose)


class ToolError(AgentEnvError):
    """A tool raises this to answer the model with an error that the model can act on.

    Its argument is a text, or a list of texts and images.
    """


class AlignmentError(AgentEnvError, ValueError):
    """Token ids, loss mask and logprobs would disagree."""


class RenderError(AgentEnvError, ValueError):
    """A chat template cannot be rendered exactly; the message says why and what to do."""


class InfrastructureError(AgentEnvError, RuntimeError):
    """What an episode stands on failed. The episode is aborted, so it is neither trained on nor scored 0."""


class EngineError(InfrastructureError):
    """The engine failed."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached or is overloaded; a retry may help."""


class ContextTooLong(EngineError):
    """The prompt does not fit the model's context."""


class SandboxError(InfrastructureError):
    """Root of the sandbox's own failures. Errors in sandboxed code are returned in `status`, never raised."""


class SandboxUnavailable(SandboxError):
    """This machine offers no isolation; the message says why and what to do."""


class SandboxCrashed(SandboxError):
    """The sandbox's infrastructure failed; the episode is aborted."""


class ServerUnavailable(InfrastructureError):
    """A server that tools or an environment need cannot be reached, or broke off; a retry may help."""


class EnvironmentMisuse(AgentEnvError, RuntimeError):
    """An environment was used out of order: step before reset, or after the end."""


class StoreError(AgentEnvError, OSError):
    """A run directory cannot be written or read."""


class RunNotFound(StoreError, UsageError):
    """No run, or no episode of a run, has this name."""


class TrainingFailed(AgentEnvError, RuntimeError):
    """A training had nothing to train on; the message holds the cause."""


def nearest(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are similar to a name, the most similar first."""
    return get_close_matches(name, list(known), n=count, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean ...?` with the most similar known name, or an empty text if none is similar."""
    close = nearest(name, known)
    return f"did you mean {close[0]!r}?" if close else ""
