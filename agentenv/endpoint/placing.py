"""Where the tokens of a request go: after a recorded reply, or into a new sequence.

1. If only messages of others follow a recorded reply, they are appended to the recorded tokens.
2. If the reply is the last of its sequence and nobody goes on from it, the sequence grows. Otherwise a new
   one begins with the same tokens: `forked` from an older reply, or `parallel` to a request in progress.
3. Every other conversation is rendered as a whole: `new` if it contains no replies, `tools` if it is recorded
   with other tools, `system` if it is with other messages of the system, and `edited` otherwise.
4. A last message of the assistant is the beginning of the reply, and the model goes on from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentenv.core.errors import RenderError
from agentenv.core.images import ImageTokens, images_between
from agentenv.core.messages import JsonValue, Message, text_of
from agentenv.core.sequence import Prompt, images_of
from agentenv.endpoint.captured import CapturedTurn, OpenSequence, results_of
from agentenv.endpoint.matching import Match, Node, ReplyTree
from agentenv.endpoint.names import CallNames
from agentenv.endpoint.request import Asked

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer

__all__ = ["Place", "Placer"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tokens of a request go."""

    number: int
    """Number of the sequence."""
    sequence: OpenSequence
    new_ids: Sequence[int]
    """Tokens to append before the reply."""
    match: Match
    renderer: Renderer | None
    """Renderer bound to the tools of the request; None if the engine only speaks text."""
    begun: Sequence[Message] = ()
    """The last message of the request if it is the beginning of the reply."""

    @property
    def images(self) -> list[ImageTokens]:
        """The images of the whole context."""
        new = (image.moved(self.sequence.size) for image in images_of(self.new_ids))
        return [*self.sequence.images, *new]


