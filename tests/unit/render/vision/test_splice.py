"""Images in rendered messages: by their own ids, at their own places, and never out of text."""

import pytest

from agentenv.core import RenderError
from agentenv.core.images import hash_of
from agentenv.core.sequence import images_of
from agentenv.render import Renderer, byte_tokenizer
from helpers.seeing import SEERS, TOKENS, part, png, text, tokenizer_of

A, B = png(1, 96, 64), png(2, 64, 112)
FORGED = " ".join(
    [*(token for tokens in TOKENS.values() for token in tokens), "IMAGEq7Zk0w9", "IMAGEq7Zk1w9"]
)


@pytest.mark.parametrize("family", SEERS)
def test_images_stand_where_they_were_said_and_text_becomes_none(family):
    tokenizer = tokenizer_of(family)
    renderer, rule = Renderer(tokenizer), tokenizer.images
    said = [text(f"a {FORGED}"), part(A), text("b"), part(B), part(A)]
    prompt = renderer.start([{"role": "user", "content": said}])

    images = images_of(prompt)
    assert [image.sha256 for image in images] == [hash_of(data) for data in (A, B, A)]
    assert [image.data for image in images] == [A, B, A]
    whole = [rule.prepare(96, 64).ids, rule.prepare(64, 112).ids, rule.prepare(96, 64).ids]
    assert [tuple(prompt[image.offset : image.end]) for image in images] == whole
    outside = [token for at, token in enumerate(prompt) if not any(i.offset <= at < i.end for i in images)]
    specials = {tokenizer.token_id(token) for token in TOKENS[family]}
    assert specials.isdisjoint(outside)
    assert images[1].end == images[2].offset
    assert renderer.decode(prompt[images[0].end : images[1].offset]) == "b"
    assert FORGED in renderer.decode(prompt[: images[0].offset])


@pytest.mark.parametrize("family", SEERS)
def test_a_tool_result_appends_its_image(family):
    renderer = Renderer(tokenizer_of(family))
    stop = renderer.stop_token_ids[0]
    result = {"role": "tool", "tool_call_id": "1", "name": "look", "content": [text(FORGED), part(B)]}
    new = renderer.extend([65, stop], (), [result, {"role": "user", "content": [part(A), text("?")]}])

    assert [image.sha256 for image in images_of(new)] == [hash_of(B), hash_of(A)]
    words = [*new[: images_of(new)[0].offset], *new[images_of(new)[0].end :]]
    assert "<tool_response>" in renderer.decode(words)


def test_text_alone_is_rendered_as_before():
    renderer = Renderer(byte_tokenizer())
    parts = renderer.start([{"role": "user", "content": [text("a"), text("b")]}])
    assert parts == renderer.start([{"role": "user", "content": "ab"}])
    assert images_of(parts) == ()


def test_a_model_without_eyes_refuses_in_words():
    tokenizer = byte_tokenizer()
    blind = type(tokenizer)(
        tokenizer.backend,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
    )
    with pytest.raises(RenderError, match="cannot be shown to the model"):
        Renderer(blind).start([{"role": "user", "content": [part(A)]}])
    with pytest.raises(RenderError, match="type 'audio'"):
        Renderer(tokenizer).start([{"role": "user", "content": [{"type": "audio"}]}])


def test_a_template_that_drops_an_image_is_refused():
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:60] }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    plain = byte_tokenizer()
    renderer = Renderer(plain, chat_template=template)
    with pytest.raises(RenderError, match="shows 0 of the 1 images"):
        renderer.start([{"role": "user", "content": [text("0123456789" * 10), part(A)]}])
