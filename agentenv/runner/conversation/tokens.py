"""A conversation on token ids. It appends tokens and never renders again what the engine has seen.

Sampled tokens and sent tokens are sent again unchanged in the next turn. A new sequence begins only where
the history is rewritten on purpose.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING

from agentenv.core.errors import RenderError
from agentenv.core.images import images_between, keys_of
from agentenv.core.limits import RunLimits, least
from agentenv.core.messages import JsonValue, Message, image_parts
from agentenv.core.playing import writing
from agentenv.core.sequence import Prompt, images_of
from agentenv.core.trajectory import Rewrite, SequenceBuilder, TokenSequence
from agentenv.engine.exact import checked
from agentenv.engine.interface import (
    ChatCompletion,
    Completion,
    Engine,
    Sampling,
    features_of,
    shown,
)
from agentenv.runner.conversation.conversation import Reply
from agentenv.runner.conversation.fit import CHARS_PER_TOKEN, TurnAnswer, fit_answer
from agentenv.runner.guard import at

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer
    from agentenv.runner.condense import View

__all__ = ["KeptTurns", "TokenConversation", "kept_turns"]


class TokenConversation:
    """A conversation that keeps its tokens as they were sampled and sent."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        limits: RunLimits,
        session_id: str,
        *,
        rewrite: bool = False,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._limits = limits
        self._session_id = session_id
        self._max_context = least(limits.max_context_tokens, engine.max_context_tokens)
        self._builder = SequenceBuilder()
        self._closed: list[TokenSequence] = []
        self._rewrite = rewrite
        self._pending: View | None = None
        self.forks: dict[str, int] = {}
        self.rewrites: list[Rewrite] = []
        self.usage: dict[str, float] = {}
        self._history: list[Message] = []
        self._turn = -1
        self._asked_version = 0
        self._asked = Sampling()
        self.untrainable_reason = features_of(engine).untrainable
        self.has_policy_tokens = False
        self.takes_images = renderer.takes_images and features_of(engine).images

    def start(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]
    ) -> Sequence[Message]:
        """Render the first prompt. This is the only full render of an episode that is not rewritten.

        A line of text stands in the place of an image that does not fit into the context, last ones first.
        """
        with at("render"):
            self._refuse_images(messages)
            self._renderer = self._renderer.bind(tools)
            shown_first = TurnAnswer(messages=tuple(messages))
            prompt, room = self._renderer.start(messages), self.room
            while room is not None and len(prompt) > room - self._limits.min_answer_tokens:
                if not (images := images_of(prompt)):
                    break
                last = max(index for index, count in enumerate(shown_first.image_counts) if count)
                shown_first = shown_first.without_image(last, images[-1].length)
                prompt = self._renderer.start(shown_first.messages)
            self._builder.append("prompt", prompt)
        self._history = list(shown_first.messages)
        return shown_first.messages

    def begin_with(self, view: View) -> None:
        """Render a condensed view in place of the first prompt, which the engine has not seen."""
        self._builder = SequenceBuilder()
        self._builder.append("prompt", self._renderer.start(view.messages))
        self._history = list(view.messages)
        self.rewrites.append(Rewrite(0, view.cause, view.messages))

    @property
    def room(self) -> int | None:
        """Tokens left in the context; None if the context has no limit."""
        return None if self._max_context is None else self._max_context - len(self._builder)

    def generate(self, sampling: Sampling, *, turn: int, deadline_s: float | None) -> Awaitable[Completion]:
        """Ask the engine for a completion of the whole context."""
        self._turn = turn
        self._asked_version = self._engine.weights_version
        self._asked = sampling
        writing.set(self._renderer.write)
        ids, images = self._builder.token_ids, self._builder.images
        ask = partial(
            self._engine.generate,
            ids,
            sampling,
            stop_token_ids=self._renderer.stop_token_ids,
            session_id=self._session_id,
            deadline_s=deadline_s,
            **shown(images),
        )
        kept = kept_turns.get()
        return ask() if kept is None or images else kept.answer(ids, sampling, ask)

    def read(self, sampled: Completion | ChatCompletion, *, turn: int) -> Reply:
        """Append the sampled tokens unchanged and parse them."""
        with at("engine"):
            sampled = checked(sampled, self._asked, self._renderer, turn=turn)
        start = len(self._builder)
        # Parse before recording: if parsing fails, the record holds no completion without a turn.
        with at("parser"):
            parsed = self._renderer.parse(sampled.token_ids)
        with at("engine"):
            self._append(sampled, turn)
        self._history.append(parsed.message)
        return Reply(
            parsed.message,
            parsed.tool_calls,
            sampled.finish_reason,
            len(sampled.token_ids),
            start,
            len(self._closed),
            sampled.queue_s,
        )

    def _append(self, completion: Completion, turn: int) -> None:
        ids = completion.token_ids
        if not completion.sampled_by_policy:
            self._builder.append("other", ids, turn=turn)
            return
        ranges = completion.version_ranges or ((self._asked_version, 0, len(ids)),)
        self._builder.append_completion(
            ids, completion.logprobs, ranges, turn=turn, supports=completion.supports
        )
        self._builder.route(completion.routed_experts)
        self.untrainable_reason = self.untrainable_reason or completion.unfit_for_training(self._asked)
        self.has_policy_tokens = True

    def observe(self, reply: Reply, answer: TurnAnswer) -> TurnAnswer | None:
        """Append the answer with its framing and the next generation prompt."""
        if self._rewrite or self._pending is not None:
            return self._observe_anew(answer)
        sampled = self._builder.token_ids[reply.start :]
        with at("render"):
            self._refuse_images(answer.all_messages)
        history = self._history[:-1] if self._renderer.report.verdict == "history" else None
        with at("render"):
            fitted = self._fit(
                answer,
                lambda cut: self._renderer.extend(sampled, reply.tool_calls, cut.all_messages, history),
                self.room,
            )
        if fitted is None:
            return None
        self._builder.append("env", fitted[1], turn=self._turn)
        self._history.extend(fitted[0].all_messages)
        return fitted[0]

    def _observe_anew(self, answer: TurnAnswer) -> TurnAnswer | None:
        """Render the whole conversation again; begin a new sequence if the tokens differ from those sent.

        Everything that a new sequence carries over becomes its prompt, also tokens that the policy sampled.
        Each sampled token is therefore trained once, in the sequence in which it was sampled.
        """
        view, self._pending = self._pending, None
        view_messages = self._history if view is None else list(view.messages)
        with at("render"):
            fitted = self._fit(
                answer,
                lambda cut: self._renderer.start([*view_messages, *cut.all_messages]),
                self._max_context,
            )
        if fitted is None:
            return None
        cut, ids = fitted
        size, images = len(self._builder), images_of(ids)
        self._history = [*view_messages, *cut.all_messages]
        if keys_of(ids, images)[:size] == self._builder.keys:
            self._builder.append("env", _part(ids, size, len(ids)), turn=self._turn)
            return cut
        cause = "rewrite" if view is None else view.cause
        self.forks[cause] = self.forks.get(cause, 0) + 1
        if view is not None:
            self.rewrites.append(Rewrite(self._turn + 1, cause, tuple(self._history)))
        self._closed.append(self._builder.freeze())
        self._builder = SequenceBuilder()
        start, end = self._span_of("" if view is None else view.written, ids)
        self._builder.append("prompt", _part(ids, 0, start), turn=self._turn)
        self._builder.append("other", ids[start:end], turn=self._turn)
        self._builder.append("prompt", _part(ids, end, len(ids)), turn=self._turn)
        return cut

    def _refuse_images(self, messages: Sequence[Message]) -> None:
        """Refuse images that the engine cannot show to its model, although the renderer could place them."""
        if self._renderer.takes_images and not self.takes_images and any(image_parts(messages)):
            raise RenderError(
                f"a message has an image, and {self._engine.name} sees none",
                remedy="load a model that sees, or use a chat engine such as openai:NAME",
            )

    def _fit(
        self, answer: TurnAnswer, render: Callable[[TurnAnswer], list[int]], room: int | None
    ) -> tuple[TurnAnswer, list[int]] | None:
        return fit_answer(
            answer,
            render,
            self._renderer,
            room=None if room is None else room - self._limits.min_answer_tokens,
            max_output_tokens=self._limits.max_tool_output_tokens,
            keep=self._limits.tool_output_keep,
        )

    def _span_of(self, written: str, ids: Sequence[int]) -> tuple[int, int]:
        """Return the token range of a summary, without tokens that it shares with the text around it."""
        if not written:
            return len(ids), len(ids)
        num_tokens = self._renderer.count(written)
        decode = self._renderer.decode
        offset = decode(ids).find(written)
        if offset < 0:
            return len(ids), len(ids)
        # Decoded prefixes grow with their number of ids, so both ends can be found by bisection. The end is
        # searched near `start + num_tokens`, because every probe decodes a prefix.
        start = bisect_left(range(len(ids)), offset, key=lambda size: len(decode(ids[:size])))
        end = bisect_right(
            range(min(start + 2 * num_tokens + 8, len(ids)) + 1),
            offset + len(written),
            lo=start,
            key=lambda size: len(decode(ids[:size])),
        )
        return start, max(start, end - 1)

    @property
    def view(self) -> Sequence[Message]:
        """Messages that the model was shown, up to its last completion."""
        return tuple(self._history)

    def used_with(self, answer: TurnAnswer) -> tuple[int, int | None]:
        """Return about how many tokens are used with an answer appended, and the context's limit.

        The texts of the answer are not encoded; their tokens are estimated from their characters.
        """
        return len(self._builder) + sum(map(len, answer.texts)) // CHARS_PER_TOKEN, self._max_context

    def go_on_with(self, view: View) -> None:
        """Append the next answer to a condensed view."""
        self._pending = view

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Token sequences of the episode; empty before the first prompt."""
        return (*self._closed, self._builder.freeze()) if len(self._builder) else ()

    async def release(self) -> None:
        """Let the engine forget the episode's cache."""
        await self._engine.release(self._session_id)


