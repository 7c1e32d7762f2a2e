"""Images: their size is read from the header alone, they come out upright and without alpha, and damage is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress

import pytest
from PIL import Image

from actors.media.decoder import images
from actors.media.decoder.content import ContentRefusal
from actors.media.decoder.sniffing import ContentKind
from actors.media.jobs import Bounds, ImageFacts
from tests.rig import media_samples as samples
from tests.rig.media_samples import HEIGHT, WIDTH, picture, saved

BOUNDS = Bounds(pixels_max=1_000_000, aspect_max=100.0, frames_max=100, seconds_max=100.0)


def decoded(content: bytes, kind: ContentKind, height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    return Image.frombytes("RGB", (width, height), images.decode(content, kind, height, width))


KINDS = [
    (samples.png, ContentKind.PNG),
    (samples.jpeg, ContentKind.JPEG),
    (samples.webp, ContentKind.WEBP),
    (samples.gif, ContentKind.GIF),
]


@pytest.mark.parametrize(("made", "kind"), KINDS, ids=[kind.name for _, kind in KINDS])
def test_an_image_has_the_pixels_that_pillow_reads(made: Callable[[], bytes], kind: ContentKind) -> None:
    assert images.inspect(made(), kind, BOUNDS) == ImageFacts(HEIGHT, WIDTH)
    expected = Image.open(io.BytesIO(made())).convert("RGB")
    assert decoded(made(), kind).tobytes() == expected.tobytes()


def test_a_resized_image_is_resized_by_bicubic_filtering() -> None:
    expected = picture().resize((28, 56), Image.Resampling.BICUBIC)
    assert decoded(samples.png(), ContentKind.PNG, 56, 28).tobytes() == expected.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright(orientation: int) -> None:
    content = samples.jpeg(orientation=orientation)
    facts = images.inspect(content, ContentKind.JPEG, BOUNDS)
    assert facts == (ImageFacts(WIDTH, HEIGHT) if orientation > 4 else ImageFacts(HEIGHT, WIDTH))
    from PIL import ImageOps

    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert decoded(content, ContentKind.JPEG, facts.height, facts.width).tobytes() == expected.tobytes()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = picture(mode=mode)
    kind = ContentKind.JPEG if mode == "CMYK" else ContentKind.PNG
    content = saved(image, kind.value)
    expected = Image.open(io.BytesIO(content)).convert("RGB")
    assert decoded(content, kind).tobytes() == expected.tobytes()


@pytest.mark.parametrize("transparency", [None, 0x0101])
def test_gray_of_16_bits_keeps_its_upper_8(transparency: int | None) -> None:
    grays = range(0, 0x10000, 0x101)
    image = Image.frombytes("I;16", (len(grays), 1), b"".join(gray.to_bytes(2, "little") for gray in grays))
    content = saved(image, "PNG") if transparency is None else saved(image, "PNG", transparency=transparency)
    assert decoded(content, ContentKind.PNG, 1, len(grays)).getchannel(0).tobytes() == bytes(range(256))


def test_what_is_transparent_is_white() -> None:
    image = picture(mode="RGBA")
    image.putalpha(Image.new("L", image.size, 0))
    assert decoded(saved(image, "PNG"), ContentKind.PNG).getcolors() == [(WIDTH * HEIGHT, (255, 255, 255))]
    half = Image.new("RGBA", (WIDTH, HEIGHT), (0, 0, 0, 128))
    assert decoded(saved(half, "PNG"), ContentKind.PNG).getcolors() == [(WIDTH * HEIGHT, (127, 127, 127))]
    palette = picture().quantize(16)
    content = saved(palette, "PNG", transparency=palette.getpixel((0, 0)))
    assert decoded(content, ContentKind.PNG).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("kind", "name"), [(ContentKind.PNG, "PNG"), (ContentKind.WEBP, "WEBP"), (ContentKind.GIF, "GIF")]
)
def test_an_animation_is_refused_and_not_cut_down_to_a_frame(kind: ContentKind, name: str) -> None:
    with pytest.raises(ContentRefusal, match=f"animated {name}") as caught:
        images.inspect(samples.animated(name), kind, BOUNDS)
    assert caught.value.code == "unsupported"


def test_a_photograph_of_several_pictures_is_the_first_of_them() -> None:
    content = saved(picture(), "MPO", save_all=True, append_images=[picture().rotate(180)])
    assert images.inspect(content, ContentKind.JPEG, BOUNDS) == ImageFacts(HEIGHT, WIDTH)
    red, green, _ = decoded(content, ContentKind.JPEG).tobytes()[:3]
    assert red > 200
    assert green < 100


def test_a_bomb_is_refused_by_its_header() -> None:
    content = samples.png_bomb(40_000, 25_000)
    assert len(content) < 1024
    with pytest.raises(ContentRefusal, match=r"40000 x 25000 pixels; the limit is 1,000,000") as caught:
        images.inspect(content, ContentKind.PNG, BOUNDS)
    assert caught.value.code == "too_large"


def test_a_narrow_image_is_refused() -> None:
    with pytest.raises(ContentRefusal, match="at most 100 times"):
        images.inspect(samples.png(width=808, height=8), ContentKind.PNG, BOUNDS)


def test_a_truncated_image_is_refused() -> None:
    for made, kind in KINDS[:2]:
        content = made()[:-100]
        assert images.inspect(content, kind, BOUNDS) == ImageFacts(HEIGHT, WIDTH)
        with pytest.raises(ContentRefusal, match="truncated or corrupt"):
            images.decode(content, kind, HEIGHT, WIDTH)
    with pytest.raises(ContentRefusal, match="header"):
        images.inspect(samples.png()[:20], ContentKind.PNG, BOUNDS)


@pytest.mark.filterwarnings("ignore:.*EXIF", "ignore:.*corrupt")  # as in a decoder
@pytest.mark.parametrize("damage", [b"\xff" * 8, b"II*\x00\xff\xff\xff\x7f", bytes(64), b"MM"])
def test_a_corrupt_exif_does_not_matter(damage: bytes) -> None:
    content = saved(picture(), "JPEG", exif=b"Exif\x00\x00" + damage)
    assert images.inspect(content, ContentKind.JPEG, BOUNDS) == ImageFacts(HEIGHT, WIDTH)
    assert decoded(content, ContentKind.JPEG).size == (WIDTH, HEIGHT)


def test_whatever_is_wrong_with_a_cut_animation_is_a_refusal() -> None:
    content = samples.animated("GIF")
    for length in range(len(content)):
        with suppress(ContentRefusal):
            images.inspect(content[:length], ContentKind.GIF, BOUNDS)
            images.decode(content[:length], ContentKind.GIF, HEIGHT, WIDTH)


def test_no_other_plugin_reads_a_content() -> None:
    with pytest.raises(ContentRefusal, match="header of the PNG image is corrupt"):
        images.inspect(saved(picture(), "BMP"), ContentKind.PNG, BOUNDS)
