"""Every error that agentenv raises, in one tree.

    AgentEnvError
    ├── UsageError(ValueError)            a caller's mistake: wrong id, bad option, bad file
    │   ├── UnknownEnvironment(LookupError)
    │   ├── ToolDefinitionError(TypeError)
    │   ├── TaskError
    │   ├── ModelNotFound(FileNotFoundError)
    │   └── DependencyMissing(ImportError)
    ├── ToolError                         raised *by a tool*: its text goes to the model
    ├── AlignmentError(ValueError)        token ids, loss mask and logprobs would disagree
    ├── RenderError(ValueError)           a chat template that cannot be rendered exactly
    ├── EngineError(RuntimeError)         the engine failed; the episode is aborted
    │   ├── EngineUnavailable             worth a retry: connection, 429, 503
    │   └── ContextTooLong                the prompt does not fit the model
    ├── SandboxError(RuntimeError)
    │   ├── SandboxUnavailable            no isolation here; says what to do
    │   └── SandboxCrashed                infrastructure failed; the episode is aborted
    ├── EnvironmentMisuse(RuntimeError)   step before reset, step after the end
    └── StoreError(OSError)               a run directory that cannot be written or read

Two audiences: the text of a `ToolError` is shown to the model; every other error is for the person. Its
`message` says what was wrong and the value, its `remedy` what to do; `str(error)` has both.
"""

from __future__ import annotations

from importlib.util import find_spec

__all__ = [
    "AgentEnvError",
    "AlignmentError",
    "ContextTooLong",
    "DependencyMissing",
    "EngineError",
    "EngineUnavailable",
    "EnvironmentMisuse",
    "ModelNotFound",
    "RenderError",
    "SandboxCrashed",
    "SandboxError",
    "SandboxUnavailable",
    "StoreError",
    "TaskError",
    "ToolDefinitionError",
    "ToolError",
    "UnknownEnvironment",
    "UsageError",
]


class AgentEnvError(Exception):
    """Root of all agentenv errors.

    Args:
        args: the message: what was wrong, and the value.
        remedy: what to do about it; empty where the message says all there is.
    """

    remedy: str = ""

    def __init__(self, *args: object, remedy: str = "") -> None:
        super().__init__(*args)
        self.remedy = remedy

    @property
    def message(self) -> str:
        """What was wrong, without the remedy."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class UsageError(AgentEnvError, ValueError):
    """The caller asked for something that cannot be done; the message says what to change."""


class UnknownEnvironment(UsageError, LookupError):
    """No environment has this id, file or module."""


class ToolDefinitionError(UsageError, TypeError):
    """A function cannot become a tool; the message names the parameter."""


class TaskError(UsageError):
    """A task set or a row of it cannot be used; the message names the row and the field."""


class ModelNotFound(UsageError, FileNotFoundError):
    """A model string names no model that can be loaded."""


class DependencyMissing(UsageError, ImportError):
    """An optional package is not installed; the remedy names the extra that brings it."""

    @classmethod
    def of(cls, package: str, extra: str, *, purpose: str) -> DependencyMissing:
        """Say which package is missing, what for, and how to install it."""
        return cls(f"{purpose} needs {package}", remedy=f"pip install 'agentenv-rl[{extra}]'")

    @classmethod
    def require(cls, *packages: str, extra: str, purpose: str) -> None:
        """Raise this error if one of the packages is not installed; nothing is imported."""
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            raise cls.of(" and ".join(missing), extra, purpose=purpose)


class ToolError(AgentEnvError):
    """Raised by a tool to answer the model with an error it can act on."""


class AlignmentError(AgentEnvError, ValueError):
    """Token ids, loss mask and logprobs would not stay aligned."""


class RenderError(AgentEnvError, ValueError):
    """A chat template cannot be rendered exactly; the message has the reason and the remedy."""


class EngineError(AgentEnvError, RuntimeError):
    """The engine failed. The episode is aborted: never trained, never scored 0."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached or is overloaded; a retry may help."""


class ContextTooLong(EngineError):
    """The prompt does not fit the model's context."""


class SandboxError(AgentEnvError, RuntimeError):
    """Root of the sandbox's own failures. What the code in it did never raises."""


class SandboxUnavailable(SandboxError):
    """No isolation can be had on this machine; the message says why and what to do."""


class SandboxCrashed(SandboxError):
    """The sandbox's infrastructure failed; the episode is aborted."""


class EnvironmentMisuse(AgentEnvError, RuntimeError):
    """An environment was used out of order: step before reset, or after the end."""


class StoreError(AgentEnvError, OSError):
    """A run directory cannot be written or read."""
