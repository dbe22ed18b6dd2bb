"""An image out of its bytes, which may be a stranger's: its size is looked at before it is decoded.

Only formats that Pillow decodes by itself are opened. So nothing is executed for one, as is for
EPS.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lema.errors import ConfigError, installing, message_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

__all__ = ["FORMATS", "Unusable", "decoded", "larger", "opened"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")


class Unusable(Exception):
    """Bytes are no image that may be decoded.

    Args:
        what: why not.
        how: what to do about it.
    """

    def __init__(self, what: str, how: str = "remove the row, or save the file again") -> None:
        super().__init__(what)
        self.what = what
        self.how = how


def decoded(content: bytes, max_pixels: int) -> Image:
    """Return an image as RGB, turned as its EXIF data say. Of an animated one it is the first
    frame; an alpha channel is left out. This is how `transformers` loads images.

    Args:
        content: the bytes of the file.
        max_pixels: of the image, by its header.

    Raises:
        Unusable: it has no pixels or too many, is damaged, or is of another format.
        ConfigError: Pillow is not installed.
    """
    with opened(content, max_pixels, FORMATS, "image") as image:
        from PIL import ImageOps

        image.load()
        turned = ImageOps.exif_transpose(image)
        return turned.convert("RGB")


@contextmanager
def opened(
    content: bytes, max_pixels: int, formats: tuple[str, ...], noun: str
) -> Iterator[ImageFile]:
    """Open a file whose size has been looked at. Errors in the context are those of `decoded`.

    Args:
        content: the bytes of the file.
        max_pixels: of the image, by its header.
        formats: which may be opened.
        noun: what messages call it.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        what = "images are read by Pillow, which is not installed"
        raise ConfigError(what, where="modalities", how=installing("images")) from error
    Image.init()  # which finds the formats that are asked for by name
    if not content:
        raise Unusable("the file is empty")
    if (size := _webp_size(content)) is not None:
        # because its decoder takes the memory of all pixels when it is opened
        _check_size(*size, max_pixels)
    try:
        with warnings.catch_warnings():
            # of sizes, which are looked at here, and of damaged metadata, which are not used
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=formats) as image:
                _check_size(*image.size, max_pixels)
                yield image
    except Unusable:
        raise
    except UnidentifiedImageError as error:
        read = ", ".join(formats) + (", or a film" if noun == "video" else "")
        what = f"this is no {noun} of a format that is read ({read})"
        raise Unusable(what) from error
    except Image.DecompressionBombError as error:
        raise Unusable(
            f"the {noun} has more than {max_pixels:,} pixels", larger("max_image_pixels")
        ) from error
    # Any error: decoders raise many kinds for damaged files, and the message is passed on.
    except Exception as error:
        raise Unusable(f"the {noun} cannot be decoded: {message_of(error)}") from error


def larger(setting: str) -> str:
    """Return what to do about an image that is larger than a setting allows."""
    return f"make it smaller, remove the row, or raise {setting}"


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise Unusable(f"the image has no pixels ({width} x {height})")
    if width * height > max_pixels:
        what = f"the image has {width:,} x {height:,} pixels, more than {max_pixels:,}"
        raise Unusable(what, larger("max_image_pixels"))


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height in the header of a WebP file; None: it is none, or damaged."""
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(content) < 30:
        return None
    kind = content[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(content[24:27], "little")
        height = int.from_bytes(content[27:30], "little")
        return width + 1, height + 1
    if kind == b"VP8L":
        bits = struct.unpack("<I", content[21:25])[0]
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack("<HH", content[26:30])
    return width & 0x3FFF, height & 0x3FFF
