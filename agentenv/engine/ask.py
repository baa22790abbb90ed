"""Send messages to a model and read its answer, as judges, simulated users and summaries do.

The answer is never trained on, so unlike a turn of the policy it needs no token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentenv.core.errors import EngineError, EngineUnavailable, UsageError
from agentenv.core.messages import CallStatus, JsonValue, Message, ToolCall, text_of
from agentenv.core.playing import writing
from agentenv.core.sequence import images_of
from agentenv.engine.factory import load_engine
from agentenv.engine.interface import OWN_ADAPTER, ChatEngine, Engine, FinishReason, Sampling, Usage, shown

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer

__all__ = ["Answer", "TextModel"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a model."""

    message: Message
    """The answer as an assistant message, with its tool calls."""
    usage: Usage
    """Token counts of the question and of the answer."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that the model made; empty if it was offered no tools."""

    @property
    def text(self) -> str:
        """The text of the answer."""
        return text_of(self.message)


class TextModel:
    """A model that takes messages and answers in text, with either kind of engine.

    Args:
        engine: a `ChatEngine`, or an `Engine` together with `renderer`.
        renderer: the renderer of the model; an `Engine` needs one.
        role: role of the model in error messages, such as "a judge".
        adapter: adapter for questions whose sampling settings name none; see `Sampling.adapter`.

    Raises:
        UsageError: The engine works on tokens and there is no renderer.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine,
        renderer: Renderer | None = None,
        *,
        role: str = "a model",
        adapter: str | None = OWN_ADAPTER,
    ) -> None:
        if not isinstance(engine, ChatEngine) and renderer is None:
            raise UsageError(
                f"{role} has an engine that works on tokens, but no renderer",
                remedy="pass the renderer of that model",
            )
        self._engine = engine
        self._renderer = None if renderer is None else renderer.bind(())
        self._role = role
        self._adapter = adapter

    @classmethod
    def of(
        cls,
        engine: Engine | ChatEngine | TextModel,
        renderer: Renderer | None = None,
        *,
        role: str = "a model",
    ) -> TextModel:
        """Return the model of an engine, or `engine` itself if it is a `TextModel` already."""
        return engine if isinstance(engine, TextModel) else cls(engine, renderer, role=role)

    @classmethod
    def load(cls, model: str, *, role: str = "a model") -> TextModel:
        """Load the model that a model string names, together with its renderer.

        Raises:
            ModelNotFound, UsageError, DependencyMissing, EngineUnavailable: See `load_engine`.
        """
        from agentenv.render.renderer import Renderer

        loaded = load_engine(model)
        return cls(loaded.engine, None if loaded.tokenizer is None else Renderer(loaded.tokenizer), role=role)

    @property
    def weights_version(self) -> int:
        """Version of the model's weights; 0 for a chat engine, whose weights are not known to change."""
        return 0 if isinstance(self._engine, ChatEngine) else self._engine.weights_version

    async def ask(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        tools: Sequence[Mapping[str, JsonValue]] = (),
    ) -> Answer:
        """Return the model's answer to a conversation.

        Args:
            messages: the conversation so far.
            sampling: sampling settings of the answer.
            tools: schemas of the tools that the model may call, in OpenAI's format.

        Raises:
            EngineError: The engine returned no answer.
            RenderError: The model's chat template refuses these messages.
        """
        if sampling.adapter == OWN_ADAPTER:
            sampling = replace(sampling, adapter=self._adapter)
        if isinstance(self._engine, ChatEngine):
            answer = await self._engine.chat(messages, tools, sampling)
            self._require_answer(answer.finish_reason)
            calls = answer.message.get("tool_calls") or ()
            return Answer(answer.message, answer.usage, tuple(map(ToolCall.from_message, calls)))
        assert self._renderer is not None
        renderer = self._renderer.bind(tools) if tools else self._renderer
        prompt_ids = renderer.start(messages)
        if self._engine.max_context_tokens is not None:
            room = max(self._engine.max_context_tokens - len(prompt_ids), 1)
            sampling = replace(sampling, max_tokens=min(sampling.token_limit, room))
        writing.set(renderer.write)
        completion = await self._engine.generate(
            prompt_ids, sampling, stop_token_ids=renderer.stop_token_ids, **shown(images_of(prompt_ids))
        )
        self._require_answer(completion.finish_reason)
        parsed = renderer.parse(completion.token_ids)
        calls = tuple(call for call in parsed.tool_calls if call.status is not CallStatus.IN_THINKING)
        return Answer(parsed.message, Usage(len(prompt_ids), len(completion.token_ids)), calls)

    def _require_answer(self, finish_reason: FinishReason) -> None:
        if finish_reason == "abort":
            raise EngineUnavailable(f"the engine of {self._role} ended the request without an answer")
        if finish_reason == "content_filter":
            raise EngineError(f"a filter of the API refused a request of {self._role}")
