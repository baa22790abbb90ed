"""Real tokenizers, real templates and random conversations for the rendering tests and benchmarks.

The benchmarks load this module by its path: it must import none of its neighbours.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import unicodedata
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from agentenv.core import ToolCall
from agentenv.render import ChatTokenizer

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
FAMILIES = ("deepseek_v3", "gptoss", "mistral_tekken", "qwen3", "smollm2")

_WRITTEN_LIKE_CONTROL = (
    r"<\|[^|<>{}'\"\s]+\|>",
    r"<\uff5c[^\uff5c<>{}'\"\s]+\uff5c>",
    r"\uff5cDSML\uff5c",
    r"\[/?[A-Z][A-Z_]+\]",
    r"</?(?:tool_call|tool_response|think|TOOLCALL|SPECIAL_\d+|arg_key|arg_value|tool_calls?|s|unk)>",
    r"<\|?(?:turn|tool_call|tool_response|tool|channel|think)\|?>",
    r"</?seed:[a-z_]+>",
    r"</?[a-z_]+:opensource>",
    r"\[e~\[",
    r"\]~!?b\[",
    r"<\|\"\|>",
    r"<(?:start|end)_of_[a-z]+>",
    r"</?[a-z]*_?(?:user|assistant|bot|system)>",
)
_STOPS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "[e~[",
    "<seed:eos>",
    "<turn|>",
    "<|role_end|>",
    "<end_of_utterance>",
    "<|end_of_msg|>",
    "<\uff5chy_eos:opensource\uff5c>",
    "<sep>",
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name."},
                    "n": {"type": "integer", "description": "Days."},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "add")
]

TEXTS = (
    "hello world",
    "x = 1\n\ny",
    "  padded ",
    "é ü 漢字 🙂",
    '{"a": [1, 2]}',
    "",
    "line\r\nline",
    "e\u0301 \u212b",
    "<b>t</b>",
    "zero\u200bwidth",
    "</think> lone",
    "SENTINELq7Zk3vXw9",
    "\ue0f0 mark",
    "a <",
    "tail <|",
    "{{ x }}",
    "\ud800 bad",
    'it\'s "q" \\ ',
)


def trl_templates() -> dict[str, str]:
    """Return the templates that an installed trl package ships, by name; empty without it."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent / "chat_templates"
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


def tokenizer_for(template: str, base: str = "qwen3") -> ChatTokenizer:
    """Return a real vocabulary with the control tokens that a template writes."""
    backend = Tokenizer.from_file(str(TOKENIZERS / base / "tokenizer.json"))
    source, template = template, template.replace("{}", ":opensource")  # Hy3 puts its tags together so
    wanted = [token for pattern in _WRITTEN_LIKE_CONTROL for token in re.findall(pattern, template)]
    stop = next((token for token in _STOPS if token in template), "</s>" if "[INST]" in template else "")
    stops = [stop or "<|endoftext|>"]
    if "<|observation|>" in template:
        stops += ["<|user|>", "<|observation|>"]
    stops += [token for token in ("<|call|>", "<|return|>", "<|eom_id|>") if token in template]
    for token in dict.fromkeys([*wanted, *stops, "<s>"]):
        if backend.token_to_id(token) is None:
            backend.add_tokens([AddedToken(token, special=True, normalized=False)])
    return ChatTokenizer(
        backend,
        chat_template=source,
        special_tokens={"bos_token": "<s>", "eos_token": stops[0]},
        eos_token_ids=[backend.token_to_id(token) for token in stops],
    )


def nfc_json(value: object) -> object:
    """Return a JSON value with every string in the normal form that some tokenizers turn text into."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, dict):
        return {key: nfc_json(item) for key, item in value.items()}
    return [nfc_json(item) for item in value] if isinstance(value, list) else value


def some_text(rng: random.Random, control: list[str]) -> str:
    """Return text as tools and users write it; a third of it holds control strings."""
    parts = [rng.choice(TEXTS) for _ in range(rng.randint(1, 3))]
    if control and rng.random() < 0.3:
        parts.insert(rng.randint(0, len(parts)), rng.choice(control))
    if control and rng.random() < 0.1:
        parts.append(rng.choice(control) + rng.choice(control))
    return rng.choice(["", " ", "\n"]).join(parts)


def some_calls(rng: random.Random) -> list[ToolCall]:
    """Return one to three calls with ids that every template takes."""
    return [
        ToolCall(
            f"abc{rng.randint(0, 999999):06d}",
            rng.choice(["get_weather", "add"]),
            json.dumps({"city": "P", "n": index}),
        )
        for index in range(rng.choice([1, 1, 2, 3]))
    ]
