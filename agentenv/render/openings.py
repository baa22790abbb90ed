"""Remember the first prompts of episodes: the members of a group begin with the same one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from agentenv.core.messages import Message
from agentenv.render.template import ChatTemplate

__all__ = ["MAX_TOKENS", "Openings"]

MAX_TOKENS = 500_000
"""Most tokens of all prompts that are remembered, which take 4 MB."""

_CHANGING = ("strftime_now", "random", "lipsum")
"""What makes a template write something else the next time."""
_PLAIN_KEYS = {"role", "content"}


class Openings:
    """The first prompts of one template on one tokenizer.

    Only prompts are remembered that depend on nothing but texts and tools: those of messages with a role and
    a text, and of templates that are known to write the same again.
    """

    # Invariant: `_size` is the number of tokens in `_known`, and at most `MAX_TOKENS`.

    def __init__(self, template: ChatTemplate | None) -> None:
        self._on = template is not None and not (
            any(name in template.source for name in _CHANGING)
            or any(not isinstance(value, (str, int, float, type(None))) for value in template.values.values())
        )
        self._known: dict[Hashable, list[int]] = {}
        self._size = 0

    def of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        render: Callable[[], list[int]],
    ) -> list[int]:
        """Return the ids of a first prompt, which `render` makes if it is not remembered."""
        if not (self._on and all(map(_is_plain, messages))):
            return render()
        # The text of Python's notation tells apart what JSON writes alike, such as tuples and lists.
        key = (repr(tools), *((message["role"], message.get("content")) for message in messages))
        ids = self._known.get(key)
        if ids is None:
            ids = render()
            self._remember(key, ids)
        return ids.copy()

    def _remember(self, key: Hashable, ids: list[int]) -> None:
        """Remember a prompt, and forget the oldest ones when there are too many."""
        if len(ids) > MAX_TOKENS:
            return
        self._known[key] = ids
        self._size += len(ids)
        while self._size > MAX_TOKENS:
            self._size -= len(self._known.pop(next(iter(self._known))))


def _is_plain(message: Message) -> bool:
    return message.keys() == _PLAIN_KEYS and all(type(value) is str for value in message.values())