class Placer:
    """Finds the places of requests and files their replies.

    Args:
        renderer: turns messages into tokens; None if the engine only speaks text.
    """

    # Invariant: a sequence is `busy` exactly while a request that goes on from its tail is being answered.
    # Meanwhile its `token_ids` end with the tokens of that request, which are no piece of it yet.

    def __init__(self, renderer: Renderer | None) -> None:
        self.sequences: list[OpenSequence] = []
        self.turns: list[CapturedTurn] = []
        self.names = CallNames()
        self.counts: Counter[str] = Counter()
        self._renderer = renderer
        self._bound: dict[str, Renderer] = {}
        self._tree = ReplyTree()

    def place(self, asked: Asked) -> Place:
        """Find where the tokens of a request go, and reserve the place until `file` or `free`.

        Raises:
            RenderError: The template cannot render the conversation.
        """
        if self._renderer is not None and not self._renderer.report.prints_ids:
            # The model never sees the ids, so that other ids make no other conversation.
            asked = replace(asked, messages=list(self._tree.restored(asked.tools, asked.messages)))
        begun = asked.messages[-1:] if asked.messages[-1]["role"] == "assistant" else ()
        match = self._tree.find(asked.tools, asked.messages[: len(asked.messages) - len(begun)])
        self.counts["ambiguous_replies"] += match.ambiguous
        renderer = self.bound(asked.tools)
        if match.node is not None:
            self._note_results(match.node, match.rest)
        if match.cut is not None and not self._cut(match, renderer):
            match = replace(
                match, node=None, rest=asked.messages[: len(asked.messages) - len(begun)], cut=None
            )
        place = self._appended(match, begun, renderer) or self._begun(asked, match, renderer)
        if begun:
            place = replace(place, begun=begun)
        place.sequence.busy = True
        place.sequence.token_ids.extend(place.new_ids)
        return place

    def file(
        self, place: Place, turn: CapturedTurn, ids: Sequence[int], node: Node, *, stop: str | None
    ) -> None:
        """Append the tokens of a request and its reply, and file the reply, which `stop` may end."""
        sequence, match = place.sequence, place.match
        before = match.node.turn if match.node is not None else -1
        if self.turns and not sequence.turns:
            self.counts[f"forks_{sequence.cause}"] += 1
        sequence.append("env" if sequence.turns else "prompt", place.new_ids, before)
        sequence.append("model", ids, turn)
        sequence.turns.append(turn)
        sequence.tail = node
        self.turns.append(turn)
        self._tree.add(match.key, node, stop=stop, begun=place.begun)

    def free(self, place: Place) -> None:
        """Let others go on from the place; tokens whose request was not answered are taken back."""
        sequence = place.sequence
        sequence.busy = False
        del sequence.token_ids[sequence.size :]
        if not sequence.turns and self.sequences[-1] is sequence:
            self.sequences.pop()  # its request was not answered

    def bound(self, tools: Sequence[Mapping[str, JsonValue]]) -> Renderer | None:
        """Return the renderer for these tools."""
        if self._renderer is None:
            return None
        key = str(tools)
        if (bound := self._bound.get(key)) is None:
            bound = self._bound[key] = self._renderer.bind(tools)
        return bound

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages of a client as the renderer is given them."""
        return self.names.shown(self.names.named(messages))

    def _note_results(self, node: Node, rest: Sequence[Message]) -> None:
        """Note that a reply arrived, and what its calls returned."""
        turn = self.turns[node.turn]
        turn.delivered = True
        if not turn.results:
            turn.results = results_of(turn.calls, rest)

    def _note_elsewhere(self, messages: Sequence[Message]) -> None:
        """Note results of calls that a conversation with other tools or another system repeats."""
        ids = {call["id"] for message in messages for call in message.get("tool_calls") or ()}
        for turn in self.turns:
            if any(call.id in ids for call in turn.calls):
                turn.delivered = True
                turn.results = turn.results or results_of(turn.calls, messages)

    def _cut(self, match: Match, renderer: Renderer | None) -> bool:
        """Cut a reply off where a client did, so that the conversation goes on from there.

        Returns:
            False if that is not possible, because the cut is inside of a token, or the whole reply was used.
        """
        node, returned = match.node, match.cut
        if node is None or returned is None:
            return False
        turn, sequence = self.turns[node.turn], self.sequences[node.sequence]
        turn.used = True
        if renderer is None or sequence.tail is not node or sequence.busy or not match.extends:
            return False
        if (message := cut_reply(sequence, turn, renderer, text_of(returned).strip())) is None:
            return False
        node.end = node.start + turn.num_tokens
        node.reply, node.calls = message, ()
        self._tree.cut(node, returned)
        return True

    def _appended(self, match: Match, begun: Sequence[Message], renderer: Renderer | None) -> Place | None:
        """Return the place after the reply that the request goes on from; None if nothing can be appended."""
        node = match.node
        if node is None or not match.extends:
            return None
        parent = self.sequences[node.sequence]
        new: Sequence[int] = ()
        if renderer is not None:
            history = self._shown(node.history) if renderer.report.verdict == "history" else None
            rest = self._shown([*match.rest, *begun])
            try:
                new = renderer.extend(parent.token_ids[node.start : node.end], node.calls, rest, history)
            except RenderError:
                return None  # the whole conversation may still be rendered
        if parent.tail is node and not parent.busy:
            return Place(node.sequence, parent, new, match, renderer)
        cause = "parallel" if parent.tail is node else "forked"
        sequence = OpenSequence(cause=cause, parent=node.sequence, shared_tokens=node.end)
        before = images_between(parent.images, 0, node.end)
        images = [*before, *(image.moved(node.end) for image in images_of(new))]
        return self._opened(sequence, Prompt([*parent.token_ids[: node.end], *new], images), match, renderer)

    def _begun(self, asked: Asked, match: Match, renderer: Renderer | None) -> Place:
        """Return the place of a request whose conversation is rendered as a whole."""
        ids = [] if renderer is None else renderer.start(self._shown(asked.messages))
        answered = any(message["role"] == "assistant" for message in asked.messages[:-1])
        cause = self._tree.changed_in(match, asked.messages) if answered else "new"
        if cause in ("tools", "system"):
            self._note_elsewhere(asked.messages)
        return self._opened(OpenSequence(cause=cause), ids, match, renderer)

    def _opened(
        self,
        sequence: OpenSequence,
        ids: Sequence[int],
        match: Match,
        renderer: Renderer | None,
    ) -> Place:
        self.sequences.append(sequence)
        return Place(len(self.sequences) - 1, sequence, ids, match, renderer)


# An agent without tools of the API reads actions out of the text. It drops what the model wrote after the
# first one, and goes on from the beginning of the reply. The tokens of that beginning are a sample of the
# policy as they stand, because no token depends on those after it. So they are trained, and the rest is
# dropped.
def cut_reply(sequence: OpenSequence, turn: CapturedTurn, renderer: Renderer, text: str) -> Message | None:
    """Cut the last reply of a sequence off after a text, and return what is left of it.

    Returns:
        The message of the rest; None, with nothing changed, if no token ends where the text does.
    """
    completion = turn.completion
    if completion is None or completion.routed_experts is not None:
        return None
    ids = completion.token_ids

    def said(size: int) -> Message:
        return renderer.parse(ids[:size]).message

    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(text_of(said(middle)).strip()) < len(text):
            low = middle + 1
        else:
            high = middle
    message = said(low)
    if text_of(message).strip() != text or message.get("tool_calls"):
        return None
    turn.completion = completion.cut(low)
    turn.cut_tokens += turn.num_tokens - low
    turn.num_tokens, turn.message, turn.calls, turn.results = low, message, (), ()
    sequence.pieces[-1] = ("model", ids[:low], turn)
    sequence.size -= len(ids) - low
    del sequence.token_ids[sequence.size :]
    return message
