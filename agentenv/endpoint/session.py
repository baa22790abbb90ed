"""One agent's conversation with the model, over however many requests, sub-agents and retries.

1. A request that goes on from a recorded reply appends to the recorded tokens. Nothing that was sampled is
   decoded and encoded again.
2. Every other request begins a new sequence: `forked` from an older reply whose tokens it shares, `parallel`
   to a request that is being answered, `tools` or `system` if these were changed, `edited` if it contains
   replies that were not recorded, and `new` otherwise, as that of a sub-agent.
3. A request that a client repeats because it gave up waiting gets the reply to the first one.
4. A client that hangs up does not end sampling. A reply that nobody received is recorded and never trained.
5. Limits refuse a request with an error that SDKs do not repeat. A full context ends no episode, because the
   agent may shorten its conversation and go on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from agentenv.core.episode_env import derive_seed
from agentenv.core.errors import ContextTooLong, EngineUnavailable, RenderError, UsageError
from agentenv.core.limits import RunLimits, least, max_tokens_left
from agentenv.core.messages import IMAGE_TOKENS, JsonValue, Message, images_in, text_of
from agentenv.core.playing import CurrentEpisode, playing, writing
from agentenv.core.trajectory import StopReason
from agentenv.endpoint.canonical import canonical, digest
from agentenv.endpoint.captured import Captured, CapturedTurn, Choice, capture
from agentenv.endpoint.live import Flight, LiveAnswer, Told
from agentenv.endpoint.matching import Node
from agentenv.endpoint.placing import Place, Placer
from agentenv.endpoint.request import Answer, Asked, NotAnswered
from agentenv.endpoint.share import Share
from agentenv.endpoint.taken import (
    Taken,
    as_sent,
    calls_of,
    chat,
    complete,
    formed,
    permitted,
    size_of,
    with_beginning,
)
from agentenv.engine.exact import checked
from agentenv.engine.interface import (
    ChatCompletion,
    ChatEngine,
    Completion,
    Engine,
    Sampling,
    features_of,
)

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer

__all__ = ["Session", "SessionOptions"]

_MAX_KEPT_ANSWERS = 64
"""Number of answers that are kept for clients that repeat a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Settings of a session."""

    name: str = "session"
    """Name under which the engine keeps its caches."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling settings, which replace those of the client; its token limit and stop strings hold too."""
    limits: RunLimits = field(default_factory=RunLimits)
    choice: Choice = "main"
    """Which sequences are trained."""
    seed_of: Callable[[int], int | None] = lambda turn: None
    """Returns the seed of a request by its number."""
    announce: Callable[[Sequence[Message], Sequence[Mapping[str, JsonValue]]], CurrentEpisode | None] = (
        lambda messages, tools: None
    )
    """Returns what engines without a model may know of the episode."""
    time_left: Callable[[], float | None] = lambda: None
    """Returns the seconds that a generation may take; None without a limit."""


