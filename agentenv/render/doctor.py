"""The template doctor: watches what a template does with probes, and says how to render with it.

Nothing is keyed to a model's name. Each finding comes from rendering a small conversation; what
cannot be rendered exactly is refused in words, with a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from agentenv.errors import RenderError
from agentenv.render.base import TemplateReport, Verdict
from agentenv.render.control import ControlSet
from agentenv.render.parse.turn import THINK_TAGS
from agentenv.render.tail import PROBE, USER, Habits, Kind, TailReader, TurnEnd, probe_call, probe_message
from agentenv.render.template import ChatTemplate
from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["Diagnosis", "diagnose", "doctor_report"]

PROBE_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["city", "n"],
        },
    },
}

_NO_TEMPLATE = "the tokenizer has no chat template"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a renderer needs to know about one template on one tokenizer."""

    report: TemplateReport
    control: ControlSet
    reader: TailReader | None
    """None if the verdict is `refused`."""
    ends: Mapping[Kind, TurnEnd]
    stop_token_ids: tuple[int, ...]
    thinking_open: str = ""


def diagnose(
    tokenizer: ChatTokenizer,
    template_source: str | None,
    stop_token_ids: Sequence[int],
    template_kwargs: Mapping[str, object],
) -> Diagnosis:
    """Examine a template."""
    stops = tuple(dict.fromkeys((*tokenizer.eos_token_ids, *stop_token_ids)))
    control = ControlSet.of(tokenizer, template_source or "")
    names = {token_id: string for string, token_id in control.strings.items()}
    for token_id in stops:
        token = tokenizer.backend.id_to_token(token_id)
        if token is not None and token_id not in names and token_id in tokenizer.added_tokens:
            names[token_id] = tokenizer.added_tokens[token_id].content
    stop_strings = frozenset(names[token_id] for token_id in stops if token_id in names)
    examination = _Examination(control, stop_strings)
    try:
        if not template_source:
            raise RenderError(_NO_TEMPLATE)
        template = ChatTemplate(template_source, {**tokenizer.special_tokens, **template_kwargs})
        examination.run(template)
    except RenderError as error:
        remedy = (
            "pass one as chat_template"
            if not template_source
            else "pass a chat_template that renders its turns"
        )
        if "stop_token_ids" in str(error):
            remedy = "pass the model's stop tokens as stop_token_ids"
        report = TemplateReport("refused", (str(error),), remedy)
        return Diagnosis(report, control, None, {}, stops)
    ends = examination.ends
    added = [control.strings[end.end] for end in ends.values() if not end.known_stop]
    return Diagnosis(
        examination.report(),
        control,
        examination.reader,
        ends,
        tuple(dict.fromkeys((*stops, *added))),
        examination.thinking_open,
    )


class _Examination:
    """One template under examination; each check adds to the findings."""

    def __init__(self, control: ControlSet, stop_strings: frozenset[str]) -> None:
        self.control = control
        self.stop_strings = stop_strings
        self.ends: dict[Kind, TurnEnd] = {}
        self.verdict: Verdict = "fast"
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        self.remedy = ""
        self.grammar = "hermes"
        self.thinking_open = ""
        self.reader: TailReader

    def run(self, template: ChatTemplate) -> None:
        """Learn habits, turn ends and verdict.

        Raises:
            RenderError: Not even text turns can be rendered.
        """
        self.reader = TailReader(template, self.control, self.stop_strings, Habits())
        self._learn_text()
        self._learn_call()
        self._watch_thinking()

    def report(self) -> TemplateReport:
        """Return the findings."""
        closers = {kind: end.end for kind, end in self.ends.items()}
        return TemplateReport(
            self.verdict, tuple(self.reasons), self.remedy, tuple(self.warnings), self.grammar, closers
        )

    def _set(self, **habits: bool) -> None:
        old = self.reader
        self.reader = TailReader(old.template, old.control, old.stop_strings, replace(old.habits, **habits))

    def _tools(self) -> Sequence[Mapping[str, object]] | None:
        return [PROBE_TOOL] if self.reader.habits.tools_needed else None

    def _try(self, check: Callable[[], TurnEnd], *options: Mapping[str, bool]) -> TurnEnd:
        """Run a check under the first of several habits with which it passes."""
        before = self.reader
        first: RenderError | None = None
        for option in ({}, *options):
            self.reader = before
            self._set(**option)
            try:
                return check()
            except RenderError as error:
                first = first or error
        self.reader = before
        assert first is not None
        raise first

    def _learn_text(self) -> None:
        def check() -> TurnEnd:
            return self.reader.learn("text", self.ends, tools=self._tools())

        self.ends["text"] = self._try(check, {"content_parts": True}, {"tools_needed": True})
        try:
            text = self.reader.render([{"role": "system", "content": PROBE}, USER], tools=self._tools())
        except RenderError:
            text = ""
        if PROBE not in text:
            self._set(system_role=False)

    def _learn_call(self) -> None:
        def check() -> TurnEnd:
            return self.reader.learn("call", self.ends, tools=self._tools())

        try:
            self.ends["call"] = self._try(
                check,
                *(
                    dict.fromkeys(names, True)
                    for count in (1, 2, 3)
                    for names in combinations(("json_arguments", "null_content", "tools_needed"), count)
                ),
            )
        except RenderError as error:
            self.verdict = "no_tool_role"
            self.reasons.append(f"no tool turns: {error}")
            self.remedy = (
                "tools are told and answered in plain text; for the model's own format pass a chat_template"
            )

    def _watch_thinking(self) -> None:
        """See whether the generation prompt leaves the model inside its thinking."""
        try:
            text = self.reader.render([{"role": "user", "content": PROBE}], tools=self._tools())
        except RenderError:
            return
        prompt = text[text.rfind(PROBE) + len(PROBE) :]
        for opens, closes in THINK_TAGS:
            if opens in prompt and closes not in prompt[prompt.rfind(opens) :]:
                self.thinking_open = opens


def doctor_report(path: str | Path, *, chat_template: str | None = None) -> str:
    """Return the doctor's findings on a model directory or GGUF file, as text for a person.

    Raises:
        ModelNotFound: There is no tokenizer.
    """
    tokenizer = ChatTokenizer.load(path)
    found = diagnose(tokenizer, chat_template or tokenizer.chat_template, (), {})
    report = found.report
    stops = [tokenizer.backend.id_to_token(token_id) or "?" for token_id in found.stop_token_ids]
    lines = [
        f"template of {path}",
        f"  verdict        {report.verdict}: {_MEANING[report.verdict]}",
        *(f"  reason         {reason}" for reason in report.reasons),
        *([f"  remedy         {report.remedy}"] if report.remedy else []),
        *(f"  {kind} turns end  {closer}" for kind, closer in report.closers.items()),
        f"  tool calls     {report.grammar}",
        f"  stop tokens    {' '.join(stops) or 'none'}",
        f"  control tokens {len(found.control.strings)}",
        *(f"  warning        {warning}" for warning in report.warnings),
    ]
    return "\n".join(lines)


_MEANING: Mapping[Verdict, str] = {
    "fast": "a turn is rendered from what is new",
    "history": "a turn is rendered with the earlier messages, and only its tail is used",
    "no_tool_role": "tools go through the text protocol; text turns are rendered from what is new",
    "refused": "this template cannot be rendered exactly",
}
