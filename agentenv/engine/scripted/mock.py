"""An engine without a model, for first steps and tests, which answers like a weak model.

The answer depends only on the engine seed, the request seed, the prompt and the tools. The engine sometimes
calls a tool with arguments that fit its schema, and otherwise answers in text. It takes the schemas from the
episode that the runner plays; outside of a runner it reads the tools out of the prompt. Where the environment
takes only certain texts as actions, it mostly answers with one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any, cast

from agentenv.core.episode_env import derive_seed
from agentenv.core.errors import RenderError
from agentenv.core.messages import JsonValue, Message, ToolCallMessage, chat_call
from agentenv.core.playing import playing
from agentenv.engine.scripted.draw import Draw
from agentenv.engine.scripted.scripted import ScriptedEngine, ScriptedRequest, ScriptedTurn, TextCodec

__all__ = ["MockEngine"]

CALL_SHARE = 0.7
"""Probability of a tool call if there are tools."""
GUESSES = ("I do not know.", "I am not sure.")
CHOICE_SHARE = 0.9
"""Probability of a valid answer where the environment takes only certain texts."""
RECENT_CHARS = 2000
"""Characters at the end of the prompt from which answers and arguments are taken."""
ARITHMETIC = re.compile(r"-?\d+(?:\.\d+)?(?:\s*[-+*/]\s*-?\d+(?:\.\d+)?)+")
NUMBER = re.compile(r"-?\d+")
SIGNATURE = re.compile(r"^(\w+)\(([\w,: ]*)\): ", re.MULTILINE)
"""Matches a tool as the built-in template describes it: `name(parameter, parameter): description`."""
TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
WORD = re.compile(r"[A-Za-z]{3,}")


class MockEngine(ScriptedEngine):
    """Answers without a model.

    Args:
        tokenizer: encodes and decodes text.
        seed: seed of the answers.
        max_context_tokens: context limit, like that of a model; None means no limit.
    """

    keeps_requests = False

    def __init__(self, tokenizer: TextCodec, *, seed: int = 0, max_context_tokens: int | None = None) -> None:
        super().__init__(self._turn, tokenizer=tokenizer, name="mock", max_context_tokens=max_context_tokens)
        self._codec = tokenizer
        self._seed = seed

    def _turn(self, request: ScriptedRequest) -> ScriptedTurn:
        sampling = request.sampling
        drawn = 0 if sampling.temperature == 0 or sampling.seed is None else sampling.seed
        random = Random(derive_seed(self._seed, drawn, request.prompt_text))
        message = answer(request.prompt_text, random)
        try:
            tokens = self._tokens(ScriptedTurn(message=message), request.stop_token_ids)
        except RenderError:  # not every template has a place for every value of an argument
            said: Message = {"role": "assistant", "content": random.choice(GUESSES)}
            tokens = self._tokens(ScriptedTurn(message=said), request.stop_token_ids)
        ends = request.stop_token_ids or self._codec.eos_token_ids
        logprobs = [-random.expovariate(4.0) for _ in tokens]
        return ScriptedTurn(token_ids=tokens, logprobs=logprobs, finish_reason="stop" if ends else None)


def answer(prompt: str, random: Random) -> Message:
    """Return the answer to a prompt."""
    said = _text_or_call(prompt, random)
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    return {"role": "assistant", "content": "", "tool_calls": [said]}


def _text_or_call(prompt: str, random: Random) -> str | ToolCallMessage:
    recent = prompt[-RECENT_CHARS:]
    response = re.findall(
        r"<tool_response>\s*(.*?)\s*</tool_response>|\btool\n(.*?)(?:<|$)", recent, re.DOTALL
    )
    episode = playing.get()
    if episode is not None and episode.choices and random.random() < CHOICE_SHARE:
        return random.choice(episode.choices)
    # The prompt may describe a tool by its signature only, which lacks the bounds of its arguments.
    tools = _schemas_of(episode.tools) if episode is not None and episode.tools else tools_in(prompt)
    calls_share = CALL_SHARE / 3 if response else CALL_SHARE
    if tools and random.random() < calls_share:
        name, parameters = random.choice(tools)
        arguments = arguments_for(parameters, recent, random)
        return chat_call("call_0", name, json.dumps(arguments, ensure_ascii=False))
    if response and random.random() < CALL_SHARE:
        return f"The answer is {response[-1][0] or response[-1][1]}."[:400]
    facts = NUMBER.findall(recent) or WORD.findall(recent) or ["unknown"]
    return f"I think it is {random.choice(facts)}."


def _schemas_of(tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, JsonValue]]]:
    return [(tool["function"]["name"], tool["function"]["parameters"]) for tool in tools]


@lru_cache(maxsize=64)
def tools_in(prompt: str) -> list[tuple[str, dict[str, JsonValue]]]:
    """Return name and parameters of the tools that a prompt describes as JSON or as signatures."""
    decoder = json.JSONDecoder()
    tools: dict[str, dict[str, JsonValue]] = {}
    position = prompt.find('{"')
    while position >= 0:
        try:
            value, end = decoder.raw_decode(prompt, position)
        except ValueError:
            position = prompt.find('{"', position + 1)
            continue
        function = value.get("function", value)
        if isinstance(function, dict) and "name" in function and isinstance(function.get("parameters"), dict):
            tools[str(function["name"])] = cast("dict[str, JsonValue]", function["parameters"])
        position = prompt.find('{"', end)
    for name, parameters in SIGNATURE.findall(prompt):
        parts = [part.partition(":") for part in parameters.split(",") if part.strip()]
        properties: dict[str, JsonValue] = {
            part.strip(): {"type": TYPES.get(kind.strip(), kind.strip())} if kind else {}
            for part, _, kind in parts
        }
        tools.setdefault(name, {"type": "object", "properties": properties, "required": list(properties)})
    return list(tools.items())


def arguments_for(parameters: Mapping[str, object], text: str, random: Random) -> dict[str, JsonValue]:
    """Return arguments that fit the schema of a tool, with words and numbers of the text where they fit."""
    value = _FromText(random, parameters, text).value(parameters)
    return value if isinstance(value, dict) else {}


class _FromText(Draw):
    """Draws words and numbers from a text."""

    def __init__(self, random: Random, root: Mapping[str, object], text: str) -> None:
        super().__init__(random, root)
        self._text_read = text

    def text(self, schema: Mapping[str, Any]) -> str:
        """Return a word or a calculation of the text."""
        read = self._text_read
        written = ARITHMETIC.findall(read) or WORD.findall(read)[-8:] or ["text"]
        return written[-1] if self.random.random() < 0.5 else self.random.choice(written)

    def number(self, low: float, high: float, *, whole: bool) -> float:
        """Return a number of the text that is in the bounds, or else one near the lower bound."""
        seen = [int(number) for number in NUMBER.findall(self._text_read)[-8:] if low <= int(number) <= high]
        return self.random.choice(seen) if seen else super().number(max(low, min(0, high)), high, whole=whole)

    def anything(self, schema: Mapping[str, Any]) -> JsonValue:
        """Return a number if the text contains numbers but no calculation, else a text."""
        numbers = NUMBER.findall(self._text_read)
        if numbers and not ARITHMETIC.search(self._text_read):
            return int(self.random.choice(numbers[-4:]))
        return self.text(schema)
