"""A real vLLM is shown images: the ids that it makes of them, and what it samples, are those of transformers.

Runs in an environment that has vLLM: `make test-vllm`.
"""

from __future__ import annotations

import asyncio
import json
import os
from importlib.util import find_spec

import pytest

from agentenv.core.images import ImageTokens, hash_of, image_size
from agentenv.core.pictures import picture_of
from agentenv.core.sequence import images_of
from agentenv.engine import Sampling, load_engine
from agentenv.engine.hf.vision import Vision
from agentenv.render import Renderer
from field.pictures import odd_pictures
from helpers.seeing import (
    PROCESSORS,
    SEERS,
    TEXT,
    part,
    plain_png,
    png,
    saved_seer,
    seer,
    text,
    tokenizer_of,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        find_spec("vllm") is None,
        reason=os.environ.get("NO_VLLM", "") or "vllm is not installed here: `make test-vllm` installs it",
    ),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")


def asked(*pictures):
    return [{"role": "user", "content": [*map(part, pictures), text("What is it?")]}]


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.exhaustive)])
def test_vllm_sees_the_pixels_that_transformers_sees(family, tmp_path, monkeypatch):
    # vLLM has no smaller heads on a CPU.
    monkeypatch.setattr("helpers.seeing.TEXT", TEXT | {"hidden_size": 128, "head_dim": 32})
    path, model = saved_seer(family, tmp_path), seer(family)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(4)  # or pixels would hardly matter
    model.save_pretrained(path)
    if family == "qwen3_vl":  # vLLM begins with the largest image, which takes minutes here
        settings = PROCESSORS[family] | {"size": {"shortest_edge": 4096, "longest_edge": 65536}}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    red, blue = (plain_png(colour, 64, 64) for colour in ((220, 30, 30), (30, 30, 220)))
    prompts = [asked(png(1, 96, 64)), asked(red), asked(blue), asked(png(2, 64, 64), red, png(3, 64, 96))]

    async def sampled(model, **options):
        loaded = await asyncio.to_thread(load_engine, f"{model}:{path}", dtype="float32", **options)
        renderer = Renderer(loaded.tokenizer)
        try:
            starts = [renderer.start(messages) for messages in prompts]
            settings = Sampling(temperature=0.0, max_tokens=6)
            return [
                await loaded.engine.generate(one, settings, stop_token_ids=(), images=images_of(one))
                for one in starts
            ]
        finally:
            await loaded.engine.close()

    ours = asyncio.run(sampled("hf"))
    theirs = asyncio.run(sampled("vllm", max_model_len=2048))

    assert [one.token_ids for one in theirs] == [one.token_ids for one in ours]
    for left, right in zip(ours, theirs, strict=True):
        # The two resize with different libraries: 0.0011 for Qwen2.5-VL, whose patches fit no picture here.
        assert left.logprobs == pytest.approx(right.logprobs, abs=3e-3)
    red_one, blue_one = (theirs[place].logprobs[0] for place in (1, 2))
    assert abs(red_one - blue_one) > 0.02  # though their ids are equal


@pytest.mark.parametrize("kind", odd_pictures())
def test_the_loader_of_a_vllm_server_shows_the_pixels_that_we_show(kind):
    import numpy
    from vllm.multimodal.media.image import ImageMediaIO

    data = odd_pictures()[kind]
    of_file, of_picture = (ImageMediaIO().load_bytes(one).media for one in (data, picture_of(data)))

    assert of_picture.size == of_file.size == image_size(picture_of(data))
    assert numpy.array_equal(numpy.asarray(of_picture), numpy.asarray(of_file))


@pytest.mark.parametrize("family", SEERS)
def test_what_a_family_s_own_processor_makes_of_what_vllm_loads_is_what_we_make(family, tmp_path):
    import torch
    from transformers import AutoImageProcessor
    from vllm.multimodal.media.image import ImageMediaIO

    saved_seer(family, tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    vision = Vision(tokenizer_of(family).images)
    for kind, data in odd_pictures().items():
        loaded, picture = ImageMediaIO().load_bytes(data).media, picture_of(data)
        theirs = processor(images=[[loaded]] if family == "smolvlm" else [loaded], return_tensors="pt")
        length = len(vision.rule.prepare(*image_size(picture)).ids)
        ours = vision.pixels(ImageTokens(0, length, hash_of(picture), picture))
        assert set(ours) <= set(theirs), kind
        for name, values in ours.items():
            assert torch.equal(values, theirs[name]), (kind, name)
