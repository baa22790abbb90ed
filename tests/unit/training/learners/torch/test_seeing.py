"""Rows with images in the trainer: padded, packed and alone are the same, and so are their gradients."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from agentenv.core import SequenceBuilder, UsageError
from agentenv.engine.hf.vision import Vision
from agentenv.render import Renderer
from agentenv.training import GRPOConfig, LoraOptions
from agentenv.training.learners.torch.learner import TorchLearner
from agentenv.training.learners.torch.packing import pack_rows, pad_rows
from agentenv.training.learners.torch.passes import accumulate, micro_batches
from agentenv.training.learners.torch.policy import Policy
from agentenv.training.metrics import Meter
from agentenv.training.rows import make_row
from helpers.seeing import SEERS, part, png, seer, text, tokenizer_of

pytestmark = pytest.mark.slow

A, B, LIKE_A = png(1, 96, 64), png(2, 64, 112), png(7, 96, 64)


@pytest.fixture(scope="module", params=SEERS)
def family(request):
    torch.set_num_threads(1)
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return seer(family)


def rows_of(family):
    """Return a group of two on one image, one on an image of the same size, and one with text alone."""
    renderer, rows = Renderer(tokenizer_of(family)), []
    for number, shown in enumerate(([A, B], [A, B], [LIKE_A], [])):
        builder = SequenceBuilder()
        content = [text("what is this? "), *map(part, shown), text("?")]
        builder.append("prompt", renderer.start([{"role": "user", "content": content}]))
        ids = [65 + number, 66, 67 + number]
        builder.append("model", ids, logprobs=[-5.0] * 3, weights_version=0, turn=0)
        if number % 2:
            builder.append("env", renderer.extend(ids, (), [{"role": "user", "content": [part(B)]}]))
            builder.append("model", ids, logprobs=[-5.0] * 3, weights_version=0, turn=1)
        rows.append(replace(make_row(builder.freeze(), (-1.0) ** number, number, 0), weight=1.0))
    return rows


def gradients(policy, rows, layout):
    policy.model.zero_grad()
    config = GRPOConfig(packing=layout)
    policy.config = config
    accumulate(policy, rows, Meter())
    return torch.cat([p.grad.to_dense().flatten() for p in policy.model.parameters() if p.grad is not None])


def test_padded_packed_and_alone_are_one(family, model):
    policy = Policy(copy.deepcopy(model), GRPOConfig(), vision=Vision(tokenizer_of(family).images))
    padded_because = policy.check()
    # Attention over a tree has no sliding window, which Gemma 3 has.
    assert [reason for reason in padded_because if "sliding window" not in reason] == []
    assert bool(padded_because) == (family == "gemma3")
    rows = rows_of(family)
    alone = [policy.score(pad_rows([row]))[0].detach() for row in rows]
    padded = policy.score(pad_rows(rows))[0].detach()
    torch.testing.assert_close(padded, torch.cat(alone), atol=1e-5, rtol=0)
    if padded_because or not policy.vision.packs:
        policy.config = GRPOConfig(packing="shared")
        assert all(micro.tree is None for micro in micro_batches(policy, rows))
        return
    pack = pack_rows(rows)
    # The group's prompt is computed once, and the image of the same size is not taken for it.
    assert [len(one.images) for one in rows] == [2, 3, 1, 1]
    assert len(pack.images[0]) == 2 + 1 + 1 + 1
    assert policy.packable
    torch.testing.assert_close(policy.score(pack)[0].detach(), torch.cat(alone), atol=1e-5, rtol=0)


def test_a_group_has_the_gradient_of_its_rows_and_each_image_passes_the_tower_once(family, model):
    policy = Policy(
        copy.deepcopy(model), GRPOConfig(train_vision=True), vision=Vision(tokenizer_of(family).images)
    )
    rows, passes = rows_of(family), []
    policy.config = GRPOConfig(train_vision=True)
    inner = policy.base.model
    whole = inner.get_image_features
    inner.get_image_features = lambda **given: (
        passes.extend(given.get("image_grid_thw", "1")) or whole(**given)
    )
    policy.model.zero_grad()
    accumulate(policy, rows, Meter())
    together = {
        n: p.grad.to_dense().clone() for n, p in policy.model.named_parameters() if p.grad is not None
    }
    assert len(passes) == 3  # A, B and LIKE_A; four rows show seven images
    policy.model.zero_grad()
    for row in rows:
        accumulate(policy, [row], Meter())
    for name, weight in policy.model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(together[name], weight.grad.to_dense(), atol=2e-5, rtol=1e-3)
    del inner.get_image_features
    tower = [
        n for n in together if "language_model" not in n and "text_model" not in n and "lm_head" not in n
    ]
    assert any(float(together[name].abs().max()) > 0 for name in tower)


def trained_names(learner):
    return {name for name, weight in learner.model.named_parameters() if weight.requires_grad}


def sees(name):
    return not any(word in name for word in ("language_model", "text_model", "lm_head"))


def test_the_tower_is_frozen_unless_asked_and_has_no_adapters(family, model):
    vision = Vision(tokenizer_of(family).images)
    frozen = TorchLearner(copy.deepcopy(model), GRPOConfig(), vision=vision)
    assert not any(map(sees, trained_names(frozen)))
    frozen.forward_backward(rows_of(family), Meter())
    before = {name: weight.clone() for name, weight in frozen.model.named_parameters()}
    frozen.optim_step(1e-2)
    moved = {n for n, w in frozen.model.named_parameters() if not torch.equal(w, before[n])}
    assert moved
    assert not any(map(sees, moved))

    whole = TorchLearner(copy.deepcopy(model), GRPOConfig(train_vision=True), vision=vision)
    assert any(map(sees, trained_names(whole)))

    lora = TorchLearner(copy.deepcopy(model), GRPOConfig(lora=LoraOptions(r=4)), vision=vision)
    names = {name.removeprefix("base_model.model.") for name in trained_names(lora)}
    assert names
    assert not any(map(sees, names))
    lora.forward_backward(rows_of(family), Meter())
    assert lora.optim_step(1e-2) > 0


def test_banned_ids_have_no_probability_in_either_head(family, model):
    vision = Vision(tokenizer_of(family).images)
    policy = Policy(copy.deepcopy(model), GRPOConfig(), vision=vision)
    batch = pad_rows(rows_of(family))
    fused, entropy = policy.score(batch)
    policy.head_way = "own"
    plain, plain_entropy = policy.score(batch)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, plain_entropy, atol=1e-4, rtol=0)
    policy.vision.banned_ids, before = (), policy.vision.banned_ids
    assert float((policy.score(batch)[0] - plain).detach().abs().max()) > 1e-5
    policy.vision.banned_ids = before


def test_images_without_eyes_are_refused(family, model):
    with pytest.raises(UsageError, match="sees none"):
        Policy(copy.deepcopy(model), GRPOConfig()).score(pad_rows(rows_of(family)))
