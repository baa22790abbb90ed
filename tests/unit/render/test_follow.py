"""What settles while a completion is sampled is the beginning of what the parser returns in the end."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer
from agentenv.render.parse import GRAMMARS, Grammar

BYTES = byte_tokenizer()
RENDERER = Renderer(BYTES)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def settle(renderer, ids, stop=()):
    """Follow a completion token by token; the settled texts after each."""
    follower = renderer.follow(stop)
    seen = []
    for token_id in ids:
        follower.add((token_id,))
        seen.append((follower.thinking, follower.content))
    return seen


def check(renderer, ids, stop=()):
    """Check each step against the whole, and return what had settled before the completion ended."""
    message = renderer.parse(ids).message
    thinking, content = message.get("reasoning_content", ""), message["content"]
    cut = min((at for text in stop if (at := content.find(text)) >= 0), default=len(content))
    before = ("", "")
    for now in settle(renderer, ids, stop):
        assert thinking.startswith(now[0])
        assert content[:cut].startswith(now[1])
        assert all(new.startswith(old) for old, new in zip(before, now, strict=True))
        before = now
    return before


def said(text, renderer=RENDERER):
    return renderer.tokenizer.encode(text)


@pytest.mark.parametrize(
    ("text", "thinking", "content"),
    [
        ("Hello there", "", "Hello there"),
        ("Hello there \n", "", "Hello there"),
        ("<think>I see.\n</think>\n\nHello", "I see.", "Hello"),
        ("\n<think>\nI see", "I see", ""),
        ("Let me look.\n" + CALL, "", "Let me look."),
        ("<think>so</think> Let me look. \n" + CALL + "And more.", "so", "Let me look."),
        ("a < b <= c", "", "a < b <= c"),
        (CALL, "", ""),
        ("<thin air>", "", "<thin air>"),
        ("<think></think>Hello", "", "Hello"),
        ("<think>a [THINK] b</think>Hello", "a [THINK] b", "Hello"),
        ("Café 👍 ok", "", "Café 👍 ok"),
    ],
)
def test_text_settles_up_to_what_may_be_a_tag(text, thinking, content):
    assert check(RENDERER, said(text)) == (thinking, content)


@pytest.mark.parametrize(
    "text",
    [" Hello", "\n\nHello " + CALL, "<think>[THINK]a</think>b", "<think>a[/THINK]</think>b"],
    ids=repr,
)
def test_what_the_parser_may_still_change_does_not_settle(text):
    assert check(RENDERER, said(text))[1] == ""


def test_a_character_settles_when_all_its_bytes_are_there():
    assert [content for _, content in settle(RENDERER, said("aé"))] == ["a", "a", "aé"]


def test_bytes_that_are_no_character_end_the_settling():
    ids = [*said("ok "), *said("é")[:1] * 12, *said(" more")]

    assert check(RENDERER, ids)[1] == "ok"


@pytest.mark.parametrize(
    ("text", "settled"),
    [("Thought\nObservation: x", "Thought\n"), ("Thought Obs", "Thought "), ("ObserveObs no", "ObserveObs ")],
)
def test_a_stop_string_cuts_the_content(text, settled):
    assert check(RENDERER, said(text), ["Observation:", "nothing"])[1] == settled


def control_tokenizer(*tags):
    """A byte tokenizer in which the tags are control tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(list(tags))
    return tokenizer


def test_tags_that_are_control_tokens():
    renderer = Renderer(control_tokenizer("<think>", "</think>", "<tool_call>", "</tool_call>"))
    whole = renderer.tokenizer.encode("<think>well <b></think>\nLet me look. " + CALL)

    assert check(renderer, whole) == ("well <b>", "Let me look.")
    assert check(renderer, [*said("a "), *whole])[1] == "a"
    # Ordinary tokens whose text looks like a control token are text.
    assert check(renderer, [*said("see <tool_"), *said("call> so")])[1] == "see <tool_call> so"


@pytest.mark.parametrize("name", ["pythonic", "bare_json", "bare_literals"])
def test_grammars_without_tags_settle_what_begins_as_no_call(name):
    renderer = Renderer(byte_tokenizer(), [TOOL], grammar=name)

    assert check(renderer, said("Hello {"))[1] == "Hello"
    assert check(renderer, said("Hello {x} and more"))[1] == "Hello"
    assert check(renderer, said("f(x), and more"))[1] == "f(x), and more"
    assert check(renderer, said('[{"name": "add", "arguments": {}}]'))[1] == ""
    assert check(renderer, said("[add(a=1)]"))[1] == ""
    assert check(renderer, said("<think>a</think> function"))[1] == "function"
    call = "[add(a=1)]" if name == "pythonic" else '[{"name": "add", "arguments": {"a": 1}}]'
    for before in ("I look: ", "I look.[TOOL_CALLS]", "I look.<tool_call>", "I look.\n```json\n"):
        ids = said(before + call)
        assert renderer.parse(ids).tool_calls
        assert check(renderer, ids)[1] in {"I look:", "I look."}


def test_a_template_that_opens_the_thinking():
    template = BYTES.chat_template.replace(
        "<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>' }}"
    )
    renderer = Renderer(byte_tokenizer(), chat_template=template)
    if renderer._reading.forms.thinking_open != "<think>":
        template = BYTES.chat_template + "{% if add_generation_prompt %}<think>\n{% endif %}"
        renderer = Renderer(byte_tokenizer(), chat_template=template)
    assert renderer._reading.forms.thinking_open == "<think>"

    assert check(renderer, said("I think\n</think>\n\nYes")) == ("I think", "Yes")
    assert check(renderer, said("I think")) == ("I think", "")


