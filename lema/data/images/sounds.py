"""A sound out of its bytes, which may be a stranger's: its length is looked at before it is
decoded.

WAV is read here, and needs no library. FLAC, Ogg, MP3 and AIFF are read by soundfile, and what has
another rate than the model is given one by soxr, as `transformers.audio_utils.load_audio` does with
`backend="soundfile"`: the numbers are the same.
"""

from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lema.data.images.decode import Unusable
from lema.errors import installing, message_of

__all__ = ["Sound", "decoded_sound", "wav_of"]

Sound: TypeAlias = npt.NDArray[np.float32]
"""A waveform of one channel, `[samples]`, from -1 to 1."""
Channels: TypeAlias = npt.NDArray[np.float32]  # [channels, samples]

# of libsndfile's, those that are published: by the first bytes of a file
STARTS = (b"fLaC", b"OggS", b"ID3", b"FORM")
FORMATS = ("FLAC", "OGG", "MP3", "MPEG", "AIFF", "WAV", "WAVEX")
MOST_RATE = 192_000  # samples a second
MOST_CHANNELS = 8
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # codes of WAV
OPEN_END = 0xFFFFFFFF  # the length of data that a program wrote before it knew it
HOW = "remove the row, or save the sound again"


@dataclass(frozen=True)
class _Wave:
    """The header of a WAV file, and its data."""

    code: int
    channels: int
    rate: int
    bits: int
    data: memoryview


def decoded_sound(content: bytes, rate: int, max_seconds: float) -> Sound:
    """Return a sound as a model hears it: channels are averaged, and the rate is the model's.

    Args:
        content: the bytes of the file.
        rate: samples a second that the model hears.
        max_seconds: of the sound, by its header.

    Raises:
        Unusable: it has no samples or too many, is damaged or cut off, has numbers that are not
            finite, is of another format, or needs soundfile or soxr, which is not installed.
    """
    if not content:
        raise Unusable("the file is empty", HOW)
    with np.errstate(all="ignore"):  # of numbers that are not finite, which are looked for here
        waveform, own_rate = _channels(content, max_seconds)
        mono: Sound = waveform.mean(axis=0) if len(waveform) > 1 else waveform[0]
    if not len(mono):
        raise Unusable("the sound has no samples", HOW)
    if not np.isfinite(mono).all():
        raise Unusable("the sound has numbers that are not finite", HOW)
    return np.ascontiguousarray(_resampled(mono, own_rate, rate), dtype=np.float32)


