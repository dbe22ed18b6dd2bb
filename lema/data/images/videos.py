"""The frames of a video out of its bytes, which may be a stranger's: its size, and how long it is,
are looked at before it is decoded, and only the frames are kept that the model is shown.

Animated images are read by Pillow, and films by PyAV, as `transformers.video_utils.load_video` does
with `backend="pyav"`. A film is read from memory, as the container that its first bytes say, so it
can name no other file and no address.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lema.data.images.decode import Unusable, larger, opened
from lema.data.images.limits import IMAGES_PER_ROW, ImageLimits
from lema.errors import installing, message_of

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Facts", "Video", "decoded_video", "video_of_frames"]

ANIMATED = ("GIF", "PNG", "WEBP")
CODECS = frozenset(
    {
        *("av1", "h264", "hevc", "libdav1d", "mjpeg", "mpeg1video", "mpeg2video", "mpeg4"),
        *("msmpeg4v3", "theora", "vp8", "vp9", "libvpx", "libvpx-vp9"),
    }
)
MOST_RATE = 120  # frames a second: with the longest duration it bounds what is read of a film
TOLERANCE = 0.05  # by which what lasts longest of a film may end before its header says
HOW = "remove the row, or save the video again"


@dataclass(frozen=True)
class Facts:
    """What a file says of its video.

    Attributes:
        num_frames: how many there are.
        rate: frames a second; None: it does not say.
        width: of each, in pixels.
        height: of each.
    """

    num_frames: int
    rate: float | None
    width: int
    height: int


@dataclass(frozen=True)
class Video:
    """What a model is shown of a video.

    Attributes:
        frames: `[frames, height, width, 3]`, from 0 to 255.
        facts: what its file says.
        numbers: of each frame, its place in the file.
    """

    frames: npt.NDArray[np.uint8]
    facts: Facts
    numbers: tuple[int, ...]

    @property
    def metadata(self) -> dict[str, Any]:
        """What processors are told, by the names of `transformers.video_utils.VideoMetadata`."""
        facts = self.facts
        rate = facts.rate
        return {
            "total_num_frames": facts.num_frames,
            "fps": rate,
            "duration": None if rate is None else facts.num_frames / rate,
            "frames_indices": list(self.numbers),
            "height": facts.height,
            "width": facts.width,
        }


Chosen = Callable[[Facts], Sequence[int]]
"""Returns the numbers of the frames that a model is shown of a video."""


def video_of_frames(images: Sequence[Image], limits: ImageLimits) -> Video:
    """Return images as a video, all of which are shown. `Unusable`: there are none or too many, or
    their sizes differ."""
    if not images:
        raise Unusable("the video has no frames", HOW)
    _check_shown(len(images), *images[0].size, limits)
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        raise Unusable(f"the frames of the video have sizes that differ: {sorted(sizes)}", HOW)
    width, height = images[0].size
    frames = np.stack([np.asarray(image) for image in images])
    facts = Facts(len(images), None, width, height)
    return Video(frames, facts, tuple(range(len(images))))


def decoded_video(content: bytes, limits: ImageLimits, chosen: Chosen) -> Video:
    """Return what a model is shown of a video.

    Args:
        content: the bytes of the file.
        limits: what may be read.
        chosen: says which frames.

    Raises:
        Unusable: it has no frames or too many, is damaged or cut off, is of another format, or
            needs a library that is not installed.
    """
    if not content:
        raise Unusable("the file is empty", HOW)
    read = _film if (container := _container(content)) else _animation
    try:
        return read(content, container, limits, chosen)
    except Unusable:
        raise
    # Any error: decoders raise many kinds for damaged files, and the message is passed on.
    except Exception as error:
        raise Unusable(f"the video cannot be decoded: {message_of(error)}", HOW) from error


def _container(content: bytes) -> str | None:
    """Return FFmpeg's name of the container that a file's first bytes say; None: they say none."""
    if content[4:8] == b"ftyp":
        return "mov"
    if content[:4] == bytes.fromhex("1a45dfa3"):
        return "matroska"
    if content[:4] == b"RIFF" and content[8:12] == b"AVI ":
        return "avi"
    return None


def _animation(content: bytes, _: str | None, limits: ImageLimits, chosen: Chosen) -> Video:
    """Read an animated image, which may have one frame."""
    with opened(content, limits.max_pixels, ANIMATED, "video") as image:
        duration = image.info.get("duration") or 0  # of the first frame, in milliseconds
        rate = 1000 / duration if duration else None
        facts = Facts(getattr(image, "n_frames", 1), rate, *image.size)
        numbers = _numbers(facts, limits, chosen)
        frames = []
        for number in numbers:
            image.seek(number)
            frames.append(np.asarray(image.convert("RGB")))
    return Video(np.stack(frames), facts, numbers)


def _film(content: bytes, container: str | None, limits: ImageLimits, chosen: Chosen) -> Video:
    """Read a film with PyAV."""
    try:
        import av
    except ImportError as error:
        what = "videos are read by PyAV, which is not installed"
        raise Unusable(what, f"{installing('videos')}, or give a list of frames") from error
    with av.open(io.BytesIO(content), format=container, metadata_errors="ignore") as file:
        if not file.streams.video:
            raise Unusable("the file has no video", HOW)
        stream = file.streams.video[0]
        if stream.codec_context.name not in CODECS:
            raise Unusable(f"videos of the codec {stream.codec_context.name} are not read", HOW)
        rate = None if not stream.average_rate else float(stream.average_rate)
        count = stream.frames or _num_packets(content, container, rate)
        facts = Facts(count, rate, stream.width, stream.height)
        numbers = _numbers(facts, limits, chosen)
        shown = frozenset(numbers)
        frames = {}
        for number, frame in enumerate(file.decode(video=0)):
            if (frame.width, frame.height) != (facts.width, facts.height):
                raise Unusable("the size of the video's frames changes", HOW)
            if number in shown:
                frames[number] = frame.to_ndarray(format="rgb24")
            if number >= max(numbers):
                break
    if len(frames) < len(shown):
        what = f"the video is cut off: its header says {facts.num_frames:,} frames"
        raise Unusable(what, HOW)
    return Video(np.stack([frames[number] for number in numbers]), facts, numbers)


def _num_packets(content: bytes, container: str | None, rate: float | None) -> int:
    """Return how many frames a file has whose header does not say it. `Unusable`: its packets end
    before the time that its header says."""
    import av

    count = 0
    end = 0.0
    with av.open(io.BytesIO(content), format=container, metadata_errors="ignore") as file:
        for packet in file.demux():  # of sounds, too, which may be longer
            if packet.pts is not None and packet.time_base is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            count += packet.stream.type == "video" and packet.size > 0
        seconds = (file.duration or 0) / av.time_base
    if end < (1 - TOLERANCE) * seconds - 2 / (rate or MOST_RATE):
        raise Unusable(f"the video is cut off after {end:,.1f} of {seconds:,.1f} seconds", HOW)
    return count


def _numbers(facts: Facts, limits: ImageLimits, chosen: Chosen) -> tuple[int, ...]:
    """Return the numbers of the frames that are shown, after a look at the header."""
    if facts.num_frames < 1 or facts.width < 1 or facts.height < 1:
        raise Unusable("the video has no frames", HOW)
    seconds = facts.num_frames / min(facts.rate or MOST_RATE, MOST_RATE)
    if seconds > limits.max_seconds:
        what = f"the video has {facts.num_frames:,} frames in {seconds:,.0f} seconds"
        how = "make it shorter, remove the row, or raise max_media_seconds"
        raise Unusable(f"{what}, more than {limits.max_seconds:,}", how)
    if facts.width * facts.height > limits.max_pixels:
        what = f"the video has frames of {facts.width:,} x {facts.height:,} pixels"
        raise Unusable(f"{what}, more than {limits.max_pixels:,}", larger("max_image_pixels"))
    numbers = tuple(int(number) for number in chosen(facts))
    _check_shown(len(numbers), facts.width, facts.height, limits)
    if not numbers or min(numbers) < 0 or max(numbers) >= facts.num_frames:
        what = f"the model's processor chooses frames {numbers[:4]} of {facts.num_frames:,}"
        raise Unusable(what, "set video_fps, or give a list of frames")
    return numbers


def _check_shown(count: int, width: int, height: int, limits: ImageLimits) -> None:
    """Refuse more frames than a model may be shown."""
    if count > limits.max_frames:
        what = f"the model would be shown {count:,} frames, more than {limits.max_frames:,}"
        how = "set video_fps to a lower rate, cut the video, or raise max_video_frames"
        raise Unusable(what, how)
    if count * width * height > IMAGES_PER_ROW * limits.max_pixels:
        what = f"{count:,} frames of {width:,} x {height:,} pixels are more than "
        what += f"{IMAGES_PER_ROW * limits.max_pixels:,} pixels together"
        how = "set video_fps to a lower rate, make the video smaller, or raise max_image_pixels"
        raise Unusable(what, how)
