"""An oracle for those pages of MiniWoB++ whose task can be read from its words.

MiniWoB++ has no ground truth. What its task says and what the page's text shows is enough for the pages in
`SOLVED`; the others have no oracle.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.core import Message, text_of
from agentenv_worlds.calls import message_with_calls
from agentenv_worlds.miniwob.env import MiniWob
from agentenv_worlds.turns import turn_of

__all__ = ["SOLVED", "SolvedMiniWob"]

SOLVED = (
    "choose-list",
    "click-button",
    "click-checkboxes",
    "click-option",
    "click-test",
    "click-test-2",
    "enter-password",
    "enter-text",
    "focus-text",
    "login-user",
)

_Calls = list[tuple[str, Mapping[str, Any]]]


class SolvedMiniWob(MiniWob):
    """A page with an oracle."""

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        """Make the next call that the task's words ask for."""
        first = next(message for message in messages if message["role"] == "user")
        asked, _, page = text_of(first).partition("\n\nThe page:\n")
        return message_with_calls([_plan(asked, page)[turn_of(messages)]])


def _plan(asked: str, page: str) -> _Calls:
    """Return the calls that do what is asked."""
    quoted: list[str] = re.findall(r'"([^"]*)"', asked)
    if asked.startswith("Select ") and "from the list" in asked:
        option = asked.removeprefix("Select ").partition(" from the list")[0]
        return [("select", {"ref": _ref(page, "combobox"), "options": [option]}), _press(page, "Submit")]
    if asked.startswith("Select "):
        role = "radio" if "- radio" in page else "checkbox"
        wanted = re.sub(r" and click Submit\.?$", "", asked.removeprefix("Select ")).split(", ")
        ticks = [("click", {"ref": _ref(page, role, name)}) for name in wanted if name != "nothing"]
        return [*ticks, _press(page, "Submit")]
    if asked.startswith("Click"):
        name = quoted[0] if quoted else re.sub(r"^Click (the )?button ?|\.$", "", asked)
        return [_press(page, name)]
    fields = _refs(page, "textbox")
    if not quoted:
        return [("click", {"ref": fields[0]})]
    # A password may have to be written twice.
    texts = [quoted[min(number, len(quoted) - 1)] for number in range(len(fields))]
    return [
        *(("fill", {"ref": ref, "text": text}) for ref, text in zip(fields, texts, strict=True)),
        ("click", {"ref": _refs(page, "button")[-1]}),
    ]


def _press(page: str, name: str) -> tuple[str, Mapping[str, Any]]:
    return "click", {"ref": _ref(page, "button", name)}


def _ref(page: str, role: str, name: str = "") -> str:
    return _refs(page, role, name)[0]


def _refs(page: str, role: str, name: str = "") -> list[str]:
    """Return the references of the elements of a role; only those of a name, unless it is empty."""
    found = re.finditer(rf'- {role}(?: "([^"]*)")?[^\n]*?\[ref=(e\d+)\](?:[^\n]*?: "?([^"\n]*))?', page)
    return [match[2] for match in found if not name or name in (match[1], match[3])]