def _part(ids: Sequence[int], start: int, end: int) -> Prompt:
    """Return a part of a rendered text with its images."""
    return Prompt(ids[start:end], images_between(images_of(ids), start, end))


LONG_S = 60.0
"""Seconds after which an episode is long: before that, playing it again costs less than keeping it."""

kept_turns: ContextVar[KeptTurns | None] = ContextVar("kept_turns", default=None)
"""What keeps the completions of the running episode; None if nothing does."""


# An episode whose process was lost is played again with the same seeds. Where its environment does again
# what it did, the requests are the same, and each that was answered before gets the same completion again,
# with its log-probabilities and weights versions. What differs is sampled as ever.
class KeptTurns:
    """The completions of one episode.

    Args:
        known: completions of an attempt that was lost, by their request.
    """

    def __init__(self, known: Mapping[str, Completion]) -> None:
        self._began = monotonic()
        self._known = known
        self._new: dict[str, Completion] = {}

    def take(self) -> dict[str, Completion]:
        """Return, once, the completions since the last call; none of an episode that is not long yet."""
        if monotonic() - self._began < LONG_S:
            return {}
        new, self._new = self._new, {}
        return new

    async def answer(
        self, prompt_ids: Sequence[int], sampling: Sampling, sample: Callable[[], Awaitable[Completion]]
    ) -> Completion:
        """Return the kept completion of a request, or one that `sample` returns."""
        request = blake2b(array("q", prompt_ids), person=b"turn", digest_size=16)
        request.update(repr(sampling).encode())
        key = request.hexdigest()
        if key in self._known:
            return self._known[key]
        done = await sample()
        if done.finish_reason != "abort" and sampling.seed is not None:
            self._new[key] = done
        return done
