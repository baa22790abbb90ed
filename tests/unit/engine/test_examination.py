"""The doctor finds engines that break the contract."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from agentenv.core.images import hash_of
from agentenv.engine import (
    Completion,
    Features,
    ScriptedEngine,
    ScriptedTurn,
    TransformersEngine,
    examine_engine,
    examine_model,
    load_engine,
)
from helpers.seeing import part, plain_png, saved_seer
from scenes import language_model


async def findings_on(engine, prompt=(1,)):
    return {each.name: each for each in await examine_engine(engine, list(prompt))}


async def test_the_doctor_finds_the_transformers_engine_right():
    sizes = {"vocab_size": 30, "num_key_value_heads": 1, "intermediate_size": 32, "initializer_range": 0.02}
    model = language_model(1, max_position_embeddings=2048, **sizes)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    engine = TransformersEngine(model)

    findings = await findings_on(engine, (1, 2, 3, 4))

    for name in ("tokens", "scale", "stop token", "seed", "greedy", "context"):
        assert findings[name].ok, findings[name].line()
    assert findings["abort"].ok is not False
    await engine.close()


class Unscaled:
    """An engine with log-probabilities at T = 1, whatever the temperature, and no version of the last token."""

    name, weights_version, max_context_tokens = "unscaled", 0, None

    async def generate(self, prompt_ids, sampling, **kwargs):
        token = 10 + (sampling.seed or 0) % 3
        size = sampling.max_tokens
        return Completion((token,) * size, (-float(token),) * size, "length", ((0, 0, size - 1),))


async def test_the_doctor_finds_unscaled_logprobs_and_a_lost_stop_token():
    findings = await findings_on(Unscaled())

    assert findings["scale"].ok is False
    assert "processed_logprobs" in findings["scale"].detail
    assert findings["stop token"].ok is False
    assert findings["tokens"].ok is False
    assert findings["context"].ok is None


async def test_the_doctor_never_raises():
    findings = await findings_on(ScriptedEngine([]))
    assert [findings[name].ok for name in ("tokens", "scale", "seed")] == [False] * 3
    assert "EngineError" in findings["tokens"].line()


@pytest.mark.parametrize(
    "turn",
    [
        ScriptedTurn(token_ids=[], finish_reason="length"),
        ScriptedTurn(token_ids=[], finish_reason="abort"),
        ScriptedTurn(token_ids=[7, 8], logprobs=()),
        ScriptedTurn(error=TypeError("not an error of ours")),
    ],
)
async def test_the_doctor_reports_an_engine_that_breaks_the_contract_and_does_not_break_itself(turn):
    findings = await findings_on(ScriptedEngine([turn], repeat_last=True))

    assert [findings[name].ok for name in ("tokens", "scale", "stop token", "seed", "greedy")] == [False] * 5


async def test_a_loaded_model_is_examined():
    assert {each.name for each in await examine_model(load_engine("mock"))} >= {"tokens", "scale"}


@pytest.mark.slow
async def test_a_model_that_sees_is_examined_with_made_images(tmp_path):
    path, picture = saved_seer("qwen3_vl", tmp_path), plain_png((200, 0, 0), 64, 64)
    loaded = load_engine(f"hf:{path}")
    (found,) = [each for each in await examine_model(loaded) if each.name == "images"]

    assert found.ok, found.line()
    assert "is 6 tokens" in found.detail

    class Blind:
        """Shows the model one picture, whatever the prompt has."""

        features = Features(images=True)

        def __getattr__(self, name):
            return getattr(loaded.engine, name)

        async def generate(self, prompt_ids, sampling, images=(), **more):
            same = [replace(image, sha256=hash_of(picture), data=picture) for image in images]
            return await loaded.engine.generate(prompt_ids, sampling, images=same, **more)

    blind = await examine_model(replace(loaded, engine=Blind()))
    (found,) = [each for each in blind if each.name == "images"]
    assert found.ok is False
    assert "a red and a blue image" in found.detail
    await loaded.engine.close()


async def test_a_model_that_sees_is_examined_but_for_images_where_nothing_decodes_them(monkeypatch):
    monkeypatch.setattr("agentenv.engine.examination.IMAGES", [part(plain_png((1, 2, 3), 9, 9))])
    monkeypatch.setitem(sys.modules, "PIL", None)

    findings = {finding.name: finding for finding in await examine_model(load_engine("mock"))}

    assert findings["images"].ok is None
    assert "not checked: images needs pillow" in findings["images"].detail
    assert findings["tokens"].ok
