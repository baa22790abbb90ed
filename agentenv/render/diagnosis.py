"""The template doctor renders small probe conversations to find out how a template must be rendered.

Nothing depends on the name of the model. A template that cannot be rendered exactly is refused, and
the report says why and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from agentenv.core.errors import RenderError, UsageError, did_you_mean
from agentenv.render.control import ControlSet
from agentenv.render.examine import Examination
from agentenv.render.parse.grammar import Grammar
from agentenv.render.parse.library import GRAMMARS
from agentenv.render.parse.turn import NO_FORMS, Forms
from agentenv.render.protocol import TemplateReport, Verdict
from agentenv.render.tail import Kind, TailReader, TurnEnd
from agentenv.render.template import ChatTemplate
from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["Diagnosis", "diagnose", "doctor_report", "with_grammar"]

_NO_TEMPLATE = "the tokenizer has no chat template"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a renderer needs to know about one template on one tokenizer."""

    report: TemplateReport
    control: ControlSet
    reader: TailReader | None
    """Renders what follows a turn; None if the verdict is `refused`."""
    ends: Mapping[Kind, TurnEnd]
    stop_token_ids: tuple[int, ...]
    grammar: Grammar = GRAMMARS["text"]
    forms: Forms = NO_FORMS


_KNOWN: WeakKeyDictionary[ChatTokenizer, dict[tuple[object, ...], Diagnosis]] = WeakKeyDictionary()


def diagnose(
    tokenizer: ChatTokenizer,
    template_source: str | None,
    stop_token_ids: Sequence[int],
    template_kwargs: Mapping[str, object],
    *,
    text_protocol: bool = False,
    grammar_named: bool = False,
) -> Diagnosis:
    """Examine a template.

    Diagnoses are cached for each tokenizer, so a second renderer costs nothing.

    Args:
        tokenizer: the tokenizer, which defines the control tokens.
        template_source: Jinja source of the template; None if the model has none.
        stop_token_ids: ids that end generation, in addition to those of the tokenizer.
        template_kwargs: values for the template.
        text_protocol: do not use the tool turns of the template.
        grammar_named: the user named a grammar, so none has to be recognised.
    """
    values = repr(sorted(template_kwargs.items()))
    key = (template_source, tuple(stop_token_ids), values, text_protocol, grammar_named)
    known = _KNOWN.setdefault(tokenizer, {})
    if key not in known:
        stops = tuple(dict.fromkeys((*tokenizer.eos_token_ids, *stop_token_ids)))
        control = ControlSet.of(tokenizer, template_source or "")
        added = tokenizer.added_tokens
        examination = Examination(
            control,
            frozenset(added[token_id].content for token_id in stops if token_id in added),
            text_protocol=text_protocol,
            grammar_named=grammar_named,
        )
        special = {**tokenizer.special_tokens, **template_kwargs}
        known[key] = _examined(examination, template_source, special, stops)
    return known[key]


def _examined(
    examination: Examination, source: str | None, values: Mapping[str, object], stops: tuple[int, ...]
) -> Diagnosis:
    """Run the examination of a template, and return what it found."""
    control = examination.control
    try:
        if not source:
            raise RenderError(_NO_TEMPLATE, remedy="pass a template as chat_template")
        examination.run(ChatTemplate(source, values))
    except RenderError as error:
        remedy = error.remedy or "pass a chat_template that renders its turns"
        return Diagnosis(TemplateReport("refused", (str(error.args[0]),), remedy), control, None, {}, stops)
    ends = examination.ends
    added = [control.strings[end.end] for end in ends.values() if not end.known_stop]
    return Diagnosis(
        examination.report(),
        control,
        examination.reader,
        ends,
        tuple(dict.fromkeys((*stops, *added))),
        examination.grammar,
        examination.forms,
    )


def with_grammar(diagnosis: Diagnosis, grammar: str | Grammar) -> Diagnosis:
    """Return the diagnosis with its grammar replaced by one that the user named.

    Raises:
        UsageError: There is no grammar of this name.
    """
    if isinstance(grammar, str):
        if grammar not in GRAMMARS:
            meant = did_you_mean(grammar, GRAMMARS)
            raise UsageError(
                f"unknown grammar {grammar!r}", remedy=f"{meant} one of: {', '.join(GRAMMARS)}".lstrip()
            )
        grammar = GRAMMARS[grammar]
    return replace(diagnosis, grammar=grammar, report=replace(diagnosis.report, grammar=grammar.name))


def doctor_report(path: str | Path, *, chat_template: str | None = None) -> str:
    """Return the doctor's findings on a model directory or GGUF file, as text for a person.

    Raises:
        ModelNotFound: The path holds no tokenizer.
    """
    tokenizer = ChatTokenizer.load(path)
    diagnosis = diagnose(tokenizer, chat_template or tokenizer.chat_template, (), {})
    report = diagnosis.report
    stops = [tokenizer.backend.id_to_token(token_id) or "?" for token_id in diagnosis.stop_token_ids]
    lines = [
        f"template of {path}",
        f"  verdict        {report.verdict}: {_MEANING[report.verdict]}",
        *(f"  reason         {reason}" for reason in report.reasons),
        *([f"  remedy         {report.remedy}"] if report.remedy else []),
        *(f"  {kind} turns end  {closer}" for kind, closer in report.closers.items()),
        f"  tool calls     {report.grammar}",
        f"  stop tokens    {' '.join(stops) or 'none'}",
        f"  control tokens {len(diagnosis.control.strings)}",
        *(f"  warning        {warning}" for warning in report.warnings),
    ]
    return "\n".join(lines)


_MEANING: Mapping[Verdict, str] = {
    "fast": "each turn is rendered from its new messages alone",
    "history": "each turn is rendered together with the earlier messages, and only the new end is used",
    "no_tool_role": "tools go through the text protocol; turns are rendered from their new messages alone",
    "refused": "this template cannot be rendered exactly",
}
