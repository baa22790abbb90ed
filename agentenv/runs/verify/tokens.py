"""The checks of a stored episode that need its renderer: what its tokens say against its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, cast

from agentenv.core.errors import RenderError
from agentenv.core.images import keys_of
from agentenv.core.messages import Message, ToolCallMessage, text_of
from agentenv.core.sequence import images_of
from agentenv.core.trajectory import Rewrite, Trajectory, Turn
from agentenv.engine.exact import faulty_end
from agentenv.render.renderer import Renderer
from agentenv.runs.verify.findings import Verification
from agentenv.runs.verify.record import answers_of

__all__ = ["Drift", "check_tokens"]

Drift: TypeAlias = Literal["strict", "ignore", "off"]
"""`strict`: drift is a disagreement. `ignore`: it is only reported. `off`: it is not looked for."""


_CONTEXT = 8
"""Number of tokens that a finding shows on each side of a difference."""


def check_tokens(record: Trajectory, renderer: Renderer, drift: Drift, checks: Verification) -> None:
    """Check the tokens of an episode whose turns, spans and messages agree with each other.

    Args:
        record: the episode, which has tokens.
        renderer: the renderer of its run.
        drift: what a difference from a full render means.
        checks: gets the findings.
    """
    _Tokens(record, renderer, drift, checks).check()


class _Tokens:
    """The checks of one episode."""

    def __init__(self, record: Trajectory, renderer: Renderer, drift: Drift, checks: Verification) -> None:
        self._record = record
        self._unbound = renderer
        self._renderer = renderer.bind(record.tools)
        self._drift = drift
        self._checks = checks
        self._answers = answers_of(record) or []
        self._tokens = [sequence.keys for sequence in record.sequences]
        """The tokens of each sequence, those of an image as its keys, so that another image is found, too."""
        self._anchor = renderer.stop_token_ids[:1]

    def check(self) -> None:
        before: Turn | None = None
        for turn in self._record.turns:
            self._bind(turn)
            self._check_sampled(turn)
            if before is None or before.sequence != turn.sequence:
                self._check_prompt(turn)
            else:
                self._check_observation(before, turn)
            before = turn
        if self._drift != "off":
            for turn in {turn.sequence: turn for turn in self._record.turns}.values():
                self._bind(turn)
                self._check_drift(turn)

    def _bind(self, turn: Turn) -> None:
        """Render with the tools that the model was shown at a turn."""
        tools = self._record.tools_at(turn.index)
        if tools != self._renderer.tools:
            self._renderer = self._unbound.bind(tools)

    def _view(self, turn: Turn) -> list[Message]:
        """Return the messages that the model saw before a turn."""
        record = self._record
        shown, first = list(self._answers[0]), 0
        for rewrite in record.rewrites:
            if rewrite.turn <= turn.index:
                shown, first = list(rewrite.messages), rewrite.turn
        for earlier in record.turns[first : turn.index]:
            shown += [earlier.message, *self._answers[earlier.index + 1]]
        return shown

    def _check_sampled(self, turn: Turn) -> None:
        ids = self._tokens[turn.sequence][turn.start : turn.end]
        checks = self._checks
        checks.checked["parse"] += 1
        parsed = self._renderer.parse(ids)
        # An agent is sent a repeated call with another id, so ids do not follow from tokens.
        read, stored = _without_ids(parsed.message), _without_ids(turn.message)
        whole = not self._is_what_was_sent(turn, read, stored)
        if whole and read != stored:
            checks.add("parse", turn.index, f"its tokens say {read!r:.300}, its message {stored!r:.300}")
        elif whole and [replace(call, id="") for call in parsed.tool_calls] != [
            replace(call, id="") for call in turn.tool_calls
        ]:
            read, stored = parsed.tool_calls, turn.tool_calls
            checks.add("parse", turn.index, f"its tokens hold the calls {read!r:.300}, not {stored!r:.300}")
        if complaint := self._wrong_end(turn, ids):
            checks.add("parse", turn.index, complaint)
        checks.checked["tokenisation"] += 1
        if other := self._encoded_otherwise(ids):
            checks.add("tokenisation", turn.index, self._difference(ids, other, "encodes to"), wrong=False)

    def _wrong_end(self, turn: Turn, ids: Sequence[int]) -> str:
        """Return why the policy cannot have ended a turn so; the runner refuses such completions."""
        spans = self._record.sequences[turn.sequence].spans
        sampled = any(span.turn == turn.index and span.trained for span in spans)
        # An agent with a loop of its own may cut a reply; its turns take no time of an environment.
        if not sampled or not turn.sampling or not turn.timings.get("env_s"):
            return ""
        fault = faulty_end(
            ids,
            turn.finish_reason,
            stop=self._renderer.stop_token_ids,
            max_tokens=cast("int", turn.sampling.get("max_tokens", len(ids))),
            stop_strings=cast("Sequence[str]", turn.sampling.get("stop") or ()),
        )
        return f"it has {fault}" if fault else ""

    def _is_what_was_sent(self, turn: Turn, read: Message, stored: Message) -> bool:
        """Return whether a message is what an agent was sent of a reply.

        The agent gets the text before a stop string, and no call that it forbade or that may be cut off.
        """
        text, sent = text_of(read), text_of(stored)
        calls, kept = read.get("tool_calls") or [], stored.get("tool_calls") or []
        stops = cast("Sequence[str]", turn.sampling.get("stop") or ())
        stopped = min((text.find(stop) for stop in stops if stop in text), default=-1)
        forbidden = any(name.startswith("calls_against_") for name in self._record.metrics)
        fewer = len(kept) < len(calls) and (forbidden or turn.finish_reason == "length")
        if not (fewer or (stopped >= 0 and sent == text[:stopped])):
            return False
        return (
            sent in (text, text[: max(stopped, 0)])
            and kept == calls[: len(kept)]
            and read.get("reasoning_content") == stored.get("reasoning_content")
        )

    def _encoded_otherwise(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of the same text; empty if they are the same ids."""
        tokenizer = self._renderer.tokenizer
        alone = tokenizer.encode(tokenizer.decode(ids))
        if alone == list(ids):
            return []
        # Some tokenizers add or drop a space at the start of a text, but not after a control token.
        whole = [*self._anchor, *ids]
        after = tokenizer.encode(tokenizer.decode(whole))
        return [] if after == whole else alone

    def _check_prompt(self, turn: Turn) -> None:
        self._checks.checked["prompt"] += 1
        sent = self._tokens[turn.sequence][: turn.start]
        begun = [rewrite for rewrite in self._record.rewrites if rewrite.turn == turn.index]
        if begun and begun[-1].shared_tokens:
            self._check_shared(turn, begun[-1], sent)
            return
        rendered = self._full_render(turn, "prompt")
        if rendered is not None and rendered != sent:
            self._checks.add("prompt", turn.index, self._difference(sent, rendered, "its messages render to"))

    def _check_shared(self, turn: Turn, begun: Rewrite, sent: Sequence[int]) -> None:
        """Check that a sequence begins with the tokens of the one that it says."""
        parent = self._tokens[begun.parent or 0][: begun.shared_tokens]
        if list(sent[: begun.shared_tokens]) != parent:
            detail = self._difference(sent, parent, f"sequence {begun.parent} has")
            self._checks.add("prompt", turn.index, detail)

    def _check_observation(self, before: Turn, turn: Turn) -> None:
        checks, renderer = self._checks, self._renderer
        checks.checked["observation"] += 1
        tokens = self._tokens[turn.sequence]
        sent = tokens[before.end : turn.start]
        history = self._view(before) if renderer.report.verdict == "history" else None
        said = self._answers[before.index + 1]
        try:
            sampled = tokens[before.start : before.end]
            rendered = _keys(renderer.extend(sampled, before.tool_calls, said, history))
        except RenderError as error:
            checks.add("observation", turn.index, f"the messages before it cannot be rendered: {error}")
            return
        if rendered == sent:
            return
        # A run with `history="rewrite"` renders the whole conversation again.
        if self._full_render(turn, "observation") != tokens[: turn.start]:
            detail = self._difference(sent, rendered, "the messages before it render to")
            checks.add("observation", turn.index, detail)

    def _check_drift(self, turn: Turn) -> None:
        """Compare everything before the last turn of a sequence with a full render."""
        self._checks.checked["drift"] += 1
        strict = self._drift == "strict"
        sent = self._tokens[turn.sequence][: turn.start]
        try:
            rendered = _keys(self._renderer.start(self._view(turn)))
        except RenderError as error:
            self._checks.add("drift", turn.index, f"a full render is refused: {error}", wrong=strict)
            return
        if rendered == sent:
            return
        place = _first_difference(sent, rendered)
        sequence = self._record.sequences[turn.sequence]
        inside = sequence.cut(place + 1).spans[-1]
        where = (
            f"in the {inside.source} tokens of turn {inside.turn}" if inside.turn >= 0 else "in the prompt"
        )
        detail = f"{where}, {self._difference(sent, rendered, 'a full render has')}"
        self._checks.add("drift", turn.index, detail, wrong=strict)

    def _full_render(self, turn: Turn, check: str) -> list[int] | None:
        try:
            return _keys(self._renderer.start(self._view(turn)))
        except RenderError as error:
            self._checks.add(check, turn.index, f"the messages before it cannot be rendered: {error}")
            return None

    def _difference(self, sent: Sequence[int], other: Sequence[int], verb: str) -> str:
        """Say where the recorded tokens and others differ first, with the text around it."""
        place = _first_difference(sent, other)
        begin = max(0, place - _CONTEXT)
        recorded, rest = sent[begin : place + _CONTEXT], other[begin : place + _CONTEXT]
        return (
            f"token {place} of {len(sent)} differs: recorded {self._shown(recorded)}, "
            f"{verb} {self._shown(rest)}"
        )

    def _shown(self, keys: Sequence[int]) -> str:
        """Return the text and the ids of tokens, without those of images."""
        ids = [key for key in keys if key >= 0]
        return f"{self._renderer.decode(ids)!r} {ids}" + (" and an image" if len(ids) < len(keys) else "")


def _keys(rendered: Sequence[int]) -> list[int]:
    return keys_of(rendered, images_of(rendered))


def _without_ids(message: Message) -> Message:
    """Return a message without the ids of its calls."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [cast("ToolCallMessage", {**call, "id": ""}) for call in calls]}


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))