def wav_of(samples: Sound, rate: int) -> bytes:
    """Return the bytes of a WAV file that has a sound's numbers as they are."""
    data = np.ascontiguousarray(samples, dtype="<f4").tobytes()
    form = struct.pack("<HHIIHH", FLOAT, 1, rate, 4 * rate, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _channels(content: bytes, max_seconds: float) -> tuple[Channels, int]:
    """Return the channels of a file, and its rate."""
    wave = _wave(content) if content[:4] == b"RIFF" and content[8:12] == b"WAVE" else None
    if wave is not None:
        width = wave.channels * (wave.bits // 8)
        _check(len(wave.data) // width, wave.rate, wave.channels, max_seconds)
        if len(wave.data) % width:
            raise Unusable("the sound is cut off within a sample", HOW)
        return _numbers(wave).reshape(-1, wave.channels).T, wave.rate
    frame_sync = content[:1] == b"\xff" and len(content) > 1 and content[1] & 0xE0 == 0xE0
    if not (content.startswith((*STARTS, b"RIFF")) or frame_sync):
        what = "this is no sound of a format that is read (WAV, FLAC, Ogg, MP3, AIFF)"
        raise Unusable(what, HOW)
    order: Literal["little", "big"] = "big" if content[:4] == b"FORM" else "little"
    size = int.from_bytes(content[4:8], order)
    if content[:4] in (b"RIFF", b"FORM") and OPEN_END > size > len(content) - 8:
        raise Unusable("the sound is cut off", HOW)  # which libsndfile does not mind
    return _by_soundfile(content, max_seconds)


def _check(count: int, rate: int, channels: int, max_seconds: float) -> None:
    if not (1 <= rate <= MOST_RATE and 1 <= channels <= MOST_CHANNELS):
        raise Unusable(f"the sound has {channels:,} channels of {rate:,} samples a second", HOW)
    if count > max_seconds * rate:
        what = f"the sound has {count / rate:,.0f} seconds, more than {max_seconds:,}"
        raise Unusable(what, "make it shorter, remove the row, or raise max_media_seconds")


def _wave(content: bytes) -> _Wave | None:
    """Return what is in a WAV file; None: its numbers are not plain."""
    form: tuple[int, int, int, int] | None = None
    at = 12
    while at + 8 <= len(content):
        name = content[at : at + 4]
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        at += 8
        if name == b"fmt ":
            if size < 16 or at + size > len(content):
                raise Unusable("the header of the sound is damaged", HOW)
            code, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", content, at)
            if code == EXTENSIBLE and size >= 40:
                code = int.from_bytes(content[at + 24 : at + 26], "little")
            if bits not in {PCM: (8, 16, 24, 32), FLOAT: (32, 64)}.get(code, ()):
                return None
            if not channels or align != channels * (bits // 8):
                raise Unusable("the header of the sound is damaged", HOW)
            form = (code, channels, rate, bits)
        elif name == b"data":
            if form is None:
                raise Unusable("the header of the sound is damaged", HOW)
            if size == OPEN_END:
                size = len(content) - at
            if at + size > len(content):
                raise Unusable("the sound is cut off", HOW)
            return _Wave(*form, memoryview(content)[at : at + size])
        at += size + size % 2
    raise Unusable("the sound is cut off", HOW)


def _numbers(wave: _Wave) -> Sound:
    """Return the samples as libsndfile scales them."""
    if wave.code == FLOAT:
        return np.frombuffer(wave.data, dtype=f"<f{wave.bits // 8}").astype(np.float32)
    if wave.bits == 8:
        octets = np.frombuffer(wave.data, dtype=np.uint8)
        return (octets.astype(np.float32) - np.float32(128)) / np.float32(128)
    if wave.bits == 24:
        octets = np.frombuffer(wave.data, dtype=np.uint8).reshape(-1, 3)
        padded = np.zeros((len(octets), 4), dtype=np.uint8)
        padded[:, 1:] = octets
        return padded.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)
    values = np.frombuffer(wave.data, dtype=f"<i{wave.bits // 8}")
    return values.astype(np.float32) / np.float32(2 ** (wave.bits - 1))


def _by_soundfile(content: bytes, max_seconds: float) -> tuple[Channels, int]:
    try:
        import soundfile
    except ImportError as error:
        what = "sounds that are not plain WAV are read by soundfile, which is not installed"
        raise Unusable(what, f"{installing('audio')}, or save the sound as WAV") from error
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.format not in FORMATS:
                raise Unusable(f"sounds of the format {file.format} are not read", HOW)
            _check(file.frames, file.samplerate, file.channels, max_seconds)
            samples = file.read(dtype="float32", always_2d=True)
            if len(samples) < file.frames:
                raise Unusable("the sound is cut off", HOW)
            return samples.T, file.samplerate
    except Unusable:
        raise
    # Any error: the library raises several kinds for damaged files, and the message is passed on.
    except Exception as error:
        raise Unusable(f"the sound cannot be decoded: {message_of(error)}", HOW) from error


def _resampled(sound: Sound, own_rate: int, rate: int) -> Sound:
    if own_rate == rate:
        return sound
    try:
        import soxr
    except ImportError as error:
        what = f"the sound has {own_rate:,} samples a second, the model hears {rate:,}, and soxr, "
        what += "which resamples, is not installed"
        how = f"{installing('audio')}, or save the sound with {rate:,} samples a second"
        raise Unusable(what, how) from error
    count = math.ceil(len(sound) * rate / own_rate)
    resampled = soxr.resample(sound, own_rate, rate, quality="soxr_hq")
    padded: Sound = np.pad(resampled, (0, max(0, count - len(resampled))))[:count]
    return padded
