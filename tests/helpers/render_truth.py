"""A renderer beside the template's own full render, over random conversations."""

from __future__ import annotations

import json
import random
import unicodedata

from agentenv.core import RenderError, ToolCall
from agentenv.render import ChatTemplate, ChatTokenizer, Renderer, TextProtocol
from agentenv.render.control import clean_unicode
from helpers import chat_cases as cases


class Checker:
    """Plays random conversations on one template beside the template's own full render."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, cases.TOOLS)
        self.verdict = self.renderer.report.verdict
        found = self.renderer._diagnosis
        self.control, self.ends = found.control, found.ends
        self.habits = found.reader.habits if found.reader else None
        self.template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        self.moves = {
            name
            for name in ("tools", "a system message")
            if any(warning.startswith(f"with {name}") for warning in self.renderer.report.warnings)
        }
        self.compared = self.turns = 0
        self.framed = self.writes_after_words()

    def writes_after_words(self) -> bool:
        """Whether tags stand between the words of an answer and its end: a cut answer gets only the end."""
        if not self.ends:
            return False
        tail = self.renderer._diagnosis.reader.tail(
            [], [{"role": "user", "content": "u"}], tools=cases.TOOLS if self.habits.tools_needed else None
        )
        return bool(tail[: tail.index(self.ends["text"].end)].strip())

    def play(self, seed: int, turns: int = 3) -> None:
        rng = random.Random(seed)
        strings = sorted(self.control.strings)
        rng.shuffle(strings)
        messages = [{"role": "user", "content": cases.some_text(rng, strings) or "u"}]
        if self.habits.system_role and rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": cases.some_text(rng, strings)})
        self.check_start(messages)
        for _ in range(turns):
            reply, calls = self.reply(rng)
            new = self.answer(rng, calls, strings)
            stopped = rng.random() < 0.7
            if not self.check_turn(rng, messages, reply, calls, new, stopped=stopped):
                return
            messages += [reply, *new]

    def reply(self, rng: random.Random) -> tuple[dict, list[ToolCall]]:
        if rng.random() < 0.4:
            return {"role": "assistant", "content": rng.choice(["w", "some words"])}, []
        calls = cases.some_calls(rng)
        tool_calls = [call.to_message() for call in calls]
        return {"role": "assistant", "content": "", "tool_calls": tool_calls}, calls

    def answer(self, rng: random.Random, calls: list[ToolCall], strings: list[str]) -> list[dict]:
        new = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                "content": cases.some_text(rng, strings),
            }
            for call in calls
        ]
        if not calls or rng.random() < 0.1:
            new.append({"role": "user", "content": cases.some_text(rng, strings) or "u"})
        return new

    def check_start(self, messages: list[dict]) -> None:
        ids = self.renderer.start(messages)

        assert nfc(self.tokenizer.decode(ids)) == nfc(self.canonical(messages))
        assert self.controls(ids) == self.controls(self.renderer.start(harmless(messages)))

    def check_turn(self, rng, messages, reply, calls, new, *, stopped: bool) -> bool:
        """Check one turn; False if the template refuses it by its own rule."""
        end = self.ends["call" if calls and self.verdict != "no_tool_role" else "text"]
        sampled = [rng.randrange(300, 2000) % 250 for _ in range(rng.randint(0, 5))]
        if stopped:
            sampled.append(self.control.strings[end.end])
        before = list(sampled)

        try:
            ids = self.renderer.extend(sampled, calls, new, history=messages)
        except RenderError as error:
            refused = str(error)
        else:
            refused = ""
        if "alternat" in refused:
            return False

        assert not refused
        self.turns += 1
        assert sampled == before
        same = self.renderer.extend(sampled, calls, harmless(new), history=harmless(messages))
        assert self.controls(ids) == self.controls(same)
        text = self.tokenizer.decode(ids)
        if not any(self.control.starts(clean_unicode(message["content"])) for message in new):
            anchored = self.tokenizer.encode(end.end + text)[1:] if stopped else self.tokenizer.encode(text)
            assert ids == anchored
        self.check_tail(messages, reply, calls, new, text, stopped=stopped, end=end.end)
        return True

    def check_tail(self, messages, reply, calls, new, text, *, stopped: bool, end: str) -> None:
        if self.habits.two_calls:
            return
        if self.moves and (new[-1]["role"] == "user" or self.verdict == "no_tool_role"):
            return  # a fresh render would move what stands at the first user turn
        try:
            full = nfc(self.canonical([*messages, reply, *new]))
        except RenderError:
            return
        self.compared += 1
        text = nfc(text)
        assert full.endswith(text)
        written = full[: len(full) - len(text)]
        if stopped:
            assert written.endswith(end)
        elif not calls and not self.framed:
            assert written.rstrip().endswith(reply["content"])

    def canonical(self, messages: list[dict]) -> str:
        plain = []
        for message in messages:
            shaped = {
                key: clean_unicode(value) if isinstance(value, str) else value
                for key, value in message.items()
            }
            if calls := message.get("tool_calls"):
                shaped["tool_calls"] = [self.shaped_call(call) for call in calls]
                shaped["content"] = None if self.habits.null_content else message["content"]
            elif self.habits.content_parts:
                shaped["content"] = [{"type": "text", "text": shaped["content"]}] if shaped["content"] else []
            plain.append(shaped)
        if self.verdict == "no_tool_role":
            return self.template.render(
                self.told_in_text(plain), tools=[] if self.habits.empty_tools else None
            )
        return self.template.render(plain, tools=cases.TOOLS)

    def told_in_text(self, messages: list[dict]) -> list[dict]:
        """The messages as the text protocol tells them, its own words included."""
        for message in messages:
            if isinstance(parts := message["content"], list):
                message["content"] = "".join(part["text"] for part in parts)
        told = TextProtocol().plain(messages, cases.TOOLS, system_role=self.habits.system_role, opening=True)
        if self.habits.content_parts:
            told = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in told]
        return told

    def shaped_call(self, call: dict) -> dict:
        arguments = call["function"]["arguments"]
        if not self.habits.json_arguments:
            arguments = json.loads(arguments)
        return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}

    def controls(self, ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self.control.strings.values()]


def harmless(messages: list[dict]) -> list[dict]:
    kept = ("role", "tool_calls", "tool_call_id", "name")
    return [
        {**{key: message[key] for key in kept if key in message}, "content": message["content"] and "zq"}
        if message["role"] != "assistant"
        else message
        for message in messages
    ]


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)
