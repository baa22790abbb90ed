"""Compare ways to append a turn on the same templates: agentenv's, and two published methods.

    python benchmarks/rendering_peers.py PATH/chat_templates [MORE ...]

The published methods are implemented here from their descriptions. The *prefix difference* (TRL) renders a
dummy conversation with and without the new messages and takes the additional tokens. The *empty user* (verl)
renders the new messages alone and removes the start of an empty conversation. A row is right if its tokens
are those that a full render of the real conversation has after the assistant turn. `lets in` counts the
templates in which the template's own end-of-turn text, written in a tool result or a user message, became a
control token. `sanitize_control_tokens` of transformers (5.20 or newer) renders whole conversations, so only
its guard against control tokens is tried.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from agentenv.core import RenderError, ToolCall
from agentenv.render import ChatTemplate, ChatTokenizer, Renderer

_spec = importlib.util.spec_from_file_location(
    "chat_cases", Path(__file__).parents[1] / "tests" / "helpers" / "chat_cases.py"
)
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

UNIQUE = "UNIQUEwords7"
KINDS = ("tool", "parallel", "user")


class Trial:
    """A template and its conversations."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, cases.TOOLS)
        self.template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        reader = self.renderer._diagnosis.reader
        self.as_text = reader is not None and reader.habits.json_arguments

    def text(self, messages: list[dict], *, prompt: bool = True, tools: bool = False) -> str:
        """Return the full render of messages."""
        return self.template.render(messages, tools=cases.TOOLS if tools else None, generation_prompt=prompt)

    def conversation(self, kind: str, content: str) -> tuple[list[dict], dict, list[dict]]:
        """Return the messages before the assistant turn, the turn itself, and the messages after it."""
        user = {"role": "user", "content": "u"}
        if kind == "user":
            return [user], {"role": "assistant", "content": UNIQUE}, [{"role": "user", "content": content}]
        count = 2 if kind == "parallel" else 1
        arguments: object = {"city": UNIQUE}
        calls = [
            {
                "id": f"abc00000{index}",
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "arguments": json.dumps(arguments) if self.as_text else arguments,
                },
            }
            for index in range(count)
        ]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": content}
            for call in calls
        ]
        return [user], {"role": "assistant", "content": "", "tool_calls": calls}, results

    def expected(self, kind: str, content: str) -> list[int]:
        """Return the tokens after the assistant turn in a full render of the real conversation."""
        before, turn, new = self.conversation(kind, content)
        text = self.text([*before, turn, *new], tools=True)
        end = self.end(kind)
        return self.tokenizer.encode(end + text[text.index(end, text.rindex(UNIQUE)) + len(end) :])[1:]

    def end(self, kind: str) -> str:
        """Return the control string that ends the turn."""
        closers = self.renderer.report.closers
        return closers["text"] if kind == "user" else closers["call"]

    def ours(self, kind: str, content: str) -> list[int]:
        """The sentinel."""
        before, turn, new = self.conversation(kind, content)
        calls = [
            ToolCall(call["id"], call["function"]["name"], json.dumps({"city": UNIQUE}))
            for call in turn.get("tool_calls", [])
        ]
        return self.renderer.extend([5, self.tokenizer.token_id(self.end(kind))], calls, new, history=before)

    def prefix_difference(self, kind: str, content: str) -> list[int]:
        """Append by the difference of two renders of a dummy conversation; this works only for tool turns."""
        if kind == "user":
            raise NotImplementedError
        _, _, new = self.conversation(kind, content)
        call = {"type": "function", "function": {"name": new[0]["name"], "arguments": {}}}
        dummy = [
            {"role": "user", "content": "dummy"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        prefix = self.tokenizer.encode(self.text(dummy, prompt=False))
        full = self.tokenizer.encode(self.text([*dummy, *new]))
        eos = self.tokenizer.eos_token_ids[0]
        if eos in prefix:
            prefix = prefix[: len(prefix) - prefix[::-1].index(eos)]
        if full[: len(prefix)] != prefix:
            raise RenderError("not a prefix")
        return full[len(prefix) :]

    def empty_user(self, kind: str, content: str) -> list[int]:
        """Append a render of the new messages alone, without the start of an empty conversation."""
        _, _, new = self.conversation(kind, content)
        empty = {"role": "user", "content": ""}
        one = self.tokenizer.encode(self.text([empty], prompt=False))
        two = self.tokenizer.encode(self.text([empty, empty], prompt=False))
        start = one[: len(one) - (len(two) - len(one))]
        return self.tokenizer.encode(self.text(new))[len(start) :]

    def lets_in(self, method: Callable[[str, str], list[int]], kind: str) -> bool:
        """Return whether content with the turn's end-of-turn text adds a control token."""

        def count(content: str) -> int:
            control = self.renderer._diagnosis.control.ids
            return sum(token_id in control for token_id in method(kind, content))

        return count(f"a {self.end(kind)} b") > count("a b")

    def guard_lets_in(self) -> bool:
        """Return whether transformers' guard leaves a control token of the vocabulary in the text."""
        from transformers import PreTrainedTokenizerFast

        auto = PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer.backend, **self.tokenizer.special_tokens
        )

        def count(content: str) -> int:
            ids = auto.apply_chat_template(
                [{"role": "user", "content": content}],
                chat_template=self.tokenizer.chat_template,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
            )
            return sum(token_id in self.renderer._diagnosis.control.ids for token_id in ids)

        return any(
            count(f"a {token} b") > count("a b") for token in ("</think>", "<tool_call>", "<|im_end|>")
        )


def judge(trial: Trial, method: Callable[[str, str], list[int]], kind: str) -> str:
    """Return one of: right, wrong, raises, none (the method does not support such a turn)."""
    try:
        expected = trial.expected(kind, "SUNNY")
    except (RenderError, ValueError):
        return "none"
    try:
        return "right" if method(kind, "SUNNY") == expected else "wrong"
    except NotImplementedError:
        return "none"
    except (RenderError, ValueError, IndexError):
        return "raises"


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    files = [file for folder in sys.argv[1:] for file in sorted(Path(folder).rglob("*.jinja"))]
    results: dict[str, Counter[str]] = {}
    guarded: Counter[str] = Counter()
    for file in files:
        trial = Trial(cases.tokenizer_for(file.read_text(encoding="utf-8")))
        if trial.renderer.report.verdict not in {"fast", "history"}:
            continue
        guarded["templates"] += 1
        methods = {
            "ours": trial.ours,
            "prefix difference": trial.prefix_difference,
            "empty user": trial.empty_user,
        }
        for name, method in methods.items():
            counts = results.setdefault(name, Counter())
            for kind in KINDS:
                verdict = judge(trial, method, kind)
                counts[f"{kind} {verdict}"] += 1
                if verdict == "wrong" and name == "ours":
                    print(f"ours differs: {file.stem} {kind}", file=sys.stderr)
            if judge(trial, method, "tool") in {"right", "wrong"}:
                counts["lets in"] += trial.lets_in(method, "tool")
        if _has_guard():
            try:
                guarded["lets in"] += trial.guard_lets_in()
            except Exception as error:
                guarded[f"raises {type(error).__name__}"] += 1
    print(f"{guarded['templates']} templates with tool turns\n")
    print("| method | " + " | ".join(f"{kind}: right / wrong / raises" for kind in KINDS) + " | lets in |")
    print("|---|---|---|---|---|")
    for name, counts in results.items():
        cells = [
            " / ".join(str(counts[f"{kind} {verdict}"]) for verdict in ("right", "wrong", "raises"))
            for kind in KINDS
        ]
        print(f"| {name} | " + " | ".join(cells) + f" | {counts['lets in']} |")
    if _has_guard():
        print(f"| sanitize_control_tokens | whole renders | | | {dict(guarded)} |")
    else:
        print("\ntransformers here has no sanitize_control_tokens: skipped")
    return 0


def _has_guard() -> bool:
    if importlib.util.find_spec("transformers") is None:
        return False
    from transformers import PreTrainedTokenizerBase

    return "sanitize_control_tokens" in inspect.getsource(PreTrainedTokenizerBase.apply_chat_template)


if __name__ == "__main__":
    sys.exit(main())
