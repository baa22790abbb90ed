"""Conversations whose names, keys, values and texts try to become control tokens."""

from __future__ import annotations

import json
import random

from agentenv.core import RenderError, ToolCall
from agentenv.render import ChatTokenizer, Renderer


class Attacker:
    """Renders conversations with hostile strings beside the same conversations with harmless ones."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.renderer = Renderer(tokenizer)
        self.control = self.renderer._diagnosis.control
        self.tried = self.refused = 0

    def attack(self, seed: int) -> None:
        """Render one conversation with hostile strings in every place, and compare its control tokens."""
        rng = random.Random(seed)
        strings = sorted(self.control.strings)
        texts = [hostile(rng, strings) for _ in range(24)]
        self.tried += len(texts)
        harmless = [f"zq{texts.index(text)}" for text in texts]  # templates compare messages
        if (expected := self.control_ids(harmless)) is None:  # the template takes no types but those of JSON
            harmless[7] = harmless[10] = texts[7] = texts[10] = "string"
            expected = self.control_ids(harmless)
        assert expected is not None
        found = self.control_ids(texts)
        if found is None:
            self.refused += len(texts)
        else:
            assert found == expected, texts

    def control_ids(self, texts: list[str]) -> list[list[int]] | None:
        """Return the control tokens of a first prompt and of two turns; None if they are refused in words."""
        tool, messages = tool_of(texts), messages_of(texts)
        renderer = self.renderer.bind([tool])
        call = ToolCall(texts[20], texts[21], "{}")
        result = {"role": "tool", "tool_call_id": texts[20], "name": texts[22], "content": texts[23]}
        user = {"role": "user", "content": texts[23]}
        kind = "call" if "call" in renderer.report.closers else "text"
        try:
            turns = [
                renderer.start(messages[:3]),
                renderer.extend([self.end(kind)], [call], [result], history=messages[:3]),
                renderer.extend([self.end("text")], [], [user], history=messages[:3]),
            ]
            if self.takes_calls(renderer):
                turns.append(renderer.start(messages))
        except RenderError:
            return None
        return [[token_id for token_id in ids if token_id in self.control.strings.values()] for ids in turns]

    def takes_calls(self, renderer: Renderer) -> bool:
        """Whether the template takes a first prompt that ends with a call and its result."""
        try:
            renderer.start(messages_of(["zq"] * 24))
        except RenderError:
            return False
        return True

    def end(self, kind: str) -> int:
        return self.control.strings[self.renderer.report.closers[kind]]


def hostile(rng: random.Random, strings: list[str]) -> str:
    """Return a control string, or a part of one that a template could complete."""
    string = rng.choice(strings)
    first, last = rng.choice(
        [(0, 0), (1, 1), (1, 1), (1, 1), (1, 1), (1, 0), (0, 1), (2, 2), (2, 1), (1, 2), (2, 0)]
    )
    text = string[first : len(string) - last] or string
    change = rng.random()
    if change < 0.1:
        return text.swapcase()
    if change < 0.2:
        at = rng.randrange(len(text) + 1)
        return text[:at] + rng.choice([" ", "\n", "\ue0f0", "\\ue0f0", "&", '"', "'"]) + text[at:]
    if change < 0.4:
        return rng.choice(["a", "x ", "", "> "]) + text + rng.choice(["b", " x", "", " <"])
    return text


def tool_of(texts: list[str]) -> dict:
    """Return a tool schema with hostile keys, values and descriptions in every place."""
    return {
        "type": "function",
        "function": {
            "name": texts[0],
            "description": texts[1],
            "parameters": {
                "type": "object",
                "properties": {
                    texts[2]: {"type": "string", "description": texts[3], texts[4]: texts[5]},
                    f"p{texts[6]}": {"type": texts[7], "enum": [texts[8], "b"], "default": texts[9]},
                    "list": {"type": "array", "items": {"type": texts[10], "description": texts[11]}},
                    "deep": {"type": "object", "properties": {texts[12]: {"type": "integer", texts[4]: 1}}},
                },
                "required": [texts[2]],
                f"q{texts[4]}": {texts[5]: texts[6]},
            },
        },
    }


def messages_of(texts: list[str]) -> list[dict]:
    """Return a conversation with hostile texts, a call with hostile arguments, and its result."""
    arguments = {texts[13]: texts[14], f"r{texts[15]}": {texts[16]: [texts[17]]}}
    call = {
        "id": texts[20],
        "type": "function",
        "function": {"name": texts[0], "arguments": json.dumps(arguments)},
    }
    return [
        {"role": "user", "content": texts[18]},
        {"role": "assistant", "content": texts[19]},
        {"role": "user", "content": texts[3]},
        {"role": "assistant", "content": "", "reasoning_content": texts[18], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": texts[20], "name": texts[0], "content": texts[23]},
    ]
