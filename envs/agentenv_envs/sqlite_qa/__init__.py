"""Questions about a shop's database, answered with SQL.

The database has customers, products, orders and order lines. It is made from a fixed seed, so it is the
same on every machine. Queries are read-only, which SQLite itself checks, and they are stopped after a fixed
amount of work. The 300 training and 200 held-out questions ask about different rows.
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import agentenv as ae
from agentenv.core import Message, text_of
from agentenv.testing import tool_call_message
from agentenv_envs.sqlite_qa.shop import build, questions

__all__ = ["SqliteQA", "oracle"]

MAX_ROWS = 50
MAX_STEPS = 2_000_000
"""Most instructions of SQLite's virtual machine that a query may take; they take about 0.1 s."""

_ALLOWED = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
_REFUSED_FUNCTIONS = frozenset({"format", "load_extension", "printf", "random", "randomblob", "zeroblob"})
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class SqliteQA(ae.ToolEnv):
    """Answer a question about a shop with read-only SQL."""

    system_prompt = "Answer questions about a SQLite database. Query it, then answer with the value alone."

    def start(self, question: str) -> str:
        """Ask the question; a tool shows the tables."""
        return question

    @ae.tool
    def show_tables(self) -> str:
        """Return the statements that made the tables."""
        return "\n".join(row[0] for row in _select("SELECT sql FROM sqlite_master WHERE type = 'table'"))

    @ae.tool
    def query(self, sql: str) -> list[list[Any]]:
        """Run one SELECT and return its rows, at most 50.

        Args:
            sql: a single SELECT statement of SQLite.
        """
        return [list(row) for row in _select(sql)]

    def reward(self, answer: str, target: str, stop_reason: str) -> float:
        """Return 1 if the answer is right, otherwise 0. Numbers must agree to a cent; case is ignored."""
        if stop_reason != "final_answer":
            return 0.0
        if not _NUMBER.fullmatch(target):
            return float(answer.strip().rstrip(".").casefold() == target.casefold())
        numbers = _NUMBER.findall(answer.replace(",", ""))
        return float(bool(numbers) and abs(float(numbers[-1]) - float(target)) < 0.005)


def _select(sql: str) -> list[tuple[Any, ...]]:
    """Run a query on a fresh copy of the shop's database; the query cannot change it."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(build())
        connection.set_authorizer(_authorize)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)
        connection.set_progress_handler(lambda: 1, MAX_STEPS)
        rows = connection.execute(sql).fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise ae.ToolError(f"SQLite says: {error}") from error
    finally:
        connection.close()
    if len(rows) > MAX_ROWS:
        raise ae.ToolError(f"more than {MAX_ROWS} rows: ask for less, or count and sum in SQL")
    return [tuple(f"{len(v)} bytes" if isinstance(v, bytes) else v for v in row) for row in rows]


def _authorize(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
    refused = action == sqlite3.SQLITE_FUNCTION and second in _REFUSED_FUNCTIONS
    return sqlite3.SQLITE_OK if action in _ALLOWED and not refused else sqlite3.SQLITE_DENY


def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
    """Run the query that belongs to the question, and answer with its value."""
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": str(json.loads(text_of(messages[-1]))[0][0])}
    sql = next(question.sql for question in questions() if question.id == task["id"])
    return tool_call_message("query", sql=sql)


def _rows(split: str) -> list[dict[str, object]]:
    return [
        {"id": question.id, "question": question.text, "target": question.target}
        for question in questions()
        if question.split == split
    ]


def _train() -> list[dict[str, object]]:
    return _rows("train")


def _test() -> list[dict[str, object]]:
    return _rows("test")


ae.register("agentenv/SqliteQA-v0", SqliteQA, tasks={"train": _train, "test": _test}, max_turns=6)
