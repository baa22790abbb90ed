"""Images among tokens: sizes from file heads, keys, and the invariants of spans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import AlignmentError, RenderError, SequenceBuilder, TokenSequence, TokenSpan
from agentenv.core.images import (
    MAX_PIXELS,
    ImageTokens,
    hash_of,
    image_file,
    image_size,
    images_between,
    keys_of,
    place_in,
)
from agentenv.core.sequence import Prompt
from helpers.seeing import part, png

HASHES = [hash_of(bytes([number])) for number in range(3)]


@st.composite
def sequences(draw):
    builder = SequenceBuilder()
    for turn in range(draw(st.integers(1, 4))):
        ids, images = [], []
        for _ in range(draw(st.integers(0, 3))):
            ids += draw(st.lists(st.integers(0, 9), max_size=4))
            length = draw(st.integers(1, 5))
            images.append(ImageTokens(len(ids), length, draw(st.sampled_from(HASHES))))
            ids += [7] * length
        ids += draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
        builder.append("env" if turn else "prompt", Prompt(ids, images), turn=turn - 1)
        builder.append("model", [1, 2], logprobs=[-1.0, -0.5], weights_version=0, turn=turn)
    return builder.freeze()


@given(sequences(), st.integers(0, 80))
def test_a_cut_is_a_prefix_of_every_view_and_never_cuts_an_image(sequence, length):
    cut = sequence.cut(length)

    assert len(cut) <= length
    assert cut.token_ids == sequence.token_ids[: len(cut)]
    assert cut.keys == sequence.keys[: len(cut)]
    assert cut.images == tuple(image for image in sequence.images if image.end <= len(cut))
    between = sequence.images
    assert len(cut) == min(length, len(sequence)) or any(i.offset == len(cut) < i.end for i in between)


@given(sequences(), sequences())
def test_keys_agree_exactly_as_far_as_ids_and_images_do(one, other):
    shared = next(
        (at for at, pair in enumerate(zip(one.keys, other.keys, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    inside = [image for image in one.images if image.offset < shared < image.end]

    assert one.token_ids[:shared] == other.token_ids[:shared]
    assert [i for i in one.images if i.end <= shared] == [i for i in other.images if i.end <= shared]
    # Lengths differ for the same hash only here: what a rule makes of one file is always the same.
    assert all(any(o.offset == image.offset for o in other.images) for image in inside)


def test_images_of_one_size_have_equal_ids_and_different_keys():
    first, second = (keys_of([1, 7, 7, 2], [ImageTokens(1, 2, sha256)]) for sha256 in HASHES[:2])

    assert first != second
    assert (first[0], first[3]) == (1, 2)
    assert all(key < 0 for key in first[1:3])
    assert place_in(first[1])[0] == place_in(first[2])[0]
    assert [place_in(key)[1] for key in first[1:3]] == [0, 1]


@pytest.mark.parametrize("source", ["model", "other"])
def test_no_model_samples_images(source):
    logprobs = (-1.0,) if source == "model" else None
    with pytest.raises(AlignmentError, match="must not have images"):
        TokenSpan(source, (7,), logprobs, images=(ImageTokens(0, 1, HASHES[0]),))


@pytest.mark.parametrize(
    "images",
    [
        (ImageTokens(1, 3, HASHES[0]),),
        (ImageTokens(0, 2, HASHES[0]), ImageTokens(1, 1, HASHES[1])),
        (ImageTokens(2, 1, HASHES[0]), ImageTokens(0, 1, HASHES[1])),
    ],
)
def test_images_are_inside_apart_and_in_order(images):
    with pytest.raises(AlignmentError):
        TokenSpan("env", (7, 7, 7), images=images)


def test_a_sequence_tells_where_its_images_are():
    spans = (
        TokenSpan("prompt", (1, 7, 7), images=(ImageTokens(1, 2, HASHES[0]),)),
        TokenSpan("env", (7, 2), images=(ImageTokens(0, 1, HASHES[1]),)),
    )
    assert [(i.offset, i.length) for i in TokenSequence(spans).images] == [(1, 2), (3, 1)]
    with pytest.raises(AlignmentError, match="cut in two"):
        images_between(TokenSequence(spans).images, 0, 2)


def test_the_size_is_read_from_the_head_of_each_format():
    assert image_size(png(1, 30, 20)) == (30, 20)
    assert image_size(b"GIF89a" + bytes([30, 0, 20, 0]) + bytes(30)) == (30, 20)
    jpeg = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0\x00\x11\x08\x00\x14\x00\x1e\x03" + bytes(20)
    assert image_size(jpeg) == (30, 20)
    extended = b"RIFF    WEBPVP8X" + bytes(8) + bytes([29, 0, 0, 19, 0, 0]) + bytes(10)
    assert image_size(extended) == (30, 20)


BOMB = bytearray(png(1, 8, 8))
BOMB[16:24] = (60_000).to_bytes(4) + (60_000).to_bytes(4)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        *((png(1, 30, 20)[:cut], "image") for cut in (3, 8, 12, 17, 23)),
        (bytes(BOMB), f"60000 x 60000 pixels, and at most {MAX_PIXELS:,}"),
    ],
)
def test_a_broken_file_and_a_bomb_are_refused_in_words_without_their_pixels(data, told):
    with pytest.raises(RenderError, match=told):
        image_size(data)


def test_only_data_urls_are_taken():
    data = png(1, 8, 8)
    assert image_file(part(data)["image_url"]["url"]) == data
    with pytest.raises(RenderError, match="is no data URL"):
        image_file("http://169.254.169.254/latest.png")
    with pytest.raises(RenderError, match="base64"):
        image_file("data:image/png;base64,@@@@")
