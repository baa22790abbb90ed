"""Finds out which part of a request a chat API does not support, from the error with which it refuses it.

1. The error's `param` decides, or the path in a validation error. Its words count only if it names none.
2. Words count only if they say that a part of the request is not supported. Errors quote conversations,
   so the name of a parameter may be that of a tool's argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from agentenv_providers.openai.errors import REFUSED, ChatFailure, words_of
from agentenv_providers.openai.request import is_object

__all__ = ["TOOLS", "features_of", "refused_feature"]

FORM = ("parallel_tool_calls", "response_format", "tool_choice")
"""Parameters that say what the reply must be, which can be seen from the reply."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""The two names of the token limit."""
PARAMETERS = ("temperature", "top_p", "seed", "stop", "stream_options", "top_k", "min_p", *LIMITS, *FORM)
"""Parameters that may be left out of a request."""
TOOLS = "tools"
STANDARD = {"role", "content", "tool_calls", "tool_call_id", "name", "id", "type", "function"}
"""Keys of messages and calls that every API knows."""
NO_TOOLS = re.compile(
    r"enable-auto-tool-choice|(not|n't) support (tools?\b|tool (use|call)|function.?call)"
    r"|\b(tools?|tool (use|calls?|calling)|functions|function.?call(s|ing)?)['\"`]? (is|are) not supported"
    r"|(unsupported|unknown|unrecognized|unexpected) (parameter|argument|field):? ['\"`]?(tools|functions)\b",
    re.IGNORECASE,
)
"""How servers say that they take no tools: vLLM, Ollama, Groq, and servers that know no such parameter."""
NO_EMPTY = re.compile(
    r"non-?empty|must not be empty|cannot be empty|empty (text|content)|min_?length", re.IGNORECASE
)
WANTED = re.compile(r"missing|required|must be|pass\w* back", re.IGNORECASE)
"""How APIs say that they miss a key of a message."""
OUT_OF_RANGE = re.compile(
    r"too (large|big|high|small|low|long)|at (most|least)|exceed|range|(less|greater) than|(max|min)imum",
    re.IGNORECASE,
)
"""How APIs say that the value of a parameter does not fit, which is a mistake of the caller."""
ABOUT_CALLS = re.compile(r"\btool|\bfunction", re.IGNORECASE)
ABOUT_JSON = re.compile(r"json|argument|dictionary|object", re.IGNORECASE)


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
    for message in body["messages"]:
        calls = message.get("tool_calls") or ()
        for keyed in (message, *calls):
            if not keyed.keys() <= STANDARD:
                features.update(keyed.keys() - STANDARD)
        if message.get("content") in ("", None):
            features.add("empty text")
        if not all(is_object(call["function"]["arguments"]) for call in calls):
            features.add("broken arguments")
    return features


def refused_feature(error: ChatFailure, open_features: set[str]) -> str:
    """Return the name of the part of a request that an API does not support; empty if it is none of them.

    Args:
        error: the failure of the API.
        open_features: parts of the request that the API has not accepted yet, as `features_of` names them.
    """
    path, words = path_of(error), words_of(error)
    wrong = str(error.code).endswith(("_max_value", "_min_value")) or (
        "unsupported" not in words.lower() and OUT_OF_RANGE.search(words)
    )
    if error.status_code not in REFUSED or (path and wrong):
        return ""
    for name in sorted(feature.partition("=")[0] for feature in open_features):
        if name == "empty text":
            refused = NO_EMPTY.search(words) is not None
        elif name == "broken arguments":
            refused = ABOUT_JSON.search(words) is not None
        elif path:
            refused = names_feature(path, name)
        else:
            refused = says_unsupported(words, name)
        if refused:
            return name
    return ""


def path_of(error: ChatFailure) -> list[str]:
    """Return the path of the refused part as the error gives it; empty if it gives none."""
    if error.param:
        return re.findall(r"\w+", str(error.param))
    details = error.said.get("detail")
    if not isinstance(details, list) or not details:
        return []
    first = cast("list[Any]", details)[0]
    if not isinstance(first, Mapping) or first.get("type") != "extra_forbidden":
        return []
    place: Any = cast("Mapping[str, Any]", first).get("loc", ())
    return [str(part) for part in place if part != "body"]


def names_feature(path: list[str], name: str) -> bool:
    """Return True if the path of an error points to this part of the request, and not to something in it."""
    if name == TOOLS:
        return path in ([TOOLS], ["tool_choice"])
    return path[0] == name if name in PARAMETERS else path[-1] == name


def says_unsupported(message: str, name: str) -> bool:
    """Return True if an error without a path says that the API does not support this part of a request."""
    if name == TOOLS:
        return NO_TOOLS.search(message) is not None
    if name not in PARAMETERS:
        return re.search(rf"\b{re.escape(name)}\b", message) is not None and not WANTED.search(message)
    if name not in FORM and ABOUT_CALLS.search(message):
        return False
    quoted = rf"[\[({{]*['\"`]?\b{name}\b['\"`]?"
    said = (
        rf"(unsupported|unknown|unrecognized|unexpected|extra|no such) (\w+ ){{0,3}}?\w+:? {quoted}"
        rf"|invalid (param\w*|argument|field|property|name|key)s?( name)?:? {quoted}"
        rf"|invalid {quoted}\W.*\bonly"
        rf"|{quoted}:? ((is|are|does|do|was|has been) )?(\w+ )?"
        rf"(not|un(supported|known|recognized)|deprecated|forbidden|extra (inputs|fields))\b"
        rf"|(not|n't) (support|allow|accept|permit|recogni[sz]e)\w*:? (\w+:? ){{0,4}}?{quoted}"
        rf"|(instead of|remove|without) (\w+ )?{quoted}"
    )
    return re.search(said, message, re.IGNORECASE) is not None
