"""What may be read of images, videos and sounds that rows name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lema.data.chat.pictures import Kind

__all__ = ["IMAGES_PER_ROW", "MediaLimits"]

IMAGES_PER_ROW = 4  # of the largest size: a row may have more that are smaller


@dataclass(frozen=True)
class MediaLimits:
    """What may be read of images, videos and sounds.

    Attributes:
        folder: below which images lie that are named by path; None: the folder of the data file.
        urls: whether images may be fetched.
        max_pixels: of an image, by its header.
        max_bytes: of an image's file.
        max_media_bytes: of the file of a video or a sound.
        max_seconds: of a video or a sound.
        max_frames: of a video that a model is shown.
        video_fps: frames of a second of a video that a model is shown; None: as its processor says.
        folders: of the data files, by what their rows name as their source.
    """

    folder: Path | None = None
    urls: bool = False
    max_pixels: int = 50_000_000
    max_bytes: int = 32 * 1024**2
    max_media_bytes: int = 512 * 1024**2
    max_seconds: float = 1800
    max_frames: int = 768
    video_fps: float | None = None
    folders: Mapping[str, Path] = field(default_factory=dict)

    def folder_of(self, source: str) -> Path:
        """Return the folder below which the images of a source's rows lie."""
        return self.folder or self.folders.get(source) or Path()

    def most_bytes(self, kind: Kind) -> int:
        """Return how many bytes a file of a kind may have."""
        return self.max_bytes if kind == "image" else self.max_media_bytes
