"""An answer that is streamed while the model samples it.

1. Clients are sent only what can no longer change. So the parts of a streamed answer always add up to the
   recorded message, which is that of an answer in one piece.
2. Calls are sent once the completion is whole, because only then their ids and arguments are certain.
3. A client that repeats its request is sent the answer from its beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from agentenv.endpoint.captured import CapturedTurn
from agentenv.endpoint.request import Answer, NotAnswered, Progress
from agentenv.endpoint.wire.common import Event, Stream, chunks
from agentenv.engine.interface import OnTokens

if TYPE_CHECKING:
    from agentenv.render.follow import TurnFollower

__all__ = ["Listener", "LiveAnswer", "StreamedAnswer", "Told"]

Told: TypeAlias = Callable[[Progress], None]
"""Function that is told what is certain of an answer."""


class LiveAnswer:
    """What is certain of an answer so far, and who wants to know."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._told: list[Told] = []

    def join(self, told: Told) -> None:
        """Tell somebody what is certain, now and from now on."""
        self._told.append(told)
        if self._progress is not None:
            told(self._progress)

    def leave(self, told: Told) -> None:
        """Tell somebody nothing more."""
        self._told.remove(told)

    def reader(self, follower: TurnFollower, prompt_tokens: int, cached_tokens: int) -> OnTokens:
        """Return what reads the tokens of the completion as they are sampled."""

        def read(token_ids: Sequence[int]) -> None:
            before = len(follower.thinking) + len(follower.content)
            follower.add(token_ids)
            thinking, text = follower.thinking, follower.content
            if len(thinking) + len(text) == before:
                return
            self._progress = Progress(
                thinking=thinking, text=text, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens
            )
            for told in self._told:
                told(self._progress)

        return read


@dataclass(slots=True, eq=False)
class Flight:
    """A request that is or was being answered."""

    task: asyncio.Task[CapturedTurn]
    is_gone: Callable[[], bool]
    """Returns whether the client that asked last has hung up."""
    live: LiveAnswer | None = None
    """What is certain of the answer so far; None if no client wants it in parts."""

    @property
    def failed(self) -> bool:
        """True if there will be no answer."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class Listener:
    """Waits for news of one answer."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        """The part of the answer that no further token can change; None before there is one."""
        self._changed = asyncio.Event()

    def tell(self, progress: Progress) -> None:
        """Keep the part of the answer that no further token can change."""
        self.progress = progress
        self._changed.set()

    async def wait(self, answering: asyncio.Task[Answer]) -> None:
        """Wait until there is news, or the answer is whole or failed."""
        answering.add_done_callback(self._wake)
        try:
            if not answering.done():
                await self._changed.wait()
            self._changed.clear()
        finally:
            answering.remove_done_callback(self._wake)

    def _wake(self, _: asyncio.Task[Answer]) -> None:
        self._changed.set()


@dataclass(slots=True)
class StreamedAnswer:
    """The events of one answer, each part of which is sent once."""

    stream: Stream
    _begun: bool = False
    _thinking: str = ""
    _text: str = ""

    def news(self, progress: Progress) -> Iterator[Event]:
        """Yield the events of what was not sent yet."""
        if not self._begun:
            self._begun = True
            yield from self.stream.begin(progress)
        yield from self._parts("thinking", progress.thinking[len(self._thinking) :])
        yield from self._parts("text", progress.text[len(self._text) :])
        self._thinking, self._text = progress.thinking, progress.text

    def end(self, answer: Answer) -> Iterator[Event]:
        """Yield the events of the rest of an answer.

        Raises:
            NotAnswered: What was sent is not the beginning of the answer.
        """
        if not (answer.thinking.startswith(self._thinking) and answer.text.startswith(self._text)):
            raise NotAnswered(500, "stream_broken", "the answer is not what was streamed of it", retry=True)
        yield from self.news(
            Progress(
                thinking=answer.thinking,
                text=answer.text,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
            )
        )
        yield from self.stream.end(answer)

    def _parts(self, kind: Literal["thinking", "text"], text: str) -> Iterator[Event]:
        for piece in chunks(text):
            yield from self.stream.part(kind, piece)
