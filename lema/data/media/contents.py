"""The bytes of an image, a video or a sound as a row names it: of a file below the folder, of an
address, of text in base64, or of an object of Python.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lema.data.chat.pictures import Kind, Picture
from lema.data.files import Row
from lema.data.media.decode import Unusable, larger
from lema.data.media.limits import MediaLimits
from lema.data.media.sounds import MOST_CHANNELS, MOST_RATE, wav_of
from lema.errors import LemaError
from lema.storage.regular import expanded, open_regular, read_at_most

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["NOUNS", "check_size", "content_of", "file_content", "frames_of"]

NOUNS: Mapping[Kind, str] = {"image": "image", "video": "video", "audio": "sound"}
SECONDS = 30.0  # for a server to answer
SCHEMES = ("http://", "https://")
CHOOSE_FOLDER = "set image_folder to a folder that holds all images"
FRAMES = 4  # dimensions of an array of frames: frames, height, width, channels


def content_of(picture: Picture, row: Row, limits: MediaLimits) -> tuple[bytes, Path | None, str]:
    """Return the bytes of an image, the file they are in, if any, and what to call it.

    Raises:
        Unusable: there is no such file, or it may not be read.
    """
    value = picture.value
    noun = NOUNS[picture.kind]
    if isinstance(value, Mapping):
        if picture.kind == "audio" and value.get("array") is not None:
            return _wave(value, limits), None, str(value.get("path") or "")
        inner = {name: value[name] for name in ("bytes", "path") if value.get(name) is not None}
        if not inner:
            raise Unusable(f"the {noun} has neither bytes nor a path", "fill one of them")
        name = str(inner.get("path", ""))
        if "bytes" in inner:
            return _bytes(inner["bytes"], picture.kind, limits), None, name
        value = inner["path"]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _bytes(value, picture.kind, limits), None, ""
    if isinstance(value, str):
        return _named(value, row, limits, picture)
    if picture.kind == "image" and hasattr(value, "getexif") and hasattr(value, "convert"):
        return _saved(cast("Image", value), limits), None, ""
    what = f"{'an' if picture.kind == 'image' else 'a'} {noun} is a {type(value).__name__}"
    hows: Mapping[Kind, str] = {
        "image": "give a path, bytes, a data URL, or an image of PIL",
        "video": "give a path, bytes, or a list of frames; of a data set of `datasets`, "
        'cast_column("video", Video(decode=False))',
        "audio": 'give a path, bytes, or {"array": ..., "sampling_rate": ...}; of a data set of '
        '`datasets`, cast_column("audio", Audio(decode=False))',
    }
    raise Unusable(what, hows[picture.kind])


def frames_of(picture: Picture) -> list[Picture] | None:
    """Return the frames of a video that is a list of images; None: it is no such list."""
    value = picture.value
    if picture.kind != "video":
        return None
    if isinstance(value, np.ndarray) and value.ndim == FRAMES and value.dtype == np.uint8:
        from PIL import Image

        value = [Image.fromarray(frame) for frame in value]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        return None
    return [
        replace(picture, value=frame, at=f"{picture.at}, frame {number}", kind="image")
        for number, frame in enumerate(value, 1)
    ]


def check_size(kind: Kind, num_bytes: int, limits: MediaLimits) -> None:
    """Refuse a file that is too large, with `Unusable`."""
    if num_bytes > (most := limits.most_bytes(kind)):
        setting = "max_image_bytes" if kind == "image" else "max_media_bytes"
        raise Unusable(f"the {NOUNS[kind]} has more than {most:,} bytes", larger(setting))


def file_content(path: Path, most: int, noun: str = "file") -> bytes:
    """Return the bytes of a file, at most so many. `Unusable`: it cannot be read."""
    try:
        with open_regular(path) as file:
            return read_at_most(file, most)
    except LemaError as error:
        raise Unusable(f"the {noun} {str(path)!r} cannot be read: {error.what}") from error
    except (OSError, ValueError) as error:
        how = "correct the path, which is relative to image_folder or to the folder of the data"
        raise Unusable(f"the {noun} {str(path)!r} cannot be read: {error}", how) from error


def _bytes(value: object, kind: Kind, limits: MediaLimits) -> bytes:
    if isinstance(value, str):
        return _from_base64(value, kind, limits)
    if not isinstance(value, bytes | bytearray | memoryview):
        what = f"the bytes of an image are a {type(value).__name__}"
        raise Unusable(what, "give bytes, or text in base64")
    return bytes(value)


def _named(
    value: str, row: Row, limits: MediaLimits, picture: Picture
) -> tuple[bytes, Path | None, str]:
    kind = picture.kind
    noun = NOUNS[kind]
    if picture.encoded:
        text = value.partition(",")[2] if value[:5] == "data:" else value
        return _from_base64(text, kind, limits), None, ""
    if value[:5].lower() == "data:":
        head, comma, body = value.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise Unusable(
                "a data URL has no base64", "write data:image/png;base64, and the bytes in base64"
            )
        return _from_base64(body, kind, limits), None, ""
    if value.lower().startswith(SCHEMES):
        if not limits.urls:
            what = f"the {noun} {value[:200]!r} is a URL, and {noun}s are fetched only if asked for"
            raise Unusable(what, "set image_urls: true, or give the file")
        return _fetched(value, limits.most_bytes(kind)), None, value[:200]
    path = _inside(value, limits.folder_of(row.source), noun)
    return file_content(path, limits.most_bytes(kind) + 1, noun), path, value


def _from_base64(text: str, kind: Kind, limits: MediaLimits) -> bytes:
    check_size(kind, len(text) * 3 // 4 - 2, limits)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        what = f"the {NOUNS[kind]} is no base64: {error}"
        raise Unusable(what, "write its bytes in base64") from error


def _inside(value: str, folder: Path, noun: str) -> Path:
    """Return the file of a path, which lies below a folder, also when links are followed."""
    if "\0" in value or not value.strip():
        raise Unusable(f"{value[:100]!r} is no path", "name a file")
    if value.lower().startswith("file://"):
        value = value[len("file://") :]
    root = expanded(folder).resolve()
    path = Path(os.path.normpath(root / value))
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:
        raise Unusable(f"the {noun} {value[:200]!r} cannot be read: {error}") from error
    if not real.is_relative_to(root):
        what = f"the {noun} {value[:200]!r} lies outside {root}"
        raise Unusable(what, CHOOSE_FOLDER)
    return real


def _fetched(url: str, most: int) -> bytes:
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    try:
        with opener.open(url, timeout=SECONDS) as answer:
            return bytes(answer.read(most + 1))
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise Unusable(f"{url[:200]!r} cannot be fetched: {error}", "check the URL") from error


def _saved(image: Image, limits: MediaLimits) -> bytes:
    """Return an image of PIL as the bytes of a file that gives the same pixels."""
    from PIL import ImageOps

    if image.size[0] * image.size[1] > limits.max_pixels:
        what = f"the image has {image.size[0]:,} x {image.size[1]:,} pixels"
        raise Unusable(
            f"{what}, more than {limits.max_pixels:,}", "make it smaller, or raise max_image_pixels"
        )
    try:
        file = io.BytesIO()
        ImageOps.exif_transpose(image).convert("RGB").save(file, "PNG", compress_level=1)
    except Exception as error:
        raise Unusable(f"the image of PIL cannot be used: {error}") from error
    return file.getvalue()


def _wave(value: Mapping[str, Any], limits: MediaLimits) -> bytes:
    """Return a sound that is an array, `[samples]` or `[channels, samples]`, as a file that gives
    the same numbers."""
    rate = value.get("sampling_rate")
    if type(rate) is not int or not 1 <= rate <= MOST_RATE:
        what = f"the array of a sound has a sampling rate of {rate!r}"
        raise Unusable(what, 'give {"array": ..., "sampling_rate": 16000}')
    array = value["array"]
    if hasattr(array, "__len__") and len(array) > limits.max_seconds * rate:
        what = f"the sound has {len(array) / rate:,.0f} seconds, more than {limits.max_seconds:,}"
        raise Unusable(what, "make it shorter, remove the row, or raise max_media_seconds")
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused when it is decoded
            samples = np.asarray(array, dtype=np.float32)
            if samples.ndim > 1 and samples.shape[0] <= MOST_CHANNELS:
                samples = samples.mean(axis=0) if len(samples) > 1 else samples[0]
    except (TypeError, ValueError) as error:
        what = f"the array of a sound holds something other than numbers: {error}"
        raise Unusable(what, "give numbers from -1 to 1") from error
    if samples.ndim != 1:
        what = f"the array of a sound has the shape {list(samples.shape)}"
        raise Unusable(what, "give [samples], or [channels, samples]")
    return wav_of(samples, rate)
