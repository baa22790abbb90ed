"""Images that tools returned, as OpenAI's chat API takes them.

The API takes images in messages of the user only. So the images of tool messages are sent in a message of the
user behind the tool messages of the turn. The records keep them where the tools returned them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.core.messages import ContentPart, Message, images_in, text_of

__all__ = ["with_images_of_users"]


def with_images_of_users(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the images of tools moved into messages of the user."""
    if not any(message["role"] == "tool" and images_in(message.get("content")) for message in messages):
        return messages
    sent: list[Message] = []
    parts: list[ContentPart] = []
    for message in messages:
        if message["role"] != "tool":
            _flush(parts, sent)
            sent.append(message)
            continue
        images = _images(message)
        sent.append({**message, "content": text_of(message) or "(see the image)"} if images else message)
        parts += images
    _flush(parts, sent)
    return sent


def _images(message: Message) -> list[ContentPart]:
    """Return a tool message's images behind a text that names the tool; an empty list if it has none."""
    content = message.get("content")
    if not isinstance(content, list) or not images_in(content):
        return []
    source = message.get("name") or message.get("tool_call_id") or "the tool"
    images = [part for part in content if part.get("type") == "image_url"]
    return [{"type": "text", "text": f"What {source} returned:"}, *images]


def _flush(parts: list[ContentPart], sent: list[Message]) -> None:
    if parts:
        sent.append({"role": "user", "content": list(parts)})
        parts.clear()
