"""What the tests of the examples and of the tutorial share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    """The directory of a model that is small enough for any test and says nothing of use."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    from agentenv.render import byte_tokenizer

    set_seed(0)
    tokenizer, sizes = byte_tokenizer(), {"hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(vocab_size=tokenizer.vocab_size, num_hidden_layers=1, num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=tokenizer.chat_template,
    ).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")
