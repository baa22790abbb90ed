"""The doctor's page says which turns of a template are read back as they were written."""

from agentenv.cli.proof import proved
from agentenv.render import ChatTokenizer, Renderer
from helpers import call_formats, chat_cases


def test_every_turn_of_a_good_template_is_read_back():
    renderer = Renderer(ChatTokenizer.load(chat_cases.TOKENIZERS / "qwen3"))

    assert {what: why for what, why in proved(renderer) if why} == {}


def test_what_a_template_loses_is_named_with_the_difference():
    source = call_formats.CALL_FORMATS["minimax"].replace(
        "{{ v if v is string else v | tojson }}", "{{ v | replace('<', '') if v is string else v | tojson }}"
    )
    lost = {what: why for what, why in proved(Renderer(chat_cases.tokenizer_for(source))) if why}

    assert "one call" not in lost
    assert "'a < b & c > d <e/>'" in lost["markup in a value"]
    assert "'a  b & c > d e/>'" in lost["markup in a value"]
