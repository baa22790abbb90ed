"""vLLM in this process, as far as it can be seen without vLLM; the rest is in tests/e2e."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from agentenv.core import DependencyMissing, EngineError
from agentenv.engine import Sampling, VLLMEngine
from agentenv.engine.hf import ModelFiles

without_vllm = pytest.mark.skipif(find_spec("vllm") is not None, reason="this interpreter has vLLM")


@pytest.mark.parametrize(
    ("config", "given", "limit"),
    [
        ({"max_position_embeddings": 99}, None, 99),
        ({"max_position_embeddings": 99}, 50, 50),
        ({"text_config": {"max_position_embeddings": 70}}, None, 70),
        ({}, None, None),
    ],
)
def test_the_context_limit_is_known_before_vllm_starts(tmp_path, config, given, limit):
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert VLLMEngine(ModelFiles(str(tmp_path)), max_model_len=given).max_context_tokens == limit


@without_vllm
async def test_without_vllm_the_extra_is_named(tmp_path):
    with pytest.raises(DependencyMissing, match=r"agentenv-rl\[vllm\]"):
        await VLLMEngine(ModelFiles(str(tmp_path))).generate([1], Sampling(), stop_token_ids=())


async def test_a_closed_engine_does_not_start(tmp_path):
    engine = VLLMEngine(ModelFiles(str(tmp_path)))
    await engine.close()
    await engine.close()

    with pytest.raises(EngineError, match="is closed"):
        await engine.generate([1], Sampling(), stop_token_ids=())


def test_another_event_loop_is_refused_in_words(tmp_path, monkeypatch):
    """Vllm's tasks live on the loop that started them: requests from another one would wait forever."""
    stand_in = SimpleNamespace(model_config=SimpleNamespace(max_model_len=99), shutdown=lambda: None)
    monkeypatch.setattr("agentenv.engine.vllm.inprocess.start", lambda arguments: stand_in)
    engine = VLLMEngine(ModelFiles(str(tmp_path)))
    for _ in range(2):
        with pytest.raises(EngineError) as refused:
            asyncio.run(engine.generate([1], Sampling(), stop_token_ids=()))

    assert "belongs to the event loop of its first request" in str(refused.value)
    assert engine.max_context_tokens == 99


async def test_a_bad_path_is_refused_before_vllm_is_touched(tmp_path):
    with pytest.raises(EngineError, match="nothing was changed"):
        await VLLMEngine(ModelFiles(str(tmp_path))).load_weights(tmp_path / "nowhere")
