"""The one seam to a model: tokens in, tokens and logprobs out.

An engine gives exactly the tokens it sampled with one finite logprob each, at the sampling
temperature, or raises. The stop token stays in `token_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeAlias, runtime_checkable

from annotated_types import Ge, Gt, Le, Lt

from agentenv.core.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt, check_bounds
from agentenv.core.messages import JsonValue, Message

__all__ = [
    "ChatCompletion",
    "ChatEngine",
    "Completion",
    "Connected",
    "Engine",
    "FinishReason",
    "MayBeUntrainable",
    "Sampling",
    "Usage",
]

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why one completion ended: a stop token, the length, or the engine gave up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of one completion are drawn.

    Raises:
        UsageError: A value is outside its range.
    """

    temperature: NonNegativeFloat = 1.0
    """0 means greedy: for evaluation only, its logprobs are those at T = 1."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: NonNegativeInt = 0
    """0 means no limit."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    max_tokens: PositiveInt = 1024
    """The runner lowers it to what the budgets leave."""
    seed: int | None = None
    """Seed of this request; the runner derives it from run seed, task, member and turn."""
    adapter: str | None = None
    """Name of a LoRA; the base model when None."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def untrainable_reason(self) -> str:
        """Why completions drawn this way must not be trained on; empty if they may."""
        if self.temperature == 0:
            return "sampled at temperature 0: a greedy sample has no gradient estimate"
        if self.top_p < 1 or self.top_k > 0 or self.min_p > 0:
            return "sampled from a cut distribution (top_p, top_k or min_p): importance ratios are biased"
        return ""

    def record(self) -> dict[str, JsonValue]:
        """Return the values as plain JSON for a turn's record."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one prompt."""

    token_ids: tuple[int, ...]
    """As sampled, the stop token included."""
    logprobs: tuple[float, ...]
    """One for each token: natural log at the sampling temperature (at T = 1 for greedy)."""
    finish_reason: FinishReason
    version_ranges: tuple[tuple[int, int, int], ...] = ()
    """`(weights_version, start, end)` in order, covering the tokens."""
    queue_s: float = 0.0
    """Time before the request was worked on."""
    sampled_by_policy: bool = True
    """False if another model than the policy wrote the tokens: recorded, never trained."""


class Engine(Protocol):
    """Makes tokens from tokens. Safe to call many times at once from one event loop."""

    name: str
    """The model string, for records."""
    weights_version: int
    """Version of the weights that sample now; raised by each update."""
    max_context_tokens: int | None
    """The model's own limit of prompt and completion together."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Completion:
        """Sample one completion.

        Args:
            prompt_ids: the whole context, always; read only.
            sampling: how to draw.
            stop_token_ids: ids that end the completion; the one sampled stays in it.
            session_id: episode id, a hint for caches and routing; a miss is never an error.
            deadline_s: seconds from now after which the engine gives up ("abort").

        Raises:
            EngineError: No completion with exact tokens and logprobs could be made.
        """
        ...

    async def release(self, session_id: str) -> None:
        """Forget what is cached for an episode."""
        ...

    async def close(self) -> None:
        """Free everything the engine holds; may be called twice."""
        ...


@runtime_checkable
class Connected(Protocol):
    """An engine with connections that belong to an event loop; it makes others on the next loop."""

    async def disconnect(self) -> None:
        """Close them before the loop ends."""
        ...


@runtime_checkable
class MayBeUntrainable(Protocol):
    """An engine whose completions may be of no use for training, for example without exact logprobs."""

    @property
    def untrainable_reason(self) -> str:
        """Why its completions must not be trained on; empty if they may."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as an API counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """What a chat API answered."""

    message: Message
    usage: Usage
    finish_reason: FinishReason


@runtime_checkable
class ChatEngine(Protocol):
    """A model that only speaks text: evaluation only, its episodes are not trainable."""

    name: str
    max_context_tokens: int | None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        *,
        deadline_s: float | None = None,
    ) -> ChatCompletion:
        """Answer a conversation.

        Raises:
            EngineError: The API gave no usable answer.
        """
        ...

    async def close(self) -> None:
        """Free everything the engine holds; may be called twice."""
        ...
