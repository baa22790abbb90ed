"""The interface to every model: an engine takes token ids and returns sampled tokens with logprobs.

An engine returns exactly the tokens it sampled, each with one finite logprob at the sampling
temperature, or it raises an error. The stop token stays in `token_ids`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol, TypeAlias, runtime_checkable

from annotated_types import Ge, Gt, Le, Lt

from agentenv.core.errors import UsageError
from agentenv.core.fields import NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields
from agentenv.core.images import ImageTokens
from agentenv.core.limits import MAX_TOKENS_PER_TURN
from agentenv.core.messages import JsonValue, Message
from agentenv.core.routed_experts import RoutedExperts
from agentenv.core.supports import Supports
from agentenv.engine.findings import EngineFinding

__all__ = [
    "ChatCompletion",
    "ChatEngine",
    "Completion",
    "Engine",
    "Features",
    "FinishReason",
    "OnTokens",
    "Sampling",
    "Usage",
    "features_of",
    "policy_of",
    "refuse_grammar",
    "shown",
]

OWN_ADAPTER = ""
"""Value of `Sampling.adapter` in requests that leave the choice to the engine."""

NOT_KEPT = (
    "sampled from a cut distribution (top_p, top_k or min_p) whose supports were not kept, so that "
    "importance ratios would be biased: sample with keep_support=true"
)
"""Why completions without supports must not be trained on."""
NOT_RETURNED = (
    "sampled from a cut distribution (top_p, top_k or min_p), and the engine does not return its supports, "
    "so that importance ratios would be biased: use hf: or vLLM, or leave top_p, top_k and min_p out"
)
NOT_IN_GRAMMAR = (
    "sampled by a grammar without supports, so that importance ratios would be biased: sample with "
    "keep_support=true and top_k, for example top_k=100"
)

FinishReason: TypeAlias = Literal["stop", "length", "abort", "content_filter"]
"""Why a completion ended: `stop` (a stop token or a stop string), `length` (the limit), `abort` (the engine
gave up), or `content_filter` (a chat API withheld the answer or refused the conversation)."""

OnTokens: TypeAlias = "Callable[[Sequence[int]], None]"
"""Function that is told the next tokens of a completion, on the event loop of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for sampling the tokens of one completion.

    Raises:
        UsageError: A value is outside its range.
    """

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 means greedy, which is for evaluation only and returns logprobs at T = 1."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the likeliest tokens whose probabilities sum to this; 1 means all tokens."""
    top_k: NonNegativeInt = 0
    """Sample from this many likeliest tokens; 0 means no limit."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Leave out tokens less likely than this share of the likeliest token; 0 leaves out none."""
    keep_support: bool = False
    """Whether the engine returns with each token those that top-p, top-k and min-p left, as training needs.
    It changes nothing where they cut nothing. Records become larger, and vLLM slower."""
    max_tokens: PositiveInt | None = None
    """Most tokens of the completion; the runner lowers it to what the budgets leave. None means all of it."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion. The token that completes one is the last; it stays as it was sampled."""
    seed: int | None = None
    """Seed of the request; the runner derives it from run seed, task, member and turn."""
    grammar: str = ""
    """Grammar in Lark's form, as llguidance reads it, that the completion must follow; empty for none. Tokens
    that it excludes are no part of the distribution, so that it is cut (`is_cut`)."""
    adapter: str | None = OWN_ADAPTER
    """Name of a LoRA adapter; None means the base model. The default, an empty text, means what the engine
    was opened with: the adapter that its model string names, or else the base model."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "stop", tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(
                    f"stop has {text!r}, which is no text that can end a completion",
                    remedy="list texts of at least one character",
                )

    @property
    def token_limit(self) -> int:
        """Most tokens of the completion: `max_tokens`, or 1,024 for an engine that nobody gave a limit."""
        return self.max_tokens or MAX_TOKENS_PER_TURN

    @property
    def untrainable_reason(self) -> str:
        """Why completions sampled with these settings must not be trained on; empty if they may be.

        Those of a cut distribution may be if they have supports; see `Completion.unfit_for_training`.
        """
        if self.temperature == 0:
            return "sampled at temperature 0: a greedy sample has no gradient estimate"
        return ""

    @property
    def is_cut(self) -> bool:
        """Whether top-p, top-k, min-p or a grammar may leave out tokens."""
        cuts = self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or bool(self.grammar)
        return self.temperature > 0 and cuts

    @property
    def wants_support(self) -> bool:
        """Whether the engine should return the support of each token.

        A grammar leaves most of the vocabulary inside a text, which is too much to record. Whether a
        completion has supports must not depend on what was sampled, so those of a grammar need top-k.
        """
        return self.keep_support and self.is_cut and (not self.grammar or self.top_k > 0)

    def adapter_or(self, own: str | None) -> str | None:
        """Return the adapter to sample with, or None for the base model.

        Args:
            own: the adapter that the engine was opened with, which serves requests that name none.
        """
        return own if self.adapter == OWN_ADAPTER else self.adapter

    def record(self) -> dict[str, JsonValue]:
        """Return the settings as plain JSON for the record of a turn."""
        settings = {name: getattr(self, name) for name in self.__slots__ if name != "grammar"}
        return {**settings, "stop": list(self.stop), **({"grammar": self.grammar} if self.grammar else {})}


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that an engine sampled for one prompt."""

    token_ids: tuple[int, ...]
    """The token ids as sampled, the stop token included."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each token at the sampling temperature (at T = 1 for greedy)."""
    finish_reason: FinishReason
    version_ranges: tuple[tuple[int, int, int], ...] = ()
    """Ranges `(weights_version, start, end)` in order, which cover all tokens; none where the version did not
    change after the request came."""
    queue_s: float = 0.0
    """Seconds that the request waited before the engine began to work on it."""
    sampled_by_policy: bool = True
    """False if a model other than the policy wrote the tokens, which are then recorded but not trained on."""
    vocab_size: int | None = None
    """Size of the vocabulary of the model that sampled the tokens; None if the engine does not know it."""
    replayed: bool = False
    """True if the completion is from a record, so an earlier request's settings and model apply to it."""
    routed_experts: RoutedExperts | None = None
    """Experts that the tokens of prompt and completion were sent to, but the last one, which the model has
    not seen as input; None if the engine does not tell them."""
    supports: Supports | None = None
    """The tokens that each token was sampled from; None if from the whole vocabulary, or if the request did
    not ask for them, or the engine cannot return them."""
    no_supports: str = ""
    """Why there are no supports although the tokens were sampled from a cut distribution."""

    def cut(self, size: int) -> Completion:
        """Return the completion of the first tokens, without the experts, which are of the whole."""
        ranges = ((v, start, min(end, size)) for v, start, end in self.version_ranges if start < size)
        return replace(
            self,
            token_ids=self.token_ids[:size],
            logprobs=self.logprobs[:size],
            version_ranges=tuple(ranges),
            routed_experts=None,
            supports=None if self.supports is None else self.supports.cut(0, size),
        )

    def unfit_for_training(self, asked: Sampling) -> str:
        """Return why missing supports forbid to train on the tokens; empty if they may be trained on.

        Args:
            asked: the settings of the request. A replayed completion had others.
        """
        if self.supports is not None or not self.sampled_by_policy:
            return ""
        if self.no_supports or self.replayed or not asked.is_cut:
            return self.no_supports
        if asked.grammar and not asked.wants_support:
            return NOT_IN_GRAMMAR
        return NOT_KEPT if not asked.keep_support else NOT_RETURNED


