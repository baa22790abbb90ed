"""An engine that plays a script, for tests of environments, runners and trainers.

A script is a list of turns, which each episode plays from the start, or a function of the request.
A turn is text, an assistant message, token ids, or a `ScriptedTurn`. The latter can also play faults:
abort, leave out log-probabilities, raise an error, or wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from agentenv.core.errors import ContextTooLong, EngineError, UsageError
from agentenv.core.images import ImageTokens
from agentenv.core.messages import Message, text_of
from agentenv.core.playing import writing
from agentenv.engine.interface import Completion, Features, FinishReason, OnTokens, Sampling
from agentenv.engine.stops import cut_at_stop

__all__ = [
    "ScriptedEngine",
    "ScriptedPolicy",
    "ScriptedRequest",
    "ScriptedTurn",
    "TextCodec",
    "TurnLike",
]


class TextCodec(Protocol):
    """The part of a tokenizer that an engine without a model needs."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedTurn:
    """A completion to play, with exactly one of `text`, `message`, `token_ids` and `error`."""

    text: str | None = None
    """Text of the completion, which is encoded and gets a stop token at its end."""
    message: Message | None = None
    """An assistant message, which the chat template of the request writes; without one, calls are written as
    `<tool_call>` JSON after the text."""
    token_ids: Sequence[int] | None = None
    """Token ids of the completion, to which nothing is added."""
    error: Exception | None = None
    """An error that is raised in place of an answer."""
    logprobs: Sequence[float] | None = None
    """Log-probabilities of the tokens, right or faulty; `()` leaves them out."""
    finish_reason: FinishReason | None = None
    """The finish reason; it follows from the last token if None."""
    close: bool = True
    """Whether a stop token is added to text and messages."""
    delay_s: float = 0.0
    """Seconds that the completion takes."""
    gate: asyncio.Event | None = None
    """An event for which the completion waits."""
    sampled_by_policy: bool = True
    """Whether the completion counts as sampled by the policy."""

    def __post_init__(self) -> None:
        parts = [part for part in (self.text, self.message, self.token_ids, self.error) if part is not None]
        if len(parts) != 1:
            raise UsageError(
                f"a ScriptedTurn takes exactly one of text, message, token_ids and error; got {len(parts)}"
            )


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A request that the engine received."""

    prompt_ids: tuple[int, ...]
    prompt_text: str
    """The decoded prompt; empty if the engine has no tokenizer."""
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    session_id: str | None
    deadline_s: float | None
    turn: int
    """Number of earlier requests of the same episode."""


TurnLike: TypeAlias = "str | Message | Sequence[int] | ScriptedTurn"
ScriptedPolicy: TypeAlias = Callable[[ScriptedRequest], "TurnLike | Awaitable[TurnLike]"]


class ScriptedEngine:
    """Plays a script as if a model had sampled it.

    Example:
        >>> from agentenv.engine import Sampling, ScriptedEngine
        >>> engine = ScriptedEngine([[72, 105]])
        >>> asyncio.run(engine.generate([1], Sampling(), stop_token_ids=(105,))).finish_reason
        'stop'

    Args:
        script: list of turns, which each session plays from the start, or a function from request to turn.
        tokenizer: tokenizer for text and messages; not needed if all turns are token ids.
        name: the model string, which is stored in records.
        logprob: log-probability of each token of turns that have none.
        repeat_last: repeat the last turn at the end of the script; otherwise a further turn is an error.
        weights_version: weights version of the tokens.
        max_context_tokens: context limit, like that of a model; None means no limit.
    """

    keeps_requests = True
    """Whether requests and releases are kept, for tests; a run has too many of them."""

    def __init__(
        self,
        script: Sequence[TurnLike] | ScriptedPolicy,
        *,
        tokenizer: TextCodec | None = None,
        name: str = "scripted",
        logprob: float = -0.5,
        repeat_last: bool = False,
        weights_version: int = 0,
        max_context_tokens: int | None = None,
    ) -> None:
        self.name = name
        self.weights_version = weights_version
        self.max_context_tokens = max_context_tokens
        self.requests: list[ScriptedRequest] = []
        """All requests in the order of their arrival."""
        self.released: list[str] = []
        """Ids of the released sessions in order."""
        self.closed = False
        self._script = script
        self._tokenizer = tokenizer
        self._logprob = logprob
        self._repeat_last = repeat_last
        self._turns: dict[str | None, int] = {}

    @property
    def features(self) -> Features:
        """Its script decides what images show and what follows a grammar."""
        return Features(images=True, grammars=True, stream=self.stream)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
        images: Sequence[ImageTokens] = (),
    ) -> Completion:
        """Play the next turn, whatever the images show; see `agentenv.engine.Engine`.

        Raises:
            EngineError: The script has no further turn.
            ContextTooLong: The prompt leaves no room for a token under `max_context_tokens`.
        """
        turn = self._turns.get(session_id, 0)
        self._turns[session_id] = turn + 1
        prompt = tuple(prompt_ids)
        text = "" if self._tokenizer is None else self._tokenizer.decode(prompt)
        stops = tuple(stop_token_ids)
        request = ScriptedRequest(prompt, text, sampling, stops, session_id, deadline_s, turn)
        if self.keeps_requests:
            self.requests.append(request)
        room = sampling.token_limit
        if self.max_context_tokens is not None:
            room = min(room, self.max_context_tokens - len(prompt))
            if room < 1:
                raise ContextTooLong(
                    f"the prompt has {len(prompt)} tokens, and the limit is {self.max_context_tokens}"
                )
        play = as_turn(await self._next(request))
        if not await _wait(play, deadline_s):
            return Completion((), (), "abort")
        if play.error is not None:
            raise play.error
        return self._complete(play, request, room)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_tokens: OnTokens, **request: Any
    ) -> Completion:
        """Play the next turn and tell its tokens; see `agentenv.engine.Features`."""
        completion = await self.generate(prompt_ids, sampling, **request)
        for token_id in completion.token_ids:
            on_tokens((token_id,))
            await asyncio.sleep(0)  # so that others may run in between
        return completion

    async def release(self, session_id: str) -> None:
        """Record the release of a session; its script starts again if the id is used again."""
        if self.keeps_requests:
            self.released.append(session_id)
        self._turns.pop(session_id, None)

    async def close(self) -> None:
        """Record that the engine was closed."""
        self.closed = True

    async def _next(self, request: ScriptedRequest) -> TurnLike:
        if callable(self._script):
            turn = self._script(request)
            if isinstance(turn, Awaitable):
                return await turn
            return turn
        if request.turn < len(self._script):
            return self._script[request.turn]
        if self._repeat_last and self._script:
            return self._script[-1]
        raise EngineError(
            f"the script has {len(self._script)} turns, but turn {request.turn + 1} was requested",
            remedy="add turns to the script, or pass repeat_last=True",
        )

    def _complete(self, play: ScriptedTurn, request: ScriptedRequest, room: int) -> Completion:
        whole = self._tokens(play, request.stop_token_ids)
        tokens, found = self._cut(whole[:room], request.sampling)
        reason = play.finish_reason
        if reason is None or len(tokens) < len(whole):
            stopped = found or (bool(tokens) and tokens[-1] in request.stop_token_ids)
            reason = "stop" if stopped else "length"
        given, most = play.logprobs, len(tokens) if found else room
        logprobs = [self._logprob] * len(tokens) if given is None else list(given)[:most]
        ranges = ((self.weights_version, 0, len(tokens)),) if tokens else ()
        return Completion(
            tuple(tokens), tuple(logprobs), reason, ranges, sampled_by_policy=play.sampled_by_policy
        )

    def _cut(self, tokens: list[int], sampling: Sampling) -> tuple[list[int], bool]:
        """Return the tokens up to a stop string of the request, and whether one ended them."""
        if not sampling.stop:
            return tokens, False
        if self._tokenizer is None:
            raise UsageError(
                f"{self.name} cannot find the stop strings {list(sampling.stop)}: it has no tokenizer",
                remedy="pass tokenizer=",
            )
        return cut_at_stop(tokens, sampling.stop, self._tokenizer.decode)

    def _tokens(self, play: ScriptedTurn, stops: tuple[int, ...]) -> list[int]:
        if play.token_ids is not None:
            return list(play.token_ids)
        if play.message is not None and (write := writing.get()) is not None:
            ids = write(play.message)
            return ids if play.close else ids[:-1]
        if self._tokenizer is None:
            raise UsageError("the script has text, but the engine has no tokenizer", remedy="pass tokenizer=")
        text = play.text if play.message is None else turn_text(play.message)
        tokens = self._tokenizer.encode(text or "")
        ends = stops or self._tokenizer.eos_token_ids
        return [*tokens, ends[0]] if play.close and ends else tokens


def as_turn(turn: TurnLike) -> ScriptedTurn:
    """Return any form of turn as a ScriptedTurn."""
    if isinstance(turn, ScriptedTurn):
        return turn
    if isinstance(turn, str):
        return ScriptedTurn(text=turn)
    if isinstance(turn, dict):
        return ScriptedTurn(message=turn)
    return ScriptedTurn(token_ids=tuple(turn))


def turn_text(message: Message) -> str:
    """Return the text that a model with the `<tool_call>` grammar writes for an assistant message."""
    parts = [text_of(message)] if text_of(message) else []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        parts.append(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


async def _wait(play: ScriptedTurn, deadline_s: float | None) -> bool:
    """Wait as the turn requires; return False if the deadline passes first."""
    if play.gate is None and not play.delay_s:
        return True
    try:
        async with asyncio.timeout(deadline_s):
            if play.gate is not None:
                await play.gate.wait()
            await asyncio.sleep(play.delay_s)
    except TimeoutError:
        return False
    return True
