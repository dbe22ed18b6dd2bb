"""Where the bytes of an image, a video or a sound are: in a file, or in a row, from where they go
to a file without a name.

So of the images of a data set nothing stays in memory, and each can be read again when a batch
needs it.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lema.data.chat.pictures import Kind, Picture
from lema.data.files import Row
from lema.data.images.contents import check_size, content_of, file_content, frames_of
from lema.data.images.decode import Unusable
from lema.data.images.decoder import Decoded, Decoder
from lema.data.images.limits import ImageLimits
from lema.errors import DataError

__all__ = ["ImageSource", "Spool", "check_folder", "source_of"]


class Spool:
    """A file without a name that keeps the bytes of what rows hold; it ends with this object.

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
class Stored:
    """The bytes of one file.

    Attributes:
        digest: SHA-256 of them.
        num_bytes: how many they are.
        path: their file; None: they are in `spool`.
        spool: keeps them.
        start: where they begin there.
    """

    digest: bytes
    num_bytes: int
    path: Path | None = None
    spool: Spool | None = None
    start: int = 0

    def read(self) -> bytes:
        """Return the bytes. `Unusable`: they cannot be read, or have changed."""
        if self.path is None:
            assert self.spool is not None, "bytes are in a file or in a spool"
            content = self.spool.read(self.start, self.num_bytes)
        else:
            content = file_content(self.path, self.num_bytes + 1)
        if hashlib.sha256(content).digest() != self.digest:
            raise Unusable("the file has changed since its row was read", "start the run anew")
        return content


@dataclass(frozen=True)
class ImageSource:
    """One image, video or sound of a row.

    Attributes:
        name: what messages call it.
        origin: the file and line of its row.
        kind: what it is.
        files: its bytes; of a video of frames, those of each frame.
        frames: whether it is such a video.
    """

    name: str
    origin: str
    kind: Kind
    files: tuple[Stored, ...]
    frames: bool = False

    @property
    def digest(self) -> bytes:
        """What tells it from others."""
        if not self.frames:
            return self.files[0].digest
        return hashlib.sha256(b"".join(file.digest for file in self.files)).digest()

    def load(self, decoder: Decoder) -> Decoded:
        """Read and decode it. `DataError`: it cannot be, or has changed since the row was read."""
        try:
            contents = [file.read() for file in self.files]
            return decoder.decode(self.kind, contents, frames=self.frames)
        except Unusable as error:
            where = f"{self.origin}, {self.name}"
            raise DataError(error.what, where=where, how=error.how) from error


def source_of(
    picture: Picture, row: Row, decoder: Decoder, spool: Spool
) -> tuple[ImageSource, Decoded]:
    """Return where an image, a video or a sound of a row is, and it decoded.

    Args:
        picture: it as the row names it.
        row: the row.
        decoder: decodes it, and knows what may be read.
        spool: keeps the bytes that are in the row, or that were fetched.

    Raises:
        DataError: there is no such file, it may not be read, or it cannot be decoded; names row
            and image.
    """
    at = picture.at
    frames = frames_of(picture)
    try:
        if frames is not None and len(frames) > decoder.limits.max_frames:
            what = f"the video has {len(frames):,} frames, more than {decoder.limits.max_frames:,}"
            raise Unusable(what, "give fewer, remove the row, or raise max_video_frames")
        stored = []
        contents = []
        names = []
        for part in [picture] if frames is None else frames:
            content, path, name = content_of(part, row, decoder.limits)
            check_size(part.kind, len(content), decoder.limits)
            stored.append(_stored(content, path, spool))
            contents.append(content)
            names.append(name)
        medium = decoder.decode(picture.kind, contents, frames=frames is not None)
    except Unusable as error:
        raise row.broken(error.what, at=at, how=error.how) from error
    shown = f"{len(names)} frames" if frames is not None else names[0]
    about = (f"{at}: {shown}" if shown else at, row.origin, picture.kind, tuple(stored))
    return ImageSource(*about, frames=frames is not None), medium


def _stored(content: bytes, path: Path | None, spool: Spool) -> Stored:
    digest = hashlib.sha256(content).digest()
    if path is not None:
        return Stored(digest, len(content), path=path)
    return Stored(digest, len(content), spool=spool, start=spool.add(content))


def check_folder(limits: ImageLimits) -> None:
    """Refuse a folder of images that is not there, with `DataError`."""
    if limits.folder is not None and not limits.folder.is_dir():
        raise DataError(
            "there is no such folder", where=f"image_folder: {limits.folder}", how="correct it"
        )
