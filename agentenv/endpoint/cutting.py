"""Cut a reply off where its client did, such as after its first action.

An agent without tools of the API reads actions out of the text. It drops what the model wrote after the
first one, and goes on from the beginning of the reply. The tokens of that beginning are a sample of the
policy as they stand, because no token depends on those after it. So they are trained, and the rest is
dropped.
"""

from __future__ import annotations

from agentenv.core.messages import Message, text_of
from agentenv.endpoint.captured import CapturedTurn, OpenSequence
from agentenv.render.base import RendererProtocol

__all__ = ["cut_reply"]


def cut_reply(
    sequence: OpenSequence, turn: CapturedTurn, renderer: RendererProtocol, text: str
) -> Message | None:
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
