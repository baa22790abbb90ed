"""An engine without a model, for first steps and tests, which answers like a weak model.

The answer depends only on the engine seed, the request seed and the prompt. The engine finds the tools
in the prompt, sometimes calls one with arguments that fit its schema, and otherwise answers in text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import cast

from agentenv.core.errors import ContextTooLong
from agentenv.core.messages import JsonValue
from agentenv.core.seeds import derive_seed
from agentenv.engine.base import Completion, Sampling
from agentenv.engine.scripted.scripted import TextCodec

__all__ = ["MockEngine"]

CALL_SHARE = 0.7
"""Probability of a tool call if there are tools."""
RECENT_CHARS = 2000
"""Characters at the end of the prompt from which answers and arguments are taken."""
ARITHMETIC = re.compile(r"-?\d+(?:\.\d+)?(?:\s*[-+*/]\s*-?\d+(?:\.\d+)?)+")
NUMBER = re.compile(r"-?\d+")
SIGNATURE = re.compile(r"^(\w+)\(([\w,: ]*)\): ", re.MULTILINE)
"""Matches a tool as the built-in template describes it: `name(parameter, parameter): description`."""
TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
DEEPEST = 8
"""Depth of arguments below which lists are empty and optional fields left out."""
NULL: JsonValue = {"type": "null"}
WORD = re.compile(r"[A-Za-z]{3,}")


class MockEngine:
    """Answers without a model.

    Args:
        tokenizer: encodes and decodes text.
        seed: seed of the answers.
        max_context_tokens: context limit, like that of a model; None means no limit.
    """

    def __init__(self, tokenizer: TextCodec, *, seed: int = 0, max_context_tokens: int | None = None) -> None:
        self.name = "mock"
        self.weights_version = 0
        self.max_context_tokens = max_context_tokens
        self._tokenizer = tokenizer
        self._seed = seed

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Completion:
        """Return an answer at once; see `agentenv.engine.base.Engine`."""
        room = sampling.max_tokens
        if self.max_context_tokens is not None:
            room = min(room, self.max_context_tokens - len(prompt_ids))
            if room < 1:
                raise ContextTooLong(
                    f"the prompt has {len(prompt_ids)} tokens, and the limit is {self.max_context_tokens}"
                )
        prompt = self._tokenizer.decode(list(prompt_ids))
        drawn = 0 if sampling.temperature == 0 or sampling.seed is None else sampling.seed
        random = Random(derive_seed(self._seed, drawn, prompt))
        tokens = self._tokenizer.encode(answer(prompt, random))
        ends = tuple(stop_token_ids) or self._tokenizer.eos_token_ids
        whole = [*tokens, ends[0]] if ends else tokens
        tokens = whole[:room]
        logprobs = tuple(-random.expovariate(4.0) for _ in tokens)
        reason = "stop" if tokens[-1] in ends else "length"
        return Completion(tuple(tokens), logprobs, reason, ((self.weights_version, 0, len(tokens)),))

    async def release(self, session_id: str) -> None:
        """Do nothing: there is no cache."""

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""


def answer(prompt: str, random: Random) -> str:
    """Return the answer to a prompt."""
    recent = prompt[-RECENT_CHARS:]
    response = re.findall(
        r"<tool_response>\s*(.*?)\s*</tool_response>|\btool\n(.*?)(?:<|$)", recent, re.DOTALL
    )
    tools = tools_in(prompt)
    calls_share = CALL_SHARE / 3 if response else CALL_SHARE
    if tools and random.random() < calls_share:
        name, parameters = random.choice(tools)
        arguments = arguments_for(parameters, recent, random)
        call = {"name": name, "arguments": arguments}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    if response and random.random() < CALL_SHARE:
        return f"The answer is {response[-1][0] or response[-1][1]}."[:400]
    facts = NUMBER.findall(recent) or WORD.findall(recent) or ["unknown"]
    return f"I think it is {random.choice(facts)}."


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


def arguments_for(parameters: dict[str, JsonValue], text: str, random: Random) -> dict[str, JsonValue]:
    """Return arguments that fit the schema of a tool."""
    value = value_for(parameters, parameters, text, random)
    return value if isinstance(value, dict) else {}


def value_for(
    schema: JsonValue, root: dict[str, JsonValue], text: str, random: Random, depth: int = 0
) -> JsonValue:
    """Return a value that fits a JSON schema, for the kinds of schema that tools commonly have.

    A schema that contains itself ends at a depth limit, in an empty list or in null where it allows these.
    """
    if not isinstance(schema, dict) or depth > 2 * DEEPEST:
        return None
    node = resolve(schema, root)
    if "const" in node:
        return node["const"]
    if isinstance(choices := node.get("enum"), list) and choices:
        return random.choice(choices)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := node.get(key), list) and options:
            chosen = NULL if depth > DEEPEST and NULL in options else random.choice(options)
            return value_for(chosen, root, text, random, depth + 1)
    kind = node.get("type")
    if isinstance(kind, list):
        kind = random.choice(kind) if kind else "null"
    if kind == "object":
        properties = node.get("properties")
        required = node.get("required")
        names = required if isinstance(required, list) else []
        fields = properties if isinstance(properties, dict) else {}
        return {
            name: value_for(part, root, text, random, depth + 1)
            for name, part in fields.items()
            if name in names or (random.random() < 0.3 and depth <= DEEPEST)
        }
    if kind == "array":
        size = random.randint(1, 2) if depth <= DEEPEST else 0
        return [value_for(node.get("items", {}), root, text, random, depth + 1) for _ in range(size)]
    return scalar_for(kind, node, text, random)


def scalar_for(kind: JsonValue, node: dict[str, JsonValue], text: str, random: Random) -> JsonValue:
    """Return a number, string or truth value, taken from the text if possible."""
    if kind == "boolean":
        return random.random() < 0.5
    if kind in {"integer", "number"}:
        low, high = node.get("minimum"), node.get("maximum")
        least = int(low) if isinstance(low, int | float) else -(10**6)
        most = int(high) if isinstance(high, int | float) else 10**6
        seen = [int(number) for number in NUMBER.findall(text)[-8:] if least <= int(number) <= most]
        return random.choice(seen) if seen else random.randint(max(least, 0), max(least, 0, min(most, 9)))
    if kind == "null":
        return None
    if kind is None and not ARITHMETIC.search(text) and (numbers := NUMBER.findall(text)):
        return int(random.choice(numbers[-4:]))
    written = ARITHMETIC.findall(text) or WORD.findall(text)[-8:] or ["text"]
    return written[-1] if random.random() < 0.5 else random.choice(written)


def resolve(node: dict[str, JsonValue], root: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the definition in the root schema to which a `$ref` points, or the node itself."""
    reference = node.get("$ref")
    if not isinstance(reference, str):
        return node
    target: JsonValue = root
    for step in reference.removeprefix("#/").split("/"):
        target = target.get(step, {}) if isinstance(target, dict) else {}
    return target if isinstance(target, dict) else {}
