"""Questions that are answered by several searches in a corpus of 2,100 pages.

The pages tell of people, companies and towns that do not exist, so nobody knows the answers without
searching. They are made from a fixed seed and searched with BM25. A question takes two or three searches, one
after the other: a person's page names the company, the company's page its town, and the town's page its
inhabitants.
The 900 training and 300 held-out questions ask about different people.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence

import agentenv as ae
from agentenv.core import Message, text_of
from agentenv.testing import tool_call_message
from agentenv_envs.search.corpus import index, questions

__all__ = ["Search", "held_out_questions", "oracle", "train_questions"]

MAX_RESULTS = 3
MAX_QUERY_CHARS = 500
_NUMBER = re.compile(r"\d+")
_LINK = re.compile(r"works for ([^.]+)\.|head office is in ([^.]+)\.")
_FACT = re.compile(r"founded in (\d+)|has (\d+) inhabitants|head office is in ([^.]+)\.")


def train_questions() -> Sequence[Mapping[str, object]]:
    """Return the questions for training."""
    return questions("train")


def held_out_questions() -> Sequence[Mapping[str, object]]:
    """Return the held-out questions."""
    return questions("test")


class Search(ae.ToolEnv):
    """Answer a question that takes several searches in a corpus."""

    system_prompt = (
        "Answer questions about people, companies and towns with the search tool. One page rarely has the "
        "whole answer: search for what a page names. Then answer with the name or number alone."
    )

    def start(self, question: str) -> str:
        """Ask the question."""
        return question

    @ae.tool
    def search(self, query: str) -> list[dict[str, str]]:
        """Search the corpus and return the best pages, at most 3.

        Args:
            query: words that the page should have, for example a name.
        """
        if len(query) > MAX_QUERY_CHARS:
            raise ae.ToolError(f"a query has at most {MAX_QUERY_CHARS} characters")
        pages = index().search(query, MAX_RESULTS)
        return [{"title": page.title, "text": page.text} for page in pages]

    def reward(self, answer: str, target: str, stop_reason: str) -> float:
        """Return 1 if the answer is the target, otherwise 0; of several numbers the last one counts."""
        if stop_reason != "final_answer":
            return 0.0
        if not target.isdigit():
            return float(answer.strip().rstrip(".").casefold() == target.casefold())
        numbers = _NUMBER.findall(answer.replace(",", ""))
        return float(bool(numbers) and numbers[-1] == target)


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message | str:
    """Search for the person, then for what each page names, until a page has what the question asks for."""
    question = str(task["question"])
    person = re.search(r"that (\w+ \w+) works for", question)
    assert person is not None
    results = [text_of(message) for message in messages if message["role"] == "tool"]
    if not results:
        return tool_call_message("search", query=person[1])
    page = str(json.loads(results[-1])[0]["text"])
    wanted = next(word for word in ("founded", "inhabitants", "head office") if word in question)
    facts = [fact for fact in _FACT.finditer(page) if wanted in fact[0]]
    if facts:
        return next(part for part in facts[0].groups() if part)
    link = _LINK.search(page)
    assert link is not None
    return tool_call_message("search", query=link[1] or link[2])


ae.register(
    "agentenv/Search-v0",
    Search,
    tasks={"train": train_questions, "test": held_out_questions},
    max_turns=8,
    description="Answer questions that take several searches in a corpus of made-up facts.",
)
