"""What may be read of images that rows name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["IMAGES_PER_ROW", "ImageLimits"]

IMAGES_PER_ROW = 4  # of the largest size: a row may have more that are smaller


@dataclass(frozen=True)
class ImageLimits:
    """What may be read of images.

    Attributes:
        folder: below which images lie that are named by path; None: the folder of the data file.
        urls: whether images may be fetched.
        max_pixels: of an image, by its header.
        max_bytes: of an image's file.
        folders: of the data files, by what their rows name as their source.
    """

    folder: Path | None = None
    urls: bool = False
    max_pixels: int = 50_000_000
    max_bytes: int = 32 * 1024**2
    folders: Mapping[str, Path] = field(default_factory=dict)

    def folder_of(self, source: str) -> Path:
        """Return the folder below which the images of a source's rows lie."""
        return self.folder or self.folders.get(source) or Path()
