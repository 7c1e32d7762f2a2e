"""Images, by Pillow: their size from the header alone, and their pixels.

Only the plugin of the sniffed type may read a content. An animation is refused and not cut down to its first frame: the
answer would be about something that the client has not sent. Photographs of several pictures in one JPEG, which
cameras write, count as the first of them.
"""

from __future__ import annotations

import io
import struct

from PIL import (
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from actors.media.decoder.content import ContentRefusal
from actors.media.decoder.sniffing import ContentKind
from actors.media.jobs import Bounds, ImageFacts

CORRUPT = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)
"""The errors that Pillow's plugins raise for unreadable images."""

ORIENTATION = 0x0112  # the tag in EXIF
_UPRIGHT = {
    2: (Image.Transpose.FLIP_LEFT_RIGHT,),
    3: (Image.Transpose.ROTATE_180,),
    4: (Image.Transpose.FLIP_TOP_BOTTOM,),
    5: (Image.Transpose.TRANSPOSE,),
    6: (Image.Transpose.ROTATE_270,),
    7: (Image.Transpose.TRANSVERSE,),
    8: (Image.Transpose.ROTATE_90,),
}
SIDEWAYS = {5, 6, 7, 8}  # orientations that exchange height and width
WITH_ALPHA = {"RGBA", "LA", "PA", "La", "RGBa"}
GRAY_16_BITS = "I;16"  # the mode that Pillow would convert by cutting off at 255, so that nearly all is white

Image.MAX_IMAGE_PIXELS = None  # its own limit is a warning first; ours is checked by `inspect`
ImageFile.LOAD_TRUNCATED_IMAGES = False
Image.preinit()
PLUGINS = (  # imported here, since in the sandbox nothing can be; that of TIFF reads EXIF
    *(GifImagePlugin, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin),
)


def inspect(content: bytes, kind: ContentKind, bounds: Bounds) -> ImageFacts:
    """Return the size of an image, without reading its pixels; raises `ContentRefusal`."""
    image = _opened(content, kind)
    width, height = image.size
    check_size(height, width, bounds)
    if kind is not ContentKind.JPEG and _is_animated(image, kind):
        raise ContentRefusal(f"it is an animated {kind}: send one frame as an image, or a video", "unsupported")
    return ImageFacts(width, height) if _orientation(image) in SIDEWAYS else ImageFacts(height, width)


def decode(content: bytes, kind: ContentKind, height: int, width: int) -> bytes:
    """Return the RGB pixels of an image, upright and resized to a height and width; raises `ContentRefusal`."""
    image = _opened(content, kind)
    try:
        image.load()
    except CORRUPT as error:
        raise ContentRefusal(f"the {kind} image is truncated or corrupt") from error
    upright: Image.Image = image
    for step in _UPRIGHT.get(_orientation(image), ()):
        upright = upright.transpose(step)
    pixels = to_rgb(upright)
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.BICUBIC)
    return pixels.tobytes()


def check_size(height: int, width: int, bounds: Bounds) -> None:
    """Raise `ContentRefusal` for more pixels than are decoded, or for too narrow an image."""
    if min(height, width) < 1:
        raise ContentRefusal("it has no pixels")
    if height * width > bounds.pixels_max:
        raise ContentRefusal(f"it has {width} x {height} pixels; the limit is {bounds.pixels_max:,}", "too_large")
    if max(height, width) > bounds.aspect_max * min(height, width):
        raise ContentRefusal(
            f"it has {width} x {height} pixels: one side can be at most {bounds.aspect_max:g} times the other"
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image without alpha, of 8 bits a channel: what shines through is white, as on a page."""
    if image.mode == GRAY_16_BITS:
        image.info.pop("transparency", None)  # one gray of 16 bits, which 8 bits do not tell from its neighbours
        image = image.point(lambda gray: gray / 256).convert("L")
    if image.mode in WITH_ALPHA or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        page = Image.new("RGBA", image.size, (255, 255, 255, 255))
        page.alpha_composite(with_alpha)
        image = page
    return image if image.mode == "RGB" else image.convert("RGB")


def _opened(content: bytes, kind: ContentKind) -> ImageFile.ImageFile:
    try:
        return Image.open(io.BytesIO(content), formats=(kind.value,))
    except CORRUPT as error:
        raise ContentRefusal(f"the header of the {kind} image is corrupt") from error


def _is_animated(image: ImageFile.ImageFile, kind: ContentKind) -> bool:
    try:
        # `is_animated` looks for a second frame.
        return bool(getattr(image, "is_animated", False))
    except CORRUPT as error:
        raise ContentRefusal(f"the {kind} image is corrupt behind its first frame") from error


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of the image; 1, upright, if it is absent or invalid."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # noqa: BLE001  # any error of a corrupt EXIF: only the pixels count
        return 1
    return value if isinstance(value, int) and 1 <= value <= max(_UPRIGHT) else 1
