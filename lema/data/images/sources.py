"""Where the bytes of an image are: in a file, or in a row, from where they go to a file without a
name.

So of the images of a data set nothing stays in memory, and each can be read again when a batch
needs it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import tempfile
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from lema.data.chat.pictures import Picture
from lema.data.files import Row
from lema.data.images.decode import Unusable, decoded
from lema.data.images.limits import ImageLimits
from lema.errors import DataError, LemaError
from lema.storage.regular import expanded, open_regular, read_at_most

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageSource", "Spool", "check_folder", "source_of"]

SECONDS = 30.0  # for a server to answer
SCHEMES = ("http://", "https://")
CHOOSE_FOLDER = "set image_folder to a folder that holds all images"


class Spool:
    """A file without a name that keeps the bytes of images in rows; it ends with this object.

    Args:
        directory: where it is made; None: where temporary files are.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()
        self._end = 0

    def add(self, content: bytes) -> int:
        """Keep bytes; return where they begin."""
        with self._lock:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            start = self._end
            self._file.seek(start)
            self._file.write(content)
            self._file.flush()
            self._end += len(content)
        return start

    def read(self, start: int, size: int) -> bytes:
        """Return bytes that are kept."""
        with self._lock:
            assert self._file is not None, "nothing was kept"
            self._file.seek(start)
            return self._file.read(size)


@dataclass(frozen=True)
class ImageSource:
    """One image of a row.

    Attributes:
        name: what messages call it.
        origin: the file and line of its row.
        digest: SHA-256 of its bytes.
        num_bytes: how many they are.
        path: its file; None: it is in `spool`.
        spool: keeps its bytes.
        start: where they begin there.
    """

    name: str
    origin: str
    digest: bytes
    num_bytes: int
    path: Path | None = None
    spool: Spool | None = None
    start: int = 0

    def load(self, max_pixels: int) -> Image:
        """Read and decode it. `DataError`: it cannot be, or has changed since the row was read."""
        try:
            if self.path is None:
                assert self.spool is not None, "an image is in a file or in a spool"
                content = self.spool.read(self.start, self.num_bytes)
            else:
                content = _file_content(self.path, self.num_bytes + 1)
            if hashlib.sha256(content).digest() != self.digest:
                raise Unusable("the image has changed since its row was read", "start the run anew")
            return decoded(content, max_pixels)
        except Unusable as error:
            where = f"{self.origin}, {self.name}"
            raise DataError(error.what, where=where, how=error.how) from error


def source_of(
    picture: Picture, row: Row, limits: ImageLimits, spool: Spool
) -> tuple[ImageSource, Image]:
    """Return where an image of a row is, and the image decoded.

    Args:
        picture: the image as the row names it.
        row: the row.
        limits: what may be read.
        spool: keeps the bytes that are in the row, or that were fetched.

    Raises:
        DataError: there is no such image, it may not be read, or it cannot be decoded; names row
            and image.
    """
    at = picture.at
    try:
        content, path, name = _content(picture, row, limits)
        if len(content) > limits.max_bytes:
            what = f"the image has more than {limits.max_bytes:,} bytes"
            how = "make it smaller, remove the row, or raise max_image_bytes"
            raise Unusable(what, how)
        image = decoded(content, limits.max_pixels)
    except Unusable as error:
        raise row.broken(error.what, at=at, how=error.how) from error
    digest = hashlib.sha256(content).digest()
    about = (f"{at}: {name}" if name else at, row.origin, digest, len(content))
    if path is not None:
        return ImageSource(*about, path=path), image
    return ImageSource(*about, spool=spool, start=spool.add(content)), image


def check_folder(limits: ImageLimits) -> None:
    """Refuse a folder of images that is not there, with `DataError`."""
    if limits.folder is not None and not limits.folder.is_dir():
        raise DataError(
            "there is no such folder", where=f"image_folder: {limits.folder}", how="correct it"
        )


def _content(picture: Picture, row: Row, limits: ImageLimits) -> tuple[bytes, Path | None, str]:
    """Return the bytes of an image, the file they are in, if any, and what to call it."""
    value = picture.value
    if isinstance(value, Mapping):
        inner = {name: value[name] for name in ("bytes", "path") if value.get(name) is not None}
        if not inner:
            raise Unusable("the image has neither bytes nor a path", "fill one of them")
        name = str(inner.get("path", ""))
        if "bytes" in inner:
            return _bytes(inner["bytes"], limits), None, name
        value = inner["path"]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _bytes(value, limits), None, ""
    if isinstance(value, str):
        return _named(value, row, limits, encoded=picture.encoded)
    if hasattr(value, "getexif") and hasattr(value, "convert"):
        return _saved(cast("Image", value), limits), None, ""
    what = f"an image is a {type(value).__name__}"
    raise Unusable(what, "give a path, bytes, a data URL, or an image of PIL")


def _bytes(value: object, limits: ImageLimits) -> bytes:
    if isinstance(value, str):
        return _from_base64(value, limits)
    if not isinstance(value, bytes | bytearray | memoryview):
        what = f"the bytes of an image are a {type(value).__name__}"
        raise Unusable(what, "give bytes, or text in base64")
    return bytes(value)


def _named(
    value: str, row: Row, limits: ImageLimits, *, encoded: bool
) -> tuple[bytes, Path | None, str]:
    if encoded:
        text = value.partition(",")[2] if value[:5] == "data:" else value
        return _from_base64(text, limits), None, ""
    if value[:5].lower() == "data:":
        head, comma, body = value.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise Unusable(
                "a data URL has no base64", "write data:image/png;base64, and the bytes in base64"
            )
        return _from_base64(body, limits), None, ""
    if value.lower().startswith(SCHEMES):
        if not limits.urls:
            what = f"the image {value[:200]!r} is a URL, and images are fetched only if asked for"
            raise Unusable(what, "set image_urls: true, or give the file")
        return _fetched(value, limits), None, value[:200]
    path = _inside(value, limits.folder_of(row.source))
    return _file_content(path, limits.max_bytes + 1), path, value


def _from_base64(text: str, limits: ImageLimits) -> bytes:
    if len(text) > limits.max_bytes * 4 // 3 + 4:
        raise Unusable(
            f"the image has more than {limits.max_bytes:,} bytes",
            "make it smaller, remove the row, or raise max_image_bytes",
        )
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unusable(f"the image is no base64: {error}", "write its bytes in base64") from error


def _inside(value: str, folder: Path) -> Path:
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
        raise Unusable(f"the image {value[:200]!r} cannot be read: {error}") from error
    if not real.is_relative_to(root):
        what = f"the image {value[:200]!r} lies outside {root}"
        raise Unusable(what, CHOOSE_FOLDER)
    return real


def _file_content(path: Path, most: int) -> bytes:
    try:
        with open_regular(path) as file:
            return read_at_most(file, most)
    except LemaError as error:
        raise Unusable(f"the image {str(path)!r} cannot be read: {error.what}") from error
    except (OSError, ValueError) as error:
        how = "correct the path, which is relative to image_folder or to the folder of the data"
        raise Unusable(f"the image {str(path)!r} cannot be read: {error}", how) from error


def _fetched(url: str, limits: ImageLimits) -> bytes:
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
            return bytes(answer.read(limits.max_bytes + 1))
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise Unusable(f"{url[:200]!r} cannot be fetched: {error}", "check the URL") from error


def _saved(image: Image, limits: ImageLimits) -> bytes:
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
