"""All loaders show the same pixels of one file: vLLM's rules are written here once more, and decide."""

import io

import pytest
from PIL import Image, ImageOps

from agentenv.core import RenderError, image_size
from agentenv.core.images import hash_of, suffix_of
from agentenv.core.pictures import picture_of
from agentenv.core.sequence import images_of
from agentenv.render import Renderer
from helpers.seeing import part, png, tokenizer_of


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(mode, width=40, height=24):
    size = len(Image.new(mode, (width, height)).tobytes())
    return Image.frombytes(mode, (width, height), bytes(i * 37 % 251 for i in range(size)))


def turned(way):
    exif = Image.Exif()
    exif[0x0112] = way
    return exif


def kinds():
    palette = noise("RGB").quantize(16)
    wide = noise("RGB")
    files = {f"jpeg turned {way}": saved(wide, "JPEG", exif=turned(way)) for way in range(1, 9)}
    return files | {
        "square jpeg turned": saved(noise("RGB", 24, 24), "JPEG", exif=turned(6)),
        "png turned": saved(wide, "PNG", exif=turned(8)),
        "webp turned": saved(wide, "WEBP", exif=turned(3), lossless=True),
        "png": saved(wide, "PNG"),
        "rgba": saved(noise("RGBA"), "PNG"),
        "rgba turned": saved(noise("RGBA"), "PNG", exif=turned(5)),
        "la": saved(noise("LA"), "PNG"),
        "webp with alpha": saved(noise("RGBA"), "WEBP", lossless=True),
        "palette": saved(palette, "PNG"),
        "transparent palette": saved(palette, "PNG", transparency=3),
        "transparent colour": saved(wide, "PNG", transparency=wide.getpixel((0, 0))),
        "transparent grey": saved(noise("L"), "PNG", transparency=37),
        "gif": saved(palette, "GIF"),
        "transparent gif": saved(palette, "GIF", transparency=3),
        "frames": saved(palette, "GIF", save_all=True, append_images=[palette.rotate(180)]),
        "16 bits": saved(Image.new("I;16", (40, 24), 300), "PNG"),
        "black and white": saved(wide.convert("1"), "PNG"),
        "cmyk": saved(noise("CMYK"), "JPEG"),
    }


def as_vllm_loads(data):
    """The rules of vLLM 0.32: `ImageOps.exif_transpose`, and what is transparent is pasted on white."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode in {"RGBA", "LA", "PA"} or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.split()[3])
        return white
    return image.convert("RGB")


@pytest.mark.parametrize("kind", kinds())
def test_every_loader_shows_the_same_pixels_of_a_picture(kind):
    data = kinds()[kind]
    expected = as_vllm_loads(data)

    picture = picture_of(data)

    for loaded in (Image.open(io.BytesIO(picture)).convert("RGB"), as_vllm_loads(picture)):
        assert (loaded.size, loaded.tobytes()) == (expected.size, expected.tobytes())
    assert image_size(picture) == expected.size
    assert picture_of(picture) == picture
    assert picture == data or suffix_of(picture) == "png"


def test_a_file_that_all_loaders_show_alike_stays_as_it_is():
    for kind in ("jpeg turned 1", "png", "palette", "gif", "cmyk"):
        assert picture_of(kinds()[kind]) == kinds()[kind]


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
