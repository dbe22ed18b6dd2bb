"""Images, videos and sounds out of the bytes of files, as the model's processor takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from lema.data.chat.pictures import Kind
from lema.data.images.decode import decoded
from lema.data.images.limits import ImageLimits
from lema.data.images.sounds import Sound, decoded_sound
from lema.data.images.videos import Facts, Video, decoded_video, video_of_frames

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Decoded", "Decoder", "Senses"]

Decoded: TypeAlias = "Image | Video | Sound"


class Senses(Protocol):
    """What of a model's processor decides how files are decoded."""

    @property
    def sampling_rate(self) -> int:
        """Samples a second that the model hears."""

    def frame_numbers(self, facts: Facts, fps: float | None) -> Sequence[int]:
        """Return the numbers of the frames of a video that the model is shown: `fps` of them for a
        second, or, if it is None, as many as the processor's files say."""


@dataclass(frozen=True)
class Decoder:
    """Decodes what rows name.

    Attributes:
        limits: what may be read.
        senses: returns the model's processor, which is not opened for images.
    """

    limits: ImageLimits
    senses: Callable[[], Senses]

    def decode(self, kind: Kind, contents: Sequence[bytes], *, frames: bool = False) -> Decoded:
        """Return an image, a video or a sound.

        Args:
            kind: what it is.
            contents: the bytes of its file; with `frames`, those of each frame's file.
            frames: whether it is a video of images, however many.

        Raises:
            Unusable: it cannot be decoded, or is more than the limits allow.
            ConfigError: a library is not installed without which there is none.
        """
        limits = self.limits
        if frames:
            images = [decoded(content, limits.max_pixels) for content in contents]
            return video_of_frames(images, limits)
        (content,) = contents
        if kind == "image":
            return decoded(content, limits.max_pixels)
        if kind == "video":
            return decoded_video(content, limits, self._frame_numbers)
        return decoded_sound(content, self.senses().sampling_rate, limits.max_seconds)

    def _frame_numbers(self, facts: Facts) -> Sequence[int]:
        return self.senses().frame_numbers(facts, self.limits.video_fps)

    def extent(self, medium: Decoded) -> tuple[float, ...]:
        """Return how large something is that was decoded: width and height of an image, and of a
        video the number of frames as well; the seconds of a sound."""
        if isinstance(medium, Video):
            count, height, width = medium.frames.shape[:3]
            return (width, height, count)
        if not isinstance(medium, np.ndarray):
            return medium.size
        return (len(medium) / self.senses().sampling_rate,)
