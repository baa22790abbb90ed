"""Finds out which part of a request a chat API does not support, from the error with which it refuses it.

1. The error's `param` decides, or the path in a validation error. Its words count only if it names none.
2. Words count only if they say that a part of the request is not supported. Errors quote conversations,
   so the name of a parameter may be that of a tool's argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from agentenv.engine.chat_client import ChatFailure
from agentenv.engine.vllm.client import message_of

__all__ = ["REASONING", "TOOLS", "features_of", "refused_feature", "words_of"]

FORM = ("parallel_tool_calls", "response_format", "tool_choice")
"""Parameters that say what the reply must be, which can be seen from the reply."""
PARAMETERS = ("temperature", "top_p", "seed", "stream_options", "top_k", "min_p", *FORM)
"""Parameters that may be left out of a request."""
TOOLS = "tools"
REASONING = "reasoning_content"
"""Key of a message's reasoning text, which some servers give and refuse to take back."""
NO_TOOLS = re.compile(
    r"enable-auto-tool-choice|(not|n't) support (tools?\b|tool (use|call)|function.?call)"
    r"|\b(tools?|tool (use|calls?|calling)|functions|function.?call(s|ing)?)['\"`]? (is|are) not supported"
    r"|(unsupported|unknown|unrecognized|unexpected) (parameter|argument|field):? ['\"`]?(tools|functions)\b",
    re.IGNORECASE,
)
"""How servers say that they take no tools: vLLM, Ollama, Groq, and servers that know no such parameter."""
MAX_WORDS = 2000
"""Most characters of an error whose form is not known; it may be a page of HTML."""
ABOUT_CALLS = re.compile(r"\btool|\bfunction", re.IGNORECASE)


def features_of(body: Mapping[str, Any]) -> set[str]:
    """Return the parts of a request that can be left out or sent in another way.

    The value of a number belongs to it, because some models accept a temperature of 1 only.
    """
    features = {
        f"{name}={value}" if isinstance(value := body[name], float) else name
        for name in PARAMETERS
        if name in body
    }
    if TOOLS in body:
        features.add(TOOLS)
    if any(REASONING in message for message in body["messages"]):
        features.add(REASONING)
    return features


def refused_feature(error: ChatFailure, open_features: set[str]) -> str:
    """Return the name of the part of a request that an API does not support; empty if it is none of them.

    Args:
        error: the failure of the API.
        open_features: parts of the request that the API has not accepted yet, as `features_of` names them.
    """
    names = {feature.partition("=")[0] for feature in open_features}
    path = path_of(error)
    # A value out of its range is a mistake of the caller, and the message says so.
    if str(error.code).endswith(("_max_value", "_min_value")):
        return ""
    for name in sorted(names):
        refused = names_feature(path, name) if path else says_unsupported(words_of(error), name)
        if refused:
            return name
    return ""


def words_of(error: ChatFailure) -> str:
    """Return what a failure says, with the words of the API whatever their form."""
    said = message_of({"error": error.body})[:MAX_WORDS] if error.body else ""
    return error.message if not said or said in error.message else f"{error.message}: {said}"


def path_of(error: ChatFailure) -> list[str]:
    """Return the path of the refused part as the error gives it; empty if it gives none."""
    if error.param:
        return re.findall(r"\w+", str(error.param))
    body = cast("Mapping[str, Any]", error.body if isinstance(error.body, Mapping) else {})
    details = body.get("detail")
    if not isinstance(details, list) or not details:
        return []
    first = cast("list[Any]", details)[0]
    if not isinstance(first, Mapping) or first.get("type") != "extra_forbidden":
        return []
    place: Any = cast("Mapping[str, Any]", first).get("loc", ())
    return [str(part) for part in place if part != "body"]


def names_feature(path: list[str], name: str) -> bool:
    """Return True if the path of an error points to this part of the request, and not to something in it."""
    if name == REASONING:
        return path[-1] == REASONING
    if name == TOOLS:
        return path in ([TOOLS], ["tool_choice"])
    return path[0] == name


def says_unsupported(message: str, name: str) -> bool:
    """Return True if an error without a path says that the API does not support this part of a request."""
    if name == REASONING:
        return REASONING in message and "missing" not in message.lower()
    if name == TOOLS:
        return NO_TOOLS.search(message) is not None
    if name not in FORM and ABOUT_CALLS.search(message):
        return False
    quoted = rf"['\"`]?\b{name}\b['\"`]?"
    said = (
        rf"(unsupported|unknown|unrecognized|unexpected|extra) (\w+ ){{0,3}}?\w+:? {quoted}"
        rf"|{quoted}:? ((is|are|does|do|was|has been) )?(\w+ )?(not|unsupported|deprecated|extra inputs)\b"
        rf"|not (support|allow|accept)(ed|ing)? (\w+ ){{0,3}}?{quoted}"
    )
    return re.search(said, message, re.IGNORECASE) is not None
