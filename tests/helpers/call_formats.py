"""Small templates of our own, each writing tool calls in the format of one family.

For formats whose real templates are in no package that the tests install.
"""

# ruff: noqa: RUF001 - DeepSeek writes its tags with a full-width bar
from __future__ import annotations

_VALUE = "{{ v if v is string else v | tojson }}"
_FRAME = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% if m.tool_calls %}CALLS{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _template(each: str, before: str = "", after: str = "", between: str = "") -> str:
    """A chat whose calls are written by `each`, with `f` for the call's function."""
    separator = "{% if not loop.last %}" + between + "{% endif %}"
    calls = before + "{% for c in m.tool_calls %}{% set f = c.function %}" + each + separator + "{% endfor %}"
    return _FRAME.replace("CALLS", calls + after)


def _parameters(each: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + each.replace("VALUE", _VALUE) + "{% endfor %}"


_NESTED = (
    "{% macro nested(v) %}{% if v is mapping %}{% for k, x in v.items() %}M<{{ k }}>{{ nested(x) }}M</{{ k }}>"
    "{% endfor %}{% elif v is iterable and v is not string %}{% for x in v %}M<item>{{ nested(x) }}M</item>"
    "{% endfor %}{% else %}{{ v if v is string else v | tojson }}{% endif %}{% endmacro %}"
)
_KIND = (
    "{{ 'string' if v is string else 'boolean' if v is boolean else 'number' if v is number "
    "else 'object' if v is mapping else 'array' }}"
)
_ATTRIBUTE = "{{ k | replace('&', '&amp;') | replace('\"', '&quot;') }}"

_CHANNEL_CALL = (
    '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
    + _parameters(f'<|open|>argument key="{_ATTRIBUTE}" type="{_KIND}"<|sep|>VALUE<|close|>argument<|sep|>')
    + "<|close|>call<|sep|>"
)

CALL_FORMATS = {
    "seed_xml": _template(
        "<seed:tool_call>\n<function={{ f.name }}>\n"
        + _parameters("<parameter={{ k }}>VALUE</parameter>\n")
        + "</function>\n</seed:tool_call>"
    ),
    "minimax": _template(
        '<invoke name="{{ f.name }}">\n'
        + _parameters('<parameter name="{{ k }}">VALUE</parameter>\n')
        + "</invoke>\n",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "minimax_m3": (
        _NESTED
        + _template(
            'M<invoke name="{{ f.name }}">'
            "{% for k, v in f.arguments.items() %}M<{{ k }}>{{ nested(v) }}M</{{ k }}>{% endfor %}M</invoke>\n",
            "M<tool_call>\n",
            "M</tool_call>",
        )
    ).replace("M<", "]<]minimax[>[<"),
    "kimi_k3": _template(_CHANNEL_CALL, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    "dsml": _template(
        '<｜DSML｜invoke name="{{ f.name }}">\n'
        + _parameters(
            "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
            "VALUE</｜DSML｜parameter>\n"
        )
        + "</｜DSML｜invoke>\n",
        "<｜DSML｜function_calls>\n",
        "</｜DSML｜function_calls>",
    ),
    "deepseek_v3": _template(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    "deepseek_v31": _template(
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": _template(
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "mistral": _template(
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}',
        "[TOOL_CALLS][",
        "]",
        ", ",
    ),
    "granite": _template(
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}', "<|tool_call|>[", "]", ", "
    ),
    "mistral_args": _template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "functiongemma": _template(
        "<start_function_call>call:{{ f.name }}{{ '{' }}"
        + _parameters("{{ k }}:<escape>VALUE<escape>{{ '' if loop.last else ',' }}")
        + "{{ '}' }}<end_function_call>"
    ),
    "cohere": _template(
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
        '"parameters": {{ f.arguments | tojson }}}',
        "<|START_ACTION|>[\n",
        "\n]<|END_ACTION|>",
        ",\n",
    ),
    "lfm": _template(
        "{{ f.name }}("
        "{% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %})",
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        ", ",
    ),
    "pythonic": _template(
        "{{ f.name }}("
        "{% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %})",
        "[",
        "]",
        ", ",
    ),
    "functionary_v31": _template("<function={{ f.name }}>{{ f.arguments | tojson }}</function>"),
    "functionary_v32": _template(">>>{{ f.name }}\n{{ f.arguments | tojson }}"),
    "bare_literals": _template("{'name': '{{ f.name }}', 'arguments': {{ f.arguments }}}", "[", "]", ", "),
    "hermes": _template(
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    ),
}
"""Template by the name of the grammar that reads its calls."""

ESCAPED_FORMATS = {
    "entities": _template(
        '<call name="{{ f.name }}">'
        + _parameters('<arg name="{{ k }}">VALUE</arg>')
        .replace("{{ v if", "{{ (v if")
        .replace("tojson }}", "tojson) | e }}")
        + "</call>"
    ),
    "cdata": _template(
        '<call name="{{ f.name }}">'
        + _parameters(
            "<arg name=\"{{ k }}\">{% if v is string and ('<' in v or '\\n' in v) %}<![CDATA[{{ v }}]]>"
            "{% else %}VALUE{% endif %}</arg>"
        )
        + "</call>"
    ),
}
"""Templates that escape the markup in their values, by the way in which they do."""

LEARNED_FORMATS = {
    "name in a header": _template(
        "<|eom|><|start|>to={{ f.name }}<|message|><do:calls>\n"
        '<do:invoke name="{{ f.name }}">'
        + _parameters('<do:parameter name="{{ k }}">VALUE</do:parameter>')
        + "</do:invoke></do:calls>"
    ),
    "wrappers of its own": _template(
        "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>"
        "{{ f.arguments | tojson }}<|tool_call:end|>",
        "<|tool_calls|>",
    ),
    "name as a key": _template(
        '{"{{ f.name }}": {{ f.arguments | tojson }}}', "<|tools_prefix|>[", "]<|tools_suffix|>", ", "
    ),
}
"""Templates whose tags no grammar of the library names."""

CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "<|open|>think<|sep|>{{ m.reasoning_content or '' }}<|close|>think<|sep|>"
    "<|open|>response<|sep|>{{ m.content or '' }}<|close|>response<|sep|>{% if m.tool_calls %}"
    "<|open|>tools<|sep|>{% for c in m.tool_calls %}{% set f = c.function %}"
    + _CHANNEL_CALL
    + "{% endfor %}<|close|>tools<|sep|>{% endif %}<|close|>message<|sep|>"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<|open|>think<|sep|>{% endif %}"
)
"""A template whose thinking, answer and calls have a channel each, of which the prompt opens the first."""