class Session:
    """Answers the requests of one agent and keeps what the model sampled.

    Args:
        engine: the model.
        renderer: turns messages into tokens and back; None with an engine that only speaks text.
        options: settings.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine,
        renderer: Renderer | None = None,
        options: SessionOptions | None = None,
    ) -> None:
        self.options = options or SessionOptions()
        self._placer = Placer(renderer)
        self.share = Share(self.options.name)
        """Where the requests are read and placed, one after the other."""
        self.stop: StopReason | None = None
        """Limit that refused a request; None while none did."""
        self.failure: BaseException | None = None
        """What the engine raised last."""
        self.refused = ""
        """Code of the error with which the last request was refused; empty if it was answered."""
        self.refusal = ""
        """Words with which a request was refused last; empty if none was."""
        self.changed = asyncio.Event()
        """Set whenever a request begins, ends or is refused."""
        self.counts: Counter[str] = self._placer.counts
        """How often requests began a sequence, were repeated, or had settings that are ignored."""
        self._engine = engine
        # Checks against protocols are slow, so this one is made once.
        self._token_engine = None if isinstance(engine, ChatEngine) else engine
        self._speaks_text = renderer is None
        limits = self.options.limits
        self._max_context = least(limits.max_context_tokens, engine.max_context_tokens)
        self._names: set[str] = set()
        self._flights: dict[bytes, Flight] = {}
        self._answers: dict[int, Answer] = {}
        self._said: dict[bytes, Message] = {}
        self._running = 0
        self._asked = 0
        self._sampled = 0
        self._closed = False

    @property
    def busy(self) -> bool:
        """True while the model answers a request."""
        return self._running > 0

    @property
    def untrainable_reason(self) -> str:
        """Why the session must not be trained on; empty if it may be."""
        if self._speaks_text:
            return f"{self._engine.name} only speaks text: it returns no token ids and logprobs"
        engine = self._engine
        own = features_of(engine).untrainable
        return own or self.options.sampling.untrainable_reason

    def captured(self) -> Captured:
        """Return the record of the session so far."""
        return capture(self._placer.sequences, self.options.choice)

    async def ask(
        self, asked: Asked, is_gone: Callable[[], bool] = lambda: False, told: Told | None = None
    ) -> Answer:
        """Answer a request.

        Args:
            asked: the request.
            is_gone: returns whether the client has hung up.
            told: is told what is certain of the answer while it is sampled, if the request wants a stream and
                the engine can say it.

        Raises:
            NotAnswered: The request is refused, or the model failed.
        """
        flight = self._repeated(asked)
        if flight is None:
            self._check_open()
            live = LiveAnswer() if asked.stream else None
            task = asyncio.get_running_loop().create_task(self._answer(asked, live))
            flight = self._flights[asked.digest] = Flight(task, is_gone, live)
            for old in list(self._flights)[: max(0, len(self._flights) - _MAX_KEPT_ANSWERS)]:
                if self._flights[old].task.done():
                    del self._flights[old]
        flight.is_gone = is_gone
        if told is not None and flight.live is not None:
            flight.live.join(told)
        # The sampling goes on if this wait is cancelled, because its client may ask again.
        try:
            turn = await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.task.cancelled():
                raise NotAnswered(400, "episode_over", "the episode is over") from None
            raise
        finally:
            if told is not None and flight.live is not None:
                flight.live.leave(told)
        return self._answers[turn.number]

    @property
    def turns(self) -> Sequence[CapturedTurn]:
        """Replies of the model, in the order in which they were recorded."""
        return self._placer.turns

    def delivered(self, answer: Answer) -> None:
        """Note that a client received an answer; what nobody received is not trained."""
        self.turns[answer.number].delivered = True

    async def close(self) -> None:
        """End the requests that are being answered; no request is answered afterwards."""
        self._closed = True
        running = [flight.task for flight in self._flights.values() if not flight.task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def release(self) -> None:
        """Let the engine forget the session."""
        if self._token_engine is not None:
            for name in sorted(self._names):
                await self._token_engine.release(name)

    async def count_tokens(self, asked: Asked) -> int:
        """Return the number of tokens of a conversation."""
        return await self.share.run(asked.size, self._count, asked)

    def _count(self, asked: Asked) -> int:
        renderer = self._placer.bound(asked.tools)
        if renderer is None:
            images = sum(images_in(message.get("content")) for message in asked.messages)
            return images * IMAGE_TOKENS + sum(len(text_of(message)) for message in asked.messages) // 4
        return len(renderer.start(asked.messages))

    # Requests -----------------------------------------------------------------------------

    def _repeated(self, asked: Asked) -> Flight | None:
        """Return the earlier request that this one repeats; None if it is another one.

        Equal requests of clients that both wait are two requests: the agent wants two samples.
        """
        flight = self._flights.get(asked.digest)
        if flight is None or flight.failed:
            return None
        received = flight.task.done() and flight.task.result().delivered
        if not asked.retry and (received or not flight.is_gone()):
            return None
        self.counts["repeated_requests"] += 1
        return flight

    def _check_open(self) -> None:
        """Refuse a request if a limit is reached.

        Raises:
            NotAnswered: A limit is reached, or the episode has ended.
        """
        if self._closed:
            raise NotAnswered(400, "episode_over", "the episode is over")
        reason, limit = self.options.limits.reached(self._asked, self._sampled)
        if reason is not None:
            raise self._stopped(reason, limit)
        if (left := self.options.time_left()) is not None and left <= 0:
            raise self._stopped(StopReason.DEADLINE, "the deadline")

    def _stopped(self, reason: StopReason, limit: str) -> NotAnswered:
        self.stop = self.stop or reason
        self.changed.set()
        return NotAnswered(400, "episode_over", f"the episode ends here, because it reached {limit}")

    async def _answer(self, asked: Asked, live: LiveAnswer | None) -> CapturedTurn:
        """Answer a request, in a task of its own that no client can cancel."""
        number = self._asked
        self._asked += 1
        self._running += 1
        self.refused = ""
        self.changed.set()
        self.counts.update(f"ignored_{name}" for name in asked.ignored)
        place: Place | None = None
        try:
            place = await self.share.run(asked.size, self._placer.place, asked)
            return await self._sample(asked, place, number, live)
        except (RenderError, UsageError) as error:
            self._asked -= 1
            raise NotAnswered(400, "invalid_request", str(error)) from error
        except ContextTooLong as error:
            self._asked -= 1
            self.refused = "context_length_exceeded"
            raise NotAnswered(400, "context_length_exceeded", str(error)) from error
        except NotAnswered:
            raise
        except Exception as error:
            self.failure = error
            raise NotAnswered(503, "engine_failed", f"the model failed: {error}", retry=True) from error
        finally:
            if place is not None:
                await self.share.run(0, self._placer.free, place)
            self._running -= 1
            self.changed.set()

    # Sampling -----------------------------------------------------------------------------

    def _sampling(self, asked: Asked, number: int, prompt_tokens: int) -> Sampling:
        """Return the sampling settings of a request.

        Raises:
            ContextTooLong: The conversation leaves no room for an answer.
        """
        own, limits = self.options.sampling, self.options.limits
        room = None if self._max_context is None else self._max_context - prompt_tokens
        if room is not None and room < limits.min_answer_tokens:
            raise ContextTooLong(
                f"this model's maximum context length is {self._max_context} tokens, and the prompt is too "
                f"long: it has {prompt_tokens} tokens"
            )
        left = max_tokens_left(limits, least(own.max_tokens, asked.max_tokens), room, self._sampled)
        stop = tuple(dict.fromkeys((*own.stop, *asked.stop)))
        seed = self.options.seed_of(number)
        if asked.seed is not None:
            # Members of a group must differ, so the seed of a client counts within its episode.
            seed = derive_seed(self.options.seed_of(0) or 0, "client", asked.seed)
        return replace(own, max_tokens=max(left, 1), stop=stop, seed=own.seed if seed is None else seed)

    async def _sample(self, asked: Asked, place: Place, number: int, live: LiveAnswer | None) -> CapturedTurn:
        began = time.perf_counter()
        prompt = place.sequence.token_ids
        prompt_tokens = len(prompt)
        plain = self._sampling(asked, number, prompt_tokens)
        sampling = formed(plain, asked, place, self._engine, self.counts)
        known = self.options.announce(asked.messages, asked.tools)
        if known is not None:
            playing.set(known)
        left = self.options.time_left()
        engine, renderer, version = self._token_engine, place.renderer, 0
        if engine is None or renderer is None:
            told = list(map(self._as_said, asked.messages))
            sampled = await chat(self._engine, asked, told, sampling, left=left, counts=self.counts)
            reply, calls, finish_reason = sampled.message, calls_of(sampled.message), sampled.finish_reason
        else:
            version = engine.weights_version
            on_tokens = None
            if live is not None:
                cached = prompt_tokens - len(place.new_ids)
                on_tokens = live.reader(renderer.follow(sampling.stop), prompt_tokens, cached)
            name = self._name_of(place.number)
            writing.set(renderer.write)
            sampled = await complete(
                engine,
                prompt,
                sampling,
                renderer=renderer,
                name=name,
                left=left,
                on_tokens=on_tokens,
                images=place.images,
            )
            self._refuse_abort(sampled)
            sampled = checked(sampled, sampling, renderer, turn=number)
            parsed = renderer.parse(sampled.token_ids)
            reply, calls, finish_reason = parsed.message, parsed.tool_calls, sampled.finish_reason
        reply, calls = permitted(asked, reply, calls, self.counts)
        taken = Taken(sampled, reply, calls, finish_reason, sampling, version, time.perf_counter() - began)
        return await self.share.run(0, self._record, asked, place, taken, prompt_tokens)

    def _refuse_abort(self, sampled: Completion) -> None:
        """Refuse a completion that the engine gave up.

        Raises:
            NotAnswered: The deadline of the episode has passed.
            EngineUnavailable: The engine gave up for another reason.
        """
        if sampled.finish_reason != "abort":
            return
        left = self.options.time_left()
        if left is not None and left < 0.05:
            raise self._stopped(StopReason.DEADLINE, "its deadline")
        raise EngineUnavailable("the engine aborted the completion")

    def _record(self, asked: Asked, place: Place, taken: Taken, prompt_tokens: int) -> CapturedTurn:
        """Record a reply in its place."""
        placer, match, sampled = self._placer, place.match, taken.sampled
        number, first = len(placer.turns), not place.sequence.turns
        message, stop = as_sent(taken)
        calls = placer.names.give(taken.calls, message, number, asked.call_prefix)
        completion = sampled if isinstance(sampled, Completion) else None
        ids = () if completion is None else completion.token_ids
        start = 0 if completion is None else prompt_tokens
        turn = CapturedTurn(
            number=number,
            sequence=place.number,
            start=start,
            num_tokens=size_of(sampled),
            message=message,
            calls=calls,
            finish_reason=taken.finish_reason,
            asked=tuple(placer.names.named(asked.messages if first else [*match.rest, *place.begun])),
            tools=asked.tools,
            sampling=taken.sampling,
            completion=completion,
            asked_version=taken.version,
            timings={"generate_s": taken.seconds},
        )
        node = Node(
            turn=number,
            sequence=place.number,
            start=start,
            end=start + len(ids),
            reply=with_beginning(place.begun, message),
            calls=taken.calls,
            history=asked.messages,
        )
        placer.file(place, turn, ids, node, stop=stop)
        self._sampled += turn.num_tokens
        if isinstance(sampled, ChatCompletion):
            prompt_tokens = sampled.usage.prompt_tokens
            self.counts.update({name: value for name, value in asdict(sampled.usage).items() if value})
        self._said[digest(canonical(message))] = message
        self._answers[number] = Answer(
            message=message,
            finish_reason=taken.finish_reason,
            stop=stop,
            prompt_tokens=prompt_tokens,
            completion_tokens=turn.num_tokens,
            cached_tokens=0 if completion is None else prompt_tokens - len(place.new_ids),
            number=number,
        )
        return turn

    def _as_said(self, message: Message) -> Message:
        """Return a message that a client sent back as the chat API said it, with what the client dropped."""
        if self._token_engine is not None or message["role"] != "assistant":
            return message
        return self._said.get(digest(canonical(message)), message)

    def _name_of(self, number: int) -> str:
        """Return the name under which the engine keeps the cache of a sequence."""
        name = f"{self.options.name}/{number}"
        self._names.add(name)
        return name
