"""A whole environment: five typed tools on a database, a simulated reader, turn rewards, held-out tasks.

python examples/library_desk.py
agentenv check examples/library_desk.py
agentenv train examples/library_desk.py -m smollm2 --demos oracle -o max_tokens_per_turn=40
"""

import sqlite3
from collections.abc import Mapping, Sequence
from random import Random
from typing import Annotated, Any, TypedDict

from pydantic import Field

import agentenv as ae
from agentenv.core import text_of
from agentenv.testing import tool_call_message

FIRST = ("Amber", "Broken", "Distant", "Empty", "Frozen", "Golden", "Hidden", "Iron", "Lost", "Silent")
SECOND = ("Anchor", "Bridge", "Castle", "Desert", "Forest", "Garden", "Harbour", "Island", "Mirror", "River")
TITLES = [f"The {first} {second}" for first in FIRST for second in SECOND]
FIRST_ID = 10
ASKS = {"borrow": "Do you have {}?", "return": "I bring back {}.", "renew": "May I keep {} for longer?"}
Number = Annotated[int, Field(ge=1, le=999)]  # a number that SQLite can hold, whatever the model writes


class Book(TypedDict):
    book_id: int
    on_loan: bool


class LibraryDesk(ae.ToolEnv):
    """Serve a reader at the desk of a library."""

    system_prompt = "You work at a library. Find the book, ask the reader's number, then do what is wanted."

    def start(self, title: str, wish: str, member: int, on_loan: bool) -> str:
        self.title, self.found = title, False
        self.db = sqlite3.connect(":memory:")
        self.db.execute("CREATE TABLE books (id INTEGER PRIMARY KEY, title, borrower, days, reserved_by)")
        self.db.executemany("INSERT INTO books VALUES (?, ?, NULL, 0, NULL)", enumerate(TITLES, FIRST_ID))
        borrower = member if wish != "borrow" else 1 if on_loan else None
        self.db.execute("UPDATE books SET borrower = ?, days = 3 WHERE title = ?", (borrower, title))
        return ASKS[wish].format(title)

    @ae.tool
    def find(self, title: str) -> Book:
        """Find a book by its title."""
        row = self.db.execute("SELECT id, borrower FROM books WHERE title = ?", (title,)).fetchone()
        if row is None:
            raise ae.ToolError("there is no book of this title")
        if title == self.title and not self.found:
            self.found = True
            self.add_turn_reward(0.2)
        return Book(book_id=row[0], on_loan=row[1] is not None)

    @ae.tool
    def lend(self, book_id: Number, member: Number) -> str:
        """Lend a book that is here to a member."""
        return self._change("borrower = ?, days = 28", "borrower IS NULL", book_id, member)

    @ae.tool
    def reserve(self, book_id: Number, member: Number) -> str:
        """Reserve a book that is on loan for a member."""
        return self._change("reserved_by = ?", "borrower IS NOT NULL", book_id, member)

    @ae.tool
    def renew(self, book_id: Number, member: Number) -> str:
        """Let a member keep a book for longer."""
        return self._change("borrower = ?, days = 28", "borrower IS NOT NULL", book_id, member)

    @ae.tool
    def take_back(self, book_id: Number) -> str:
        """Take back a book."""
        return self._change("borrower = ?, days = 0", "borrower IS NOT NULL", book_id, None)

    def _change(self, what: str, only_if: str, book_id: int, member: int | None) -> str:
        done = self.db.execute(f"UPDATE books SET {what} WHERE id = ? AND {only_if}", (member, book_id))
        if done.rowcount == 0:
            raise ae.ToolError("that cannot be done with this book")
        return "done"

    def reward(self, title: str, wish: str, member: int, on_loan: bool) -> float:
        columns = "SELECT borrower, days, reserved_by FROM books WHERE"
        book = self.db.execute(f"{columns} title = ?", (title,)).fetchone()
        others = self.db.execute(f"{columns} title != ? AND days + coalesce(reserved_by, 0) > 0", (title,))
        lent, reserved = (member, 28, None), (1, 3, member)
        want = {"return": (None, 0, None), "renew": lent, "borrow": reserved if on_loan else lent}[wish]
        return 0.8 * (book == want and others.fetchone() is None)


def reader(messages: Sequence[ae.Message], task: Mapping[str, Any]) -> ae.UserTurn | str:
    if "number" in text_of(messages[-1]):
        return f"My number is {task['member']}."
    return ae.UserTurn("Thank you, goodbye.", done=True)


def oracle(messages: Sequence[ae.Message], task: Mapping[str, Any], rng: Random) -> ae.Message | str:
    if len(messages) == 2:  # the system prompt and the reader's question
        return tool_call_message("find", title=task["title"])
    if messages[-1]["role"] == "tool":
        return "Done." if text_of(messages[-1]) == "done" else "What is your number?"
    book_id = FIRST_ID + TITLES.index(task["title"])
    if task["wish"] == "return":
        return tool_call_message("take_back", book_id=book_id)
    name = {"renew": "renew", "borrow": "reserve" if task["on_loan"] else "lend"}[task["wish"]]
    return tool_call_message(name, book_id=book_id, member=task["member"])


def tasks(titles: Sequence[str], members: range, seed: int) -> list[dict[str, Any]]:
    rng = Random(seed)
    rows = [(title, wish, wish != "borrow" or rng.random() < 0.5) for title in titles for wish in ASKS]
    rng.shuffle(rows)
    return [
        {"title": title, "wish": wish, "on_loan": out, "member": rng.choice(members)}
        for title, wish, out in rows
    ]


SPLITS = {"train": tasks(TITLES[0::2], range(11, 99, 2), 0), "test": tasks(TITLES[1::2], range(10, 99, 2), 1)}
user = ae.FunctionUser(reader)
ae.register("demo/LibraryDesk-v0", LibraryDesk, tasks=SPLITS, user=user, max_turns=6)

if __name__ == "__main__":
    for policy in ("oracle", "random"):
        result = ae.evaluate("demo/LibraryDesk-v0", policy, num_tasks=20)
        rewards = [episode.reward or 0.0 for episode in result.summaries]
        print(f"{policy}: mean reward {sum(rewards) / len(rewards):.2f}")
