"""Rows for supervised fine-tuning, rendered by the chat templates of the tests, are what was sampled."""

from __future__ import annotations

import json

import pytest

from agentenv.core import text_of
from agentenv_bridges import to_openai, to_sft
from property.test_written_turns import NAMES, played, tokenizer_of

OTHERWISE = {
    *("deepseek_v3", "deepseek_r1_distill", "deepseek_r1_distill_training"),  # calls or thinking left out
    *("deepseekv3", "deepseekv3_training", "qwen3"),  # thinking of earlier turns left out
    *("diffusion_gemma", "diffusion_gemma_training", "glm4moe"),  # other ends and openings of turns
    *("idefics3", "idefics3_training", "llava_next", "llava_next_training", "smolvlm", "smolvlm_training"),
    *(f"nemotron_3_{size}" for size in ("5_lightning", "nano", "super", "ultra")),
    *(f"nemotron_3_{size}_training" for size in ("5_lightning", "nano", "super", "ultra")),
}
"""Templates that write earlier turns otherwise than a model says them, whatever form a row has."""


@pytest.mark.parametrize("name", NAMES)
async def test_a_row_is_rendered_as_it_was_sampled_or_named(name, caplog):
    episodes = await played(name)

    (row,) = to_sft(episodes, tokenizer=tokenizer_of(name))

    named = "is not what was sampled: the template writes" in caplog.text
    assert named == (name in OTHERWISE)
    assert text_of(row["messages"][-1]).strip() == "Thanks."


async def test_arguments_are_objects():
    (row,) = to_sft(await played("qwen3"))

    call = row["messages"][-3]["tool_calls"][0]["function"]
    assert call["arguments"] == {"price": 3, "note": 'a < b && "c"\nd'}


async def test_a_row_that_the_template_writes_otherwise_is_named(caplog):
    (episode,) = await played("qwen3")

    list(to_sft([episode], tokenizer=tokenizer_of("smollm2")))

    assert "member 0 of" in caplog.text
    assert "is not what was sampled: the template writes" in caplog.text


async def test_the_rows_of_openai_keep_arguments_as_text():
    (row,) = to_openai(await played("qwen3"))

    arguments = row["messages"][-3]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments)["price"] == 3
