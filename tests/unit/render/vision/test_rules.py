"""Counts of tokens from sizes alone: those of the releases, and those of transformers' processors."""

import json
import random

import pytest

from agentenv.core import RenderError
from agentenv.render import ChatTokenizer
from agentenv.render.vision import FAMILIES, find_rule
from helpers.seeing import PROCESSORS, SEERS, TOKENS, png, saved_seer, tokenizer_of

IDS = {token: 1000 + at for at, token in enumerate(dict.fromkeys(t for ts in TOKENS.values() for t in ts))}
IDS |= {f"<row_{r}_col_{c}>": 2000 + 10 * r + c for r in range(1, 7) for c in range(1, 7)}


def rule(family, processor, **config):
    encode = {"\n": [10], "\n\n": [11]}.__getitem__
    return FAMILIES[family]({"model_type": family, **config}, processor, IDS.get, encode)


@pytest.mark.parametrize(
    ("family", "processor", "config", "count"),
    [
        ("qwen2_5_vl", {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056}, {}, 391),
        ("qwen3_vl", {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}, {}, 300),
        (
            "smolvlm",
            {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
            {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
            832,
        ),
        ("gemma3", {}, {"mm_tokens_per_image": 256}, 256),
    ],
)
def test_a_picture_of_640_x_480_has_as_many_placeholders_as_in_the_release(family, processor, config, count):
    made = rule(family, processor, **config)
    assert made.prepare(640, 480).ids.count(made.image_id) == count


def test_what_a_processor_would_refuse_is_refused():
    with pytest.raises(RenderError, match="too narrow"):
        rule("qwen3_vl", {}).prepare(4000, 10)
    with pytest.raises(RenderError, match="do_pan_and_scan"):
        rule("gemma3", {"do_pan_and_scan": True})
    with pytest.raises(RenderError, match="<\\|image_pad\\|>"):
        FAMILIES["qwen3_vl"]({"model_type": "qwen3_vl"}, {}, lambda _: None, lambda _: [])


def test_a_directory_tells_its_rule_or_why_there_is_none(tmp_path):
    def read(path):
        return json.loads(path.read_text()) if path.exists() else {}

    def write(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return find_rule(tmp_path, read, IDS.get, lambda _: [1])

    assert write(model_type="llama")[1].startswith("the model has no eyes")
    assert "'pixtral' have no rule" in write(model_type="pixtral", vision_config={})[1]
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 16}')
    assert write(model_type="qwen3_vl", vision_config={})[0].settings == {"patch_size": 16}
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"patch_size": 8}}')
    assert write(model_type="qwen3_vl", vision_config={})[0].settings == {"patch_size": 8}


@pytest.mark.slow
@pytest.mark.parametrize("family", SEERS)
def test_the_processor_of_transformers_makes_as_many(family):
    from agentenv.core.images import ImageTokens, hash_of
    from agentenv.engine.hf.vision import Vision

    made = tokenizer_of(family).images
    vision, draw = Vision(made), random.Random(0)
    for number in range(40):
        width, height = draw.randint(8, 400), draw.randint(8, 400)
        data = png(number, width, height)
        prepared = made.prepare(width, height)
        tensors = vision.pixels(ImageTokens(0, len(prepared.ids), hash_of(data), data))
        count = prepared.ids.count(made.image_id)
        if family.startswith("qwen"):
            _, rows, columns = tensors["image_grid_thw"][0].tolist()
            assert (rows // 2, columns // 2) == prepared.grid
            assert rows * columns // 4 == count
        elif family == "smolvlm":
            assert tensors["pixel_values"].shape[1] * 4 == count
        else:
            assert tensors["pixel_values"].shape[0] * 4 == count


@pytest.mark.slow
def test_a_saved_model_brings_its_rule(tmp_path):
    tokenizer = ChatTokenizer.load(saved_seer("qwen2_5_vl", tmp_path))
    assert tokenizer.images is not None
    assert tokenizer.images.settings == PROCESSORS["qwen2_5_vl"]
