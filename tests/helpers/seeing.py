"""Tiny models that see, made from configurations, with a tokenizer of bytes; and pictures."""

import base64
import io
import json
import struct
import zlib
from functools import cache

from tokenizers import AddedToken, Tokenizer

from agentenv.render import ChatTokenizer, byte_tokenizer
from agentenv.render.vision import FAMILIES

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 16,
    "image_size": 64,
}
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TILES = ("<fake_token_around_image>", "<image>", "<global-img>")
ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
TOKENS = {
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "smolvlm": (*TILES, *ROWS),
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
}
PROCESSORS = {
    "qwen2_5_vl": {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 1003520}},
    "qwen3_vl": {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 16777216}},
    "smolvlm": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
    "gemma3": {"size": {"height": 64, "width": 64}},
}
SEERS = tuple(TOKENS)


def png(seed, width, height):
    """Return a picture of noise as a PNG file."""
    import random

    rng = random.Random(seed)
    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    return _png(rows, width, height)


def plain_png(color, width, height, square=None, background=(0, 0, 0)):
    """Return a picture of one colour, or of a square `(x, y, size)` of it on a background."""
    pixels = [[color if square is None else background] * width for _ in range(height)]
    if square is not None:
        x, y, size = square
        for row in range(y, y + size):
            pixels[row][x : x + size] = [color] * size
    rows = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in pixels)
    return _png(rows, width, height)


def _png(rows, width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def part(data):
    """Return a picture as a content part."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text(words):
    """Return a text as a content part."""
    return {"type": "text", "text": words}


@cache
def tokenizer_of(family):
    """Return the tokenizer of bytes with the tokens of a family, and the family's rule."""
    plain = byte_tokenizer()
    backend = Tokenizer.from_str(plain.backend.to_str())
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS[family]])
    tokenizer = ChatTokenizer(
        backend, chat_template=plain.chat_template, special_tokens=plain.special_tokens, name=family
    )
    config = json.loads(config_of(family, backend).to_json_string())
    rule = FAMILIES[family](config, PROCESSORS[family], tokenizer.token_id, tokenizer.encode)
    tokenizer.images = rule
    return tokenizer


def config_of(family, backend):
    """Return the configuration of the tiny model of a family."""
    import transformers

    ids = {token: backend.token_to_id(token) for token in TOKENS[family]}
    text = TEXT | {"vocab_size": backend.get_vocab_size(with_added_tokens=True), "pad_token_id": 0}
    if family in {"qwen2_5_vl", "qwen3_vl"}:
        named = {
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        }
        quarter = TEXT["head_dim"] // 4
        parts = [quarter, quarter // 2, quarter // 2]
        rope = {"rope_type": "default", "mrope_section": parts, "rope_theta": 10000.0}
        tower = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": TEXT["hidden_size"],
        }
    if family == "qwen2_5_vl":
        tower |= {"window_size": 112, "fullatt_block_indexes": [1], "patch_size": 14}
        text |= {"rope_parameters": rope}
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **named)
    if family == "qwen3_vl":
        tower |= {"depth": 3, "patch_size": 16, "num_position_embeddings": 64}
        tower |= {"deepstack_visual_indexes": [0, 1]}
        text |= {"rope_parameters": rope | {"mrope_interleaved": True}}
        return transformers.Qwen3VLConfig(text_config=text, vision_config=tower, **named)
    if family == "smolvlm":
        text |= {"model_type": "llama"}
        return transformers.SmolVLMConfig(
            text_config=text, vision_config=TOWER, scale_factor=2, image_token_id=ids["<image>"]
        )
    text |= {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
    }
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=TOWER | {"vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_id=ids["<image_soft_token>"],
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
    )


def seer(family, seed=0):
    """Return a tiny model of a family with random weights."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config_of(family, tokenizer_of(family).backend))
    for name, weight in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(weight, 0, 0.5)  # Gemma 3 starts it at zero, so pixels would not matter
    return model.float().eval()


def saved_seer(family, path):
    """Save a tiny model with its tokenizer and processor settings, as a hub has them."""
    from pathlib import Path

    model, tokenizer = seer(family), tokenizer_of(family)
    model.save_pretrained(path)
    tokenizer.backend.save(str(Path(path) / "tokenizer.json"))
    config = {"chat_template": tokenizer.chat_template, **tokenizer.special_tokens}
    (Path(path) / "tokenizer_config.json").write_text(json.dumps(config))
    (Path(path) / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    return path


def decoded(data):
    """Return the picture of a file, for tests that look at pixels."""
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")