async def _nothing(*_: object) -> None:
    """Do nothing, for engines that have nothing to do there."""


def _unknown(context_tokens: int) -> None:
    """Say that nothing is known, for engines that do not know the size of their cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What an engine can do beyond sampling one completion; the defaults are those of one that can no more.

    An engine around another one begins with the other's features and names only what it does otherwise, as in
    `replace(features_of(inner), stream=None)`, so that it forgets none.
    """

    images: bool = False
    """Whether its model sees images: `generate` and `stream` then take `images`, those of the prompt at their
    places."""
    grammars: bool = False
    """Whether it samples by `Sampling.grammar`; other engines refuse it (`refuse_grammar`)."""
    forms: bool = False
    """Whether `chat` takes `form`, an `agentenv.render.protocol.ReplyForm`, and asks its API for it."""
    experts: bool = False
    """Whether completions tell to which experts of a mixture their tokens were sent (`routed_experts`)."""
    untrainable: str = ""
    """Why its completions must not be trained on, for example because their logprobs are not exact."""
    stream: Callable[..., Awaitable[Completion]] | None = None
    """Samples as `Engine.generate` does, and tells its third argument, an `OnTokens`, the tokens as they are
    sampled. What that was told is the beginning of the completion; where it cannot be, because the request
    had to be sampled again, this raises an `EngineError`. None if all tokens come at once."""
    policy: Engine | None = None
    """The engine that gets the weights of the trainer, if it is one that this engine is around."""
    disconnect: Callable[[], Awaitable[None]] = _nothing
    """Closes the connections of this event loop before it ends; the engine opens new ones on the next."""
    rest: Callable[[], Awaitable[None]] = _nothing
    """Frees its memory while a trainer updates, if the user wants it; no request may be in flight."""
    wake: Callable[[bool], Awaitable[None]] = _nothing
    """Takes the memory back. Its argument says whether new weights are brought next: if they are not, it also
    reads weights again that it dropped."""
    servers: Callable[[], list[dict[str, Any]]] = list
    """Returns a row for each server, as this process sees it; any thread may call it. The keys are `server`
    (host and port), `used`, `sessions` (episodes that belong to it), `in_flight` (requests), `failures` (how
    often it was taken out of use), `version` (of its weights, None while it is not used) and `problem` (why
    it is not used)."""
    examined: Callable[[], dict[str, Any]] = dict
    """Returns what it found out about its servers, as JSON values; the same engine in another process takes
    that as its option `examined`."""
    metrics: Callable[[], dict[str, float]] = dict
    """Returns what was spent so far, as metrics."""
    turn_tokens: int = MAX_TOKENS_PER_TURN
    """Tokens that end a turn where nobody limits them."""
    sampled: Callable[[], int] | None = None
    """Returns how many tokens it has sampled, in unfinished completions too; any thread may call it."""
    examine: Callable[[], Awaitable[Sequence[EngineFinding]]] | None = None
    """Asks its API what it can do, for `agentenv doctor -m`; None if one answer says enough."""
    episodes_at_once: Callable[[int], int | None] = _unknown
    """Returns how many episodes of this many tokens its cache holds; None if that is not known."""


