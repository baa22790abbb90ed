"""Ask a chat API the list of `api_questions`, and say what it can do, what the engine does, and what stays.

Each request is sent as it stands there, not as the engine would mend it. A finding is `ok` if the API answers
as OpenAI's does, None if it does not and the engine deals with that, and False if something stays wrong.
`agentenv doctor -m openai:NAME` prints them, and `--json` gives them to programs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agentenv.core import AgentEnvError, Message, text_of
from agentenv.engine import EngineFinding, Sampling
from agentenv_providers.openai.engine import OpenAIChatEngine
from agentenv_providers.openai.errors import ChatFailure, words_of
from agentenv_providers.openai.questions import (
    QUESTIONS,
    RESULT,
    SUM,
    TOOLS,
    Json,
    Question,
    user,
    with_messages,
)
from agentenv_providers.openai.reply import Unreadable, sent_back, whole_reply

__all__ = ["examine_api"]

AT_ONCE = 4
TOKENS = 1024
"""Room for models that think before they answer; most answers are a few words."""


class ApiExamination:
    """Plays the list against one API."""

    def __init__(self, engine: OpenAIChatEngine, limit: str = "") -> None:
        self._engine = engine
        self._limit = limit
        self._room = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> list[EngineFinding]:
        """Ask everything; a failure of the API is a finding."""
        names = {"max_tokens", "max_completion_tokens"}
        limits = [await self._find(each) for each in QUESTIONS if each.name in names]
        self._limit = next((each.name for each in limits if each.ok), "")
        rest = [each for each in QUESTIONS if each.name not in names]
        findings = await asyncio.gather(*(self._find(each) for each in rest))
        return [*limits, *findings, await self._errors(), await self._own_words(), await self._whole()]

    async def ask(self, fields: Mapping[str, Any]) -> Json:
        """Send a request as it is."""
        body: Json = {"messages": [user("Say hello.")], **fields}
        limit = body.pop("limit", TOKENS)
        if self._limit and not {"max_tokens", "max_completion_tokens"} & set(body):
            body[self._limit] = limit
        async with self._room:
            return await self._engine.post(body, stream=bool(body.pop("stream", False)))

    async def _find(self, question: Question) -> EngineFinding:
        try:
            lacks = question.lacks(await self.ask(question.asks))
        except ChatFailure as error:
            lacks = words_of(error)
        except (Unreadable, EOFError) as error:
            lacks = str(error)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            lacks = f"the answer has another form: {type(error).__name__}: {error}"
        if not lacks:
            return EngineFinding(question.name, True, "as OpenAI's")
        ok = False if question.stays and not question.does else None
        return EngineFinding(question.name, ok, lacks, question.does, question.stays)

    async def _errors(self) -> EngineFinding:
        """Ask for a model that does not exist: the error must be one, and have words."""
        try:
            await self.ask({"model": "agentenv-no-such-model"})
        except ChatFailure as error:
            said = words_of(error)
            fine = ":" in said and error.status_code in {400, 404, 422}
            return EngineFinding("error", fine or None, said[:120], "" if fine else "passes its words on")
        except (Unreadable, EOFError) as error:
            return EngineFinding("error", None, str(error), "ends the episode in words")
        return EngineFinding(
            "error", None, "a model that does not exist answers", "", "names are not checked"
        )

    async def _own_words(self) -> EngineFinding:
        """Send back what the API said itself when it called a tool, signatures and all."""
        name = "its own words in the history"
        try:
            answer = await self.ask(with_messages(SUM, tools=TOOLS))
            said = whole_reply(answer["choices"][0], "api").message
            calls = said.get("tool_calls") or []
            results: list[Json] = [{**RESULT, "tool_call_id": call["id"]} for call in calls]
            await self.ask(with_messages(SUM, dict(sent_back(said, "api")), *results, tools=TOOLS))
        except ChatFailure as error:
            return EngineFinding(name, False, words_of(error), "", "episodes with tools")
        except (LookupError, TypeError, ValueError, EOFError) as error:
            return EngineFinding(name, None, f"{type(error).__name__}: {error}")
        kept = (
            ", ".join((said.get("provider_specific_fields") or {}).get("fields", ())) or "nothing of its own"
        )
        return EngineFinding(name, True, f"taken back, with {kept}")

    async def _whole(self) -> EngineFinding:
        """Play a turn with a tool as an episode does, with all that the engine does about the API."""
        told: list[Message] = [{"role": "user", "content": SUM["content"]}]
        try:
            first = await self._engine.chat(told, TOOLS, Sampling(max_tokens=TOKENS, seed=1))
            calls = first.message.get("tool_calls") or []
            told.append(first.message)
            results: list[Message] = [
                {"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in calls
            ]
            told += results
            last = await self._engine.chat(told, TOOLS, Sampling(max_tokens=TOKENS, seed=2))
        except AgentEnvError as error:
            return EngineFinding("an episode", False, f"{type(error).__name__}: {error}", "", "evaluations")
        right = bool(calls) and "5" in text_of(last.message)
        detail = f"{len(calls)} calls, then {text_of(last.message)[:60]!r}"
        return EngineFinding("an episode", right or None, detail, "", "" if right else "look at the answers")


async def examine_api(engine: OpenAIChatEngine) -> list[EngineFinding]:
    """Play the list of requests against the API of an engine."""
    return await ApiExamination(engine).run()
