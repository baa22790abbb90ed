"""All loaders show the same pixels of one file: vLLM's rules are written here once more, and decide."""

import io

import pytest
from PIL import Image, ImageOps

from agentenv.core import RenderError, image_size
from agentenv.core.images import hash_of, suffix_of
from agentenv.core.pictures import picture_of
from agentenv.core.sequence import images_of
from agentenv.render import Renderer
from field.pictures import odd_pictures, saved, turned
from helpers.seeing import part, png, tokenizer_of


def as_vllm_loads(data):
    """The rules of vLLM 0.32: `ImageOps.exif_transpose`, and what is transparent is pasted on white."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode != "RGB" and (image.mode in {"RGBA", "LA", "PA"} or "transparency" in image.info):
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.split()[3])
        return white
    return image.convert("RGB")


@pytest.mark.parametrize("kind", odd_pictures())
def test_every_loader_shows_the_same_pixels_of_a_picture(kind):
    data = odd_pictures()[kind]
    expected = as_vllm_loads(data)

    picture = picture_of(data)

    for loaded in (Image.open(io.BytesIO(picture)).convert("RGB"), as_vllm_loads(picture)):
        assert (loaded.size, loaded.tobytes()) == (expected.size, expected.tobytes())
    assert image_size(picture) == expected.size
    assert picture_of(picture) == picture
    assert picture == data or suffix_of(picture) == "png"


def test_a_file_that_all_loaders_show_alike_stays_as_it_is():
    for kind in ("jpeg turned 1", "png", "palette", "gif", "cmyk"):
        assert picture_of(odd_pictures()[kind]) == odd_pictures()[kind]


def test_the_renderer_gives_the_picture_and_its_hash_and_size():
    tokenizer = tokenizer_of("qwen2_5_vl")
    wide = Image.frombytes("RGB", (112, 56), bytes(3 * 112 * 56))
    data = saved(wide, "JPEG", exif=turned(6))

    [image] = images_of(Renderer(tokenizer).start([{"role": "user", "content": [part(data)]}]))

    assert (image.data, image.sha256) == (picture_of(data), hash_of(picture_of(data)))
    assert image_size(image.data) == (56, 112)


@pytest.mark.parametrize("left", [0.3, 0.6, 0.9])
def test_a_broken_file_is_refused_where_it_is_rendered(left):
    data = png(1, 96, 64)
    content = [part(data[: int(len(data) * left)])]

    with pytest.raises(RenderError, match="cannot be decoded"):
        Renderer(tokenizer_of("qwen2_5_vl")).start([{"role": "user", "content": content}])
