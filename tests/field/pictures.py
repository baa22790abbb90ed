"""Files of pictures that loaders show in different ways, or could, by what is odd about each."""

from __future__ import annotations

import io

from PIL import Image


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


def odd_pictures() -> dict[str, bytes]:
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
