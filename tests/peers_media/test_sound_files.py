"""Sounds in files that soundfile reads, and of other rates than the model's: the numbers are those
of `transformers.audio_utils.load_audio`, and what is damaged is refused.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from transformers.audio_utils import load_audio

from lema.data.images.decode import Unusable
from lema.data.images.sounds import decoded_sound

RATE = 16_000
SECONDS = 60.0
FORMATS = [
    *(("WAV", "PCM_U8"), ("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "PCM_32")),
    *(("WAV", "FLOAT"), ("WAV", "DOUBLE"), ("WAVEX", "PCM_16"), ("WAV", "ULAW")),
    *(("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS")),
    *(("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16")),
]


def numbers(count: int, channels: int = 1) -> Any:
    times = np.arange(count) / 8000
    waves = [np.sin(times * 440 * (place + 1)) * 0.4 for place in range(channels)]
    return np.stack(waves, axis=1).astype(np.float32)


def file_of(kind: str, subtype: str, rate: int = RATE, channels: int = 1) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, numbers(2 * rate, channels), rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("kind", "subtype"), FORMATS)
def test_a_sound_has_the_numbers_that_transformers_loads(
    kind: str, subtype: str, channels: int, tmp_path: Path
) -> None:
    for rate in (RATE, 48_000, 8_000):
        path = tmp_path / f"{rate}.{kind.lower()}"
        path.write_bytes(file_of(kind, subtype, rate, channels))
        sound = decoded_sound(path.read_bytes(), RATE, SECONDS)
        expected = load_audio(str(path), sampling_rate=RATE, backend="soundfile")
        assert sound.dtype == np.float32
        assert np.array_equal(sound, expected), rate


@pytest.mark.parametrize(("kind", "subtype"), FORMATS)
def test_what_is_damaged_is_refused_or_read_as_soundfile_reads_it(kind: str, subtype: str) -> None:
    content = file_of(kind, subtype)
    cuts = [content[: len(content) * share // 100] for share in (0, 1, 10, 50, 95)]
    draw = np.random.default_rng(3)
    flipped = bytearray(content)
    for place in draw.integers(0, len(content), 6):
        flipped[place] ^= 1 << int(draw.integers(0, 8))
    refused = 0
    for one in [*cuts, bytes(flipped)]:
        try:
            sound = decoded_sound(one, RATE, SECONDS)
        except Unusable as error:
            assert error.what
            assert error.how
            refused += 1
            continue
        assert np.isfinite(sound).all()
        if one in cuts:  # the decoder of MP3 makes other numbers of the same damage each time
            expected, _ = soundfile.read(io.BytesIO(one), dtype="float32")
            assert np.array_equal(sound, expected)
    assert refused >= 2


def test_a_long_sound_is_refused_by_its_header() -> None:
    content = file_of("FLAC", "PCM_16")
    with pytest.raises(Unusable, match="2 seconds, more than 1"):
        decoded_sound(content, RATE, 1.0)
    changed = bytearray(content)  # the number of samples in the header, 36 bits
    changed[21] |= 0x0F
    changed[22:26] = b"\xff" * 4
    with pytest.raises(Unusable, match="seconds, more than"):
        decoded_sound(bytes(changed), RATE, SECONDS)