def word_renderer(*parts):
    """A renderer whose tokens are words."""
    bytes_ = [f"<0x{value:02X}>" for value in range(128, 256)]
    names = ["▁Hello", "▁there", "<0xC3>", "<0xA9>", "!", "<unk>", "<|im_end|>", "中", *bytes_]
    words = {word: place for place, word in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(list(parts))
    backend.add_special_tokens(["<|im_end|>"])
    tokenizer = ChatTokenizer(
        backend, chat_template=BYTES.chat_template, special_tokens={"eos_token": "<|im_end|>"}
    )
    return Renderer(tokenizer)


def test_tokens_with_a_space_before_each_word():
    renderer = word_renderer(*PIECES_AND_BYTES, decoders.Strip(" ", 1, 0))

    assert [content for _, content in settle(renderer, [0, 2, 3, 1, 4])] == [
        "Hello",
        "Hello",
        "Hello",  # another byte might follow, and change what these two are
        "Helloé there",
        "Helloé there!",
    ]


PIECES_AND_BYTES = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())


@given(
    st.lists(st.one_of(st.sampled_from([0, 1, 4, 7]), st.integers(2, 3), st.integers(8, 130)), max_size=12)
)
@example([1, 3, 107, 74, 57, 37, 7])  # two bytes that are a character until the next one comes
def test_bytes_that_become_other_characters_afterwards_never_settle(ids):
    check(word_renderer(*PIECES_AND_BYTES, decoders.Strip(" ", 1, 0)), ids)


@pytest.mark.parametrize(
    "decoder", [decoders.WordPiece(), decoders.CTC(), decoders.Strip("!", 0, 1)], ids=repr
)
def test_a_tokenizer_whose_tokens_change_the_text_before_them_settles_nothing(decoder):
    assert settle(word_renderer(decoders.Fuse(), decoder), [0, 1, 4])[-1] == ("", "")


TAGS = sorted(
    {block.opens for grammar in GRAMMARS.values() for block in grammar.blocks}
    | {block.closes for grammar in GRAMMARS.values() for block in grammar.blocks}
    | {wrapper for grammar in GRAMMARS.values() for wrapper in grammar.wrappers}
    | {
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<mm:think>",
        "</mm:think>",
        CALL,
        "[",
        "{",
        "[add(a=1)]",
    }
)
PIECES = st.lists(
    st.one_of(
        st.sampled_from(TAGS),
        st.sampled_from(TAGS).flatmap(lambda tag: st.integers(0, len(tag)).map(lambda size: tag[:size])),
        st.sampled_from([" ", "\n", "Hi", "é", "👍", "Obs", "Observation:", "STOP", '{"name": "add"}']),
        st.text(max_size=3),
    ),
    max_size=8,
)
WITH_GRAMMAR = {name: Renderer(byte_tokenizer(), [TOOL], grammar=name) for name in GRAMMARS}


@given(
    name=st.sampled_from(sorted(GRAMMARS)),
    pieces=PIECES,
    stop=st.sampled_from([(), ("Observation:",), ("STOP", "\n\n"), ("i",)]),
    ended=st.booleans(),
    cut=st.integers(0, 3),
)
def test_whatever_is_sampled_and_by_any_grammar(name, pieces, stop, ended, cut):
    renderer = WITH_GRAMMAR[name]
    ids = said("".join(pieces), renderer)
    ids = [*ids, renderer.stop_token_ids[0]] if ended else ids[: len(ids) - cut]

    check(renderer, ids, stop)


def test_text_that_may_become_a_tag_waits():
    renderer = Renderer(BYTES, [TOOL], grammar="minimax")

    assert check(renderer, said("Is <minimax:to"))[1] == "Is"
    assert check(renderer, said("Is <minimax:to know"))[1] == "Is <minimax:to know"
    assert check(renderer, said("Is <minimax:tool_call>so"))[1] == "Is"


def test_text_settles_with_each_token():
    steps = settle(RENDERER, said("Hi you"))

    assert [content for _, content in steps] == ["H", "Hi", "Hi", "Hi y", "Hi yo", "Hi you"]


def test_control_tokens_end_the_settling():
    start = BYTES.token_id("<|im_start|>")

    assert check(RENDERER, [*said("Hello "), start, *said("user")])[1] == "Hello"
    assert check(RENDERER, [*said("Hello"), *RENDERER.stop_token_ids])[1] == "Hello"


def test_a_stop_string_of_white_space():
    assert check(RENDERER, said("a\n\nb"), ["\n\n"])[1] == "a"
    assert check(RENDERER, said("a\nb"), ["\n\n"])[1] == "a\nb"


@pytest.mark.parametrize("name", ["harmony", "functionary_v32"])
def test_grammars_of_whole_turns_settle_nothing(name):
    renderer = Renderer(byte_tokenizer(), [TOOL], grammar=name)

    assert check(renderer, said("Hello")) == ("", "")


def test_a_bare_grammar_of_somebody_else_settles_nothing():
    renderer = Renderer(byte_tokenizer(), [TOOL], grammar=Grammar("own", bare=lambda text: None))

    assert check(renderer, said("Hello")) == ("", "")
