"""The context limit that a configuration describes, as vLLM derives it."""

from __future__ import annotations

import pytest

from agentenv.core.context_length import context_length

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("positions", "scaling", "limit"),
    [
        (None, None, None),
        (40, None, 40),
        (40, {"rope_type": "default", "rope_theta": 10_000.0}, 40),
        (40, YARN, 128),  # Qwen3: 40,960 positions, of which 32,768 were trained on
        (128, YARN, 128),  # gpt-oss, DeepSeek: the configuration names the extended length
        (256, YARN, 256),
        (32, {"type": "yarn", "factor": 4}, 128),
        (32, {"rope_type": "dynamic", "factor": 2.0}, 64),
        (128, {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (128, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 128),
        (128, {"rope_type": "linear", "factor": 8.0}, 128),
        (40, {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}, 128),
        (40, {"rope_type": "yarn", "factor": None}, 40),
    ],
)
def test_what_extends_a_context_counts(positions, scaling, limit):
    assert context_length(positions, scaling) == limit