class Engine(Protocol):
    """A model that continues token ids; many calls may run at once on one event loop.

    An engine that is a subclass needs `name` and `generate` only; one of the same shape need not be one.
    """

    name: str
    """The model string, which is stored in records."""
    max_context_tokens: int | None = None
    """Limit of the model for prompt and completion together; None if there is none or it is unknown."""

    # A property, so that it may be an attribute or a property of the engine; a subclass finds its value here.
    @property
    def weights_version(self) -> int:
        """Version of the weights that are in use now; each update raises it."""
        return vars(self).get("weights_version", 0)

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        vars(self)["weights_version"] = version

    @property
    def features(self) -> Features:
        """What it can do beyond this class."""
        return Features()

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
            prompt_ids: the whole context; the engine must not change it.
            sampling: the sampling settings.
            stop_token_ids: ids that end the completion; the sampled one stays in it. If there are none, only
                `Sampling.stop` and the limit of tokens end it.
            session_id: id of the episode, used for caches and routing; an unknown id is not an error.
            deadline_s: seconds after which the engine gives up and returns "abort".

        Raises:
            EngineError: The engine could not return exact tokens with logprobs. The runner raises it
                too if there are more tokens than `max_tokens`, if tokens follow a stop token or a stop
                string, or if "stop" is the finish reason without one.
            UsageError: The engine cannot find the stop strings of the sampling settings.
        """
        ...

    async def release(self, session_id: str) -> None:
        """Forget everything that is cached for an episode."""

    async def close(self) -> None:
        """Free everything the engine holds; may be called twice."""


NOTHING_MORE = Features()


def features_of(engine: object) -> Features:
    """Return what an engine can do; one that does not say can do nothing more than its class asks for."""
    return getattr(engine, "features", NOTHING_MORE)


def policy_of(engine: Engine) -> Engine:
    """Return the engine that gets the weights of the trainer, which may be inside another one."""
    return features_of(engine).policy or engine


def shown(images: Sequence[ImageTokens]) -> dict[str, Any]:
    """Return the arguments of a request for its images; none without images, for engines that take none."""
    return {"images": tuple(images)} if images else {}


def refuse_grammar(name: str, sampling: Sampling) -> None:
    """Refuse a grammar, for engines that follow none.

    Raises:
        UsageError: The settings have a grammar.
    """
    if sampling.grammar:
        raise UsageError(
            f"{name} cannot sample by a grammar",
            remedy="use an hf: model or a vLLM server with guidance, or leave it out",
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and cost as an API reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """The answer of a chat API."""

    message: Message
    usage: Usage
    finish_reason: FinishReason
    malformed: str = ""
    """What the model is told about a call that it wrote and the API could not read; the message has what is
    left of it. Empty if there is no such call."""


@runtime_checkable
class ChatEngine(Protocol):
    """A model that returns text only; its episodes can be evaluated but not trained on."""

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
        """Return the answer to a conversation.

        Raises:
            EngineError: The API returned no usable answer.
        """
        ...

    async def close(self) -> None:
        """Free everything the engine holds; may be called twice."""
        ...
