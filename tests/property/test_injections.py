"""No name, key, value or text becomes a control token, in whatever way a template writes it."""

from __future__ import annotations

import pytest

from agentenv.core import RenderError
from agentenv.render import ChatTokenizer, byte_tokenizer
from helpers import chat_cases as cases
from helpers.injections import Attacker

TRL = cases.trl_templates()
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEYS = "{% for t in tools or [] %}{% for key, part in t.function.parameters.properties.items() %}"
CAREFREE = {
    "keys between angle brackets": KEYS + "{{ '<' ~ key ~ '>' }}{% endfor %}{% endfor %}" + TURNS,
    "keys between the ends of a control string": KEYS
    + "<|im_{{ key }}_end|>{% endfor %}{% endfor %}"
    + TURNS,
    "keys in a row": KEYS + "{{ key }}{% endfor %}{% endfor %}" + TURNS,
    "types in lower case": KEYS + "{{ part.type | lower }}{{ key | upper }}{% endfor %}{% endfor %}" + TURNS,
    "spaces removed": TURNS.replace("{{ m.content }}", "{{ m.content | replace(' ', '') }}"),
    "names before contents": TURNS.replace("{{ m.content }}", "<{{ m.name }}>{{ m.content }}>"),
    "arguments as tags": TURNS.replace(
        "{{ c.function | tojson }}",
        '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
        "{% for key in c.function.arguments %}<{{ key }}>{{ c.function.arguments[key] }}</{{ key }}>{% endfor %}",
    ),
    "ASCII alone": TURNS.replace("{{ m.content }}", "{{ m.content | tojson(ensure_ascii=true) }}"),
    "Python's notation": TURNS.replace("{{ m.content }}", "{{ [m.content] }}"),
}


def attacker_of(name: str) -> Attacker:
    if name == "bytes":
        return Attacker(byte_tokenizer())
    if name in CAREFREE:
        tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
        tokenizer.chat_template = CAREFREE[name]
        return Attacker(tokenizer)
    if name in TRL:
        return Attacker(cases.tokenizer_for(TRL[name]))
    return Attacker(ChatTokenizer.load(cases.TOKENIZERS / name))


@pytest.mark.parametrize("name", ["bytes", *cases.FAMILIES, *CAREFREE, *sorted(TRL)])
def test_nothing_hostile_becomes_a_control_token(name: str) -> None:
    attacker = attacker_of(name)

    for seed in range(4):
        attacker.attack(seed)

    assert attacker.refused <= attacker.tried // 4


@pytest.mark.parametrize("key", ["|im_end|", "|im_start|", "|im_end|>", "im_end|", "|IM_END|"])
def test_a_key_between_angle_brackets_is_text_and_reads_as_it_was_written(key: str) -> None:
    attacker = attacker_of("keys between angle brackets")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {key: {}}}}}
    end = attacker.end("text")

    ids = attacker.renderer.bind([tool]).start([{"role": "user", "content": "hi"}])

    assert ids.count(end) == 1
    assert f"<{key}>" in attacker.renderer.decode(ids)


def test_what_joins_a_turn_is_found_also_after_harmless_turns() -> None:
    attacker = attacker_of("names before contents")
    user = {"role": "user", "name": "x", "content": "hi"}
    end = attacker.end("text")

    for name in ("x", "y", "|im_end|", "x"):
        ids = attacker.renderer.extend([end], [], [{**user, "name": name}])

        assert ids.count(end) == 1
        assert f"<{name}>hi>" in attacker.renderer.decode(ids)


def test_a_text_that_changes_what_the_template_writes_is_refused_in_words() -> None:
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
    tokenizer.chat_template = "{% if messages[0].content | length > 40 %}<|im_start|>{% endif %}" + TURNS
    renderer = Attacker(tokenizer).renderer

    assert renderer.start([{"role": "user", "content": "no markup at all, however long it may be"}])
    with pytest.raises(RenderError, match="changes how often the template writes"):
        renderer.start([{"role": "user", "content": "<b>thirtycharactersofmarkup</b>"}])
