"""The checks of the template doctor: each renders a small conversation and inspects the result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from agentenv.core.errors import RenderError
from agentenv.render.context import dependences
from agentenv.render.control import SENTINEL, ControlSet
from agentenv.render.forms import FormLearner
from agentenv.render.parse.choose import by_tags
from agentenv.render.parse.grammar import Grammar
from agentenv.render.parse.library import GRAMMARS
from agentenv.render.parse.turn import Forms
from agentenv.render.protocol import TemplateReport, Verdict
from agentenv.render.tail import (
    FIRST,
    PROBE,
    PROBE_TOOL,
    USER,
    Habits,
    Kind,
    Plain,
    TailReader,
    TurnEnd,
    probe_call,
    probe_message,
)
from agentenv.render.template import ChatTemplate
from agentenv.render.template_limits import TemplateLimit

__all__ = ["Examination"]

_AWKWARD = "  x\t'\"<b>\n\n{{ é }} \\ y\n "
_LOOKS_CONTROL = re.compile(r"<\|[^|<>{}'\"\s]+\|>|<\uff5c[^\uff5c<>{}'\"\s]+\uff5c>")


class Examination:
    """The examination of one template; each check adds to its findings."""

    def __init__(
        self,
        control: ControlSet,
        stop_strings: frozenset[str],
        *,
        text_protocol: bool = False,
        grammar_named: bool = False,
    ) -> None:
        self.control = control
        self.text_protocol = text_protocol
        self.grammar_named = grammar_named
        self.stop_strings = stop_strings
        self.ends: dict[Kind, TurnEnd] = {}
        self.verdict: Verdict = "fast"
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        self.remedy = ""
        self.grammar: Grammar = GRAMMARS["hermes"]
        self.prints_ids = False
        self.forms = Forms()
        self.reader: TailReader

    def run(self, template: ChatTemplate) -> None:
        """Find out the habits of the template, how its turns end, the verdict and the grammar.

        Raises:
            RenderError: Not even text turns can be rendered.
        """
        self.reader = TailReader(template, self.control, self.stop_strings, Habits())
        self._learn_text()
        self._refuse_what_moves()
        self._learn_call()
        self._watch_stops()
        if "call" in self.ends:
            self._watch_several_calls()
            self._watch_ids()
        self._learn_forms()
        self._watch_context()
        self._watch_content()
        self._watch_thinking()
        self._watch_unregistered()

    def report(self) -> TemplateReport:
        """Return the findings as a report."""
        closers = {kind: end.end for kind, end in self.ends.items()}
        return TemplateReport(
            self.verdict,
            tuple(self.reasons),
            self.remedy,
            tuple(self.warnings),
            self.grammar.name,
            closers,
            self.prints_ids,
        )

    def _set(self, **habits: bool | str) -> None:
        old = self.reader
        self.reader = TailReader(old.template, old.control, old.stop_strings, replace(old.habits, **habits))

    def _tools(self) -> Sequence[Mapping[str, object]] | None:
        return self.reader.tools_needed

    def _try(self, check: Callable[[], TurnEnd], names: Sequence[str], at_most: int) -> TurnEnd:
        """Run a check with as few of the named habits switched on as it needs to pass.

        Raises:
            RenderError: The check fails with every combination; the error is that of the first try.
        """
        before = self.reader
        first: RenderError | None = None
        for count in range(at_most + 1):
            for chosen in combinations(names, count):
                self.reader = before
                self._set(**dict.fromkeys(chosen, True))
                try:
                    return check()
                except RenderError as error:
                    if isinstance(error, TemplateLimit):  # the next combination would take as long
                        raise
                    first = first or error
        self.reader = before
        assert first is not None
        raise first

    def _learn_text(self) -> None:
        def check() -> TurnEnd:
            return self.reader.learn("text", self.ends, tools=self._tools())

        self.ends["text"] = self._try(check, ("content_parts", "empty_tools", "tools_needed"), 1)
        if not self._renders([{"role": "system", "content": PROBE}, USER]):
            self._set(system_role=False)

    def _refuse_what_moves(self) -> None:
        """Refuse a template that changes in a longer conversation what was rendered, or where it stands.

        Prompts are only ever appended to, so the model would read another text than a full render has.

        Raises:
            RenderError: A full render differs from what is appended.
        """
        tools = self._tools()
        prompt = self.reader.render([USER], tools=tools)
        bare = self.reader.render([USER], tools=tools, generation_prompt=False)
        lead = ""
        with suppress(RenderError):  # some templates refuse a conversation that ends with a reply
            whole = self.reader.render(
                [USER, self.reader.assistant([])], tools=tools, generation_prompt=False
            )
            lead = whole.partition(SENTINEL)[0].removeprefix(bare) if whole.startswith(bare) else ""
        if prompt == bare and lead.strip():
            raise RenderError(
                f"the template writes {lead.strip()!r} before an assistant's text, but it has no generation "
                "prompt that writes it",
                remedy="write it at the end of the template if add_generation_prompt is true",
            )
        if "random" in self.reader.template.source:
            return  # two renders of such a template differ anyway
        # Few turns find what every turn changes, many what happens only to a long conversation.
        for rounds in (2, 3, 12):
            self._compare_rounds(prompt, rounds)

    def _compare_rounds(self, prompt: str, rounds: int) -> None:
        """Compare a full render of several rounds with what was rendered turn by turn."""
        said = [f"{PROBE}{index}z" for index in range(1, 2 * rounds - 1)]
        roles = ("assistant", "user")
        answers: list[Plain] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        messages = [USER, *answers]
        try:
            whole = self.reader.render(messages, tools=self._tools())
        except RenderError:
            return  # the check of the context says what the template refuses
        parts = [prompt.rpartition(FIRST)[0] + FIRST]
        for index in range(1, len(messages), 2):
            tail = self.reader.tail(
                [], messages[index + 1 :][:1], before=messages[:index], tools=self._tools()
            )
            user = said[index]
            parts += [said[index - 1], tail.partition(user)[0] + user]
        place = 0
        for index, part in enumerate(parts):
            # What stands before an assistant's text may change: thinking is opened, closed and forgotten.
            at = whole.find(part, place) if index % 2 else place
            if at < 0 or not whole.startswith(part, at):
                raise _moved(part, whole[place if at < 0 else at :], len(messages))
            place = at + len(part)

    def _renders(self, messages: Sequence[Plain]) -> bool:
        """Return True if the template renders the conversation and the result contains the probe."""
        try:
            return PROBE in self.reader.render(messages, tools=self._tools())
        except RenderError:
            return False

    def _learn_call(self) -> None:
        def check() -> TurnEnd:
            return self.reader.learn("call", self.ends, tools=self._tools())

        names = ("json_arguments", "null_content", "empty_tools", "two_calls", "tools_needed")
        if self.text_protocol:
            self.verdict = "no_tool_role"
            self.reasons.append("the text protocol was requested")
            return
        try:
            try:
                self.ends["call"] = self._try(check, names, 3)
            except RenderError:
                if not self._spells_calls():
                    raise
                self.ends["call"] = check()
            self._watch_empty_content()
            self._refuse_lost_results()
            shown = self.reader.render([USER], tools=[PROBE_TOOL])
            if "get_weather" not in shown:
                self.warnings.append(
                    "the template does not describe the tools to the model: describe them in the system "
                    "message, or pass protocol=TextProtocol()"
                )
        except RenderError as error:
            if isinstance(error, TemplateLimit):
                raise
            self.ends.pop("call", None)
            self.verdict = "no_tool_role"
            self.reasons.append(f"the template has no usable tool turns: {error}")
            self.remedy = (
                "tools are described and answered in plain text; to use the model's own format, pass a "
                f"chat_template with a tool role (and its stop tokens){self._other_grammar()}"
            )

    def _refuse_lost_results(self) -> None:
        """Refuse tool turns whose results a longer conversation leaves out: here they stay.

        Raises:
            RenderError: A result is missing, or stands in another place.
        """
        messages: list[Plain] = [USER]
        for index in range(3):
            messages.append(self.reader.assistant([probe_call(index)]))
            messages.append(probe_message("call", f"{PROBE}{index}z", index))
        try:
            whole = self.reader.render(messages, tools=self._tools())
        except RenderError:
            return  # the check of the context says what the template refuses
        places = [whole.find(f"{PROBE}{index}z") for index in range(3)]
        if min(places) < 0 or places != sorted(places):
            raise RenderError("in longer conversations the template leaves out or moves earlier tool results")

    def _spells_calls(self) -> bool:
        """Have calls written as content if the template describes tools in a grammar that is known."""
        shown = self.reader.render([USER], tools=[PROBE_TOOL])
        grammar = by_tags(self.control, shown, spelled=True) if "get_weather" in shown else ""
        self._set(spelled=grammar)
        return bool(grammar)

    def _other_grammar(self) -> str:
        name = by_tags(self.control, self.reader.template.source)
        return f"; grammar={name!r} reads calls in the format of its tags" if name else ""

    def _watch_empty_content(self) -> None:
        """Check whether empty content beside calls is written as another turn, so that there must be none."""
        results = [probe_message("call")]
        plain = self.reader.tail([probe_call()], results, tools=self._tools())
        habits = self.reader.habits
        self._set(null_content=True)
        with suppress(RenderError):
            bare = self.reader.tail([probe_call()], results, tools=self._tools())
            if PROBE in bare and len(bare) < len(plain):
                return
        self._set(null_content=habits.null_content)

    def _watch_stops(self) -> None:
        for kind, end in self.ends.items():
            if not end.known_stop:
                self.warnings.append(
                    f"{kind} turns end with {end.end}, which was not a stop token of the model and was added"
                )

    def _watch_several_calls(self) -> None:
        """Check whether one turn may have two calls and two results."""
        calls = [probe_call(), probe_call(1)]
        results = [probe_message("call"), probe_message("call", index=1)]
        try:
            self.reader.tail(calls, results, tools=self._tools())
        except RenderError as error:
            self._set(one_call=True)
            try:
                self.reader.tail(calls, results, tools=self._tools())
            except RenderError:
                self._set(one_call=False)
            self.warnings.append(
                f"the template renders one call per turn: {error}; the results of several calls are appended "
                "one by one"
            )

    def _watch_ids(self) -> None:
        """Check whether the template prints call ids, and refuses those without nine letters and digits."""
        for call_id in ("call_0123456789", "call_0"):
            call: Plain = {**probe_call(), "id": call_id}
            result = {**probe_message("call"), "tool_call_id": call_id}
            try:
                self.reader.tail([call], [result], tools=self._tools())
            except RenderError:
                self._set(nine_ids=True)
        turn = self.reader.assistant([probe_call()])
        whole = self.reader.render([USER, turn, probe_message("call")], tools=self._tools())
        self.prints_ids = str(probe_call()["id"]) in whole

    def _learn_forms(self) -> None:
        """Find the grammar that reads a rendered call, and what stands around thinking, text and calls."""
        learner = FormLearner(self.reader, self.ends)
        grammar = learner.grammar() if "call" in self.ends else None
        self.forms = learner.forms(grammar)
        if grammar is not None:
            self.grammar = grammar
        elif "call" in self.ends and not self.grammar_named:
            self.ends.pop("call")
            self.verdict = "no_tool_role"
            self.reasons.append("no grammar can parse the tool calls that this template writes")
            self.remedy = (
                "tools are described and answered in plain text; to use the model's own format, pass "
                f"grammar= (the name of a built-in grammar, or a Grammar){self._other_grammar()}"
            )

    def _watch_context(self) -> None:
        """Check whether the text after a turn depends on the messages before the turn."""
        for kind, name in dependences(self.reader, self.ends):
            if kind == "text" and name in {"tools", "a system message"}:
                self.warnings.append(
                    f"with {name}, a fresh render of a longer conversation would move it to the last "
                    "user turn; here it stays where the episode began"
                )
            elif self.verdict == "fast":
                self.verdict = "history"
                self.reasons.append(f"the text after a {kind} turn depends on {name}")
                self.remedy = "pass the earlier messages as history; each turn then takes longer as they grow"

    def _watch_content(self) -> None:
        """Check whether tool results (user messages if there are no tools) reach the model unchanged."""
        kind: Kind = "call" if "call" in self.ends else "text"
        calls = [probe_call()] if kind == "call" else []
        message = probe_message(kind, f"{PROBE}{_AWKWARD}{PROBE}")
        try:
            inner = self.reader.tail(calls, [message], tools=self._tools())
            outer = self.reader.tail(calls, [probe_message(kind, f" {PROBE}\n")], tools=self._tools())
        except RenderError as error:
            self.warnings.append(f"the template refuses content with quotes and line breaks: {error}")
            return
        what = "tool results" if kind == "call" else "messages"
        if f"{PROBE}{_AWKWARD}{PROBE}" in inner:
            if f" {PROBE}\n" not in outer:
                self.warnings.append(f"{what} lose white space at their ends")
        elif json.dumps(_AWKWARD, ensure_ascii=False)[1:-1] in inner:
            self.warnings.append(f"{what} are written as JSON strings")
        else:
            self.warnings.append(f"{what} are changed by the template")

    def _watch_thinking(self) -> None:
        """Check whether earlier thinking is rewritten."""
        turns: tuple[Plain, ...] = (
            {"role": "assistant", "content": f"<think>\n{SENTINEL}\n</think>\n\nw"},
            {"role": "assistant", "content": "w", "reasoning_content": SENTINEL},
        )
        if any(self._forgets(turn) for turn in turns):
            self.warnings.append(
                "a fresh render drops earlier thinking; here the model keeps reading what it sampled"
            )

    def _forgets(self, turn: Plain) -> bool:
        """Return True if thinking is rendered only while its turn is the last of the conversation."""
        try:
            now = self.reader.render([USER, turn], tools=self._tools(), generation_prompt=False)
            later = self.reader.render([USER, turn, USER], tools=self._tools())
        except RenderError:
            return False
        return SENTINEL in now and SENTINEL not in later

    def _watch_unregistered(self) -> None:
        written = {match.group() for match in _LOOKS_CONTROL.finditer(self.reader.template.source)}
        unknown = sorted(string for string in written if string not in self.control.strings)
        if unknown:
            shown = " ".join(unknown[:6]) + (" ..." if len(unknown) > 6 else "")
            self.warnings.append(
                f"the template writes {shown}, which the tokenizer does not know as single tokens"
            )


def _moved(appended: str, whole: str, count: int) -> RenderError:
    """Return the error of a full render that differs from what was appended, with the first difference."""
    pairs = enumerate(zip(appended, whole, strict=False))
    place = next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(appended), len(whole)))
    begin = max(0, place - 20)
    return RenderError(
        f"the template changes earlier text: appended turn by turn a conversation has "
        f"{appended[begin : place + 40]!r}, where a render of {count} messages has "
        f"{whole[begin : place + 40]!r}",
        remedy="pass a chat_template that only appends to what it wrote before",
    )
