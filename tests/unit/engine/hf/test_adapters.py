"""The transformers engine switches between the adapters of a model and the base model below them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer

from agentenv.core import EngineError, UsageError
from agentenv.engine import Sampling
from agentenv.engine.hf.request import GenerationRequest
from scenes import language_model

PROMPT = [5, 9, 14, 20]


@pytest.fixture
def model():
    model = language_model(vocab_size=60, intermediate_size=32, num_key_value_heads=1, initializer_range=0.02)
    options = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    adapted = get_peft_model(model, LoraConfig(**options), adapter_name="first")
    adapted.add_adapter("second", LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(std=0.5)
    return adapted.eval()


def expected(model, adapter: str | None) -> float:
    """Return the log-probability of the likeliest token in a plain forward pass."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        if adapter is None:
            with model.disable_adapter():
                logits = model(ids).logits
        else:
            model.set_adapter(adapter)
            logits = model(ids).logits
    return logits[0, -1].log_softmax(-1).max().item()


async def drawn(engine, **sampling) -> float:
    asked = Sampling(temperature=0.0, max_tokens=1, **sampling)
    return (await engine.generate(PROMPT, asked, stop_token_ids=())).logprobs[0]


async def test_each_adapter_and_the_base_are_sampled_with_all_that_belongs_to_them(model, make):
    wanted = {name: expected(model, name) for name in ("first", "second", None)}
    model.set_adapter("first")
    engine = make(model, adapter="second")

    got = {name: await drawn(engine, adapter=name) for name in ("first", None, "second", "")}

    assert len({round(value, 4) for value in wanted.values()}) == 3
    assert got == {
        name: pytest.approx(value, abs=1e-5) for name, value in {**wanted, "": wanted["second"]}.items()
    }
    assert model.active_adapter == "first"


@pytest.mark.parametrize("ends", ["finish", "fail"])
async def test_an_answer_is_given_when_the_trainers_adapters_are_back(model, monkeypatch, ends, make):
    model.set_adapter("first")
    engine = make(model, adapter="second")
    layer = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
    end, seen = getattr(GenerationRequest, ends), []

    def noted(request, answer):
        seen.append((layer.disable_adapters, layer.active_adapters))
        end(request, answer)

    monkeypatch.setattr(GenerationRequest, ends, noted)
    if ends == "fail":
        with torch.no_grad():
            model.get_base_model().model.norm.weight.fill_(float("nan"))
        with pytest.raises(EngineError, match="log-probability of nan"):
            await drawn(engine)
    else:
        await drawn(engine)

    assert seen == [(False, ["first"])]


async def test_an_engine_without_an_adapter_of_its_own_samples_the_base(model, make):
    base = expected(model, None)  # before, because the engine's thread switches the adapters of the model
    engine = make(model)

    assert await drawn(engine) == pytest.approx(base, abs=1e-5)
    with pytest.raises(UsageError, match="first, second"):
        await drawn(engine, adapter="third")
