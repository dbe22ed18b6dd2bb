"""Tiny processors of models that hear, as they are published, and rows that they read: sounds of a
few hundredths of a second that fit the models of `soundrows`.
"""

from __future__ import annotations

import wave
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from imageprocessors import BEGIN, END, IMAGE, TEMPLATE, tokenizer, words
from soundrows import FRAMES, MELS, publish_with_sounds

__all__ = ["HEARING", "RATE", "publish_hearing", "samples", "sound_examples", "sound_rows"]
__all__ += ["write_sound"]

RATE = 16_000


def _features() -> Any:
    from transformers import WhisperFeatureExtractor

    # a second is as many frames as the tower has positions for
    return WhisperFeatureExtractor(
        feature_size=MELS, sampling_rate=RATE, hop_length=RATE // FRAMES, chunk_length=1
    )


def qwen2_audio(template: str = TEMPLATE) -> Any:
    from transformers import Qwen2AudioProcessor

    tokens = tokenizer(audio_token=IMAGE, audio_bos_token=BEGIN, audio_eos_token=END)
    template = template.replace("AUDIO", f"{BEGIN} {IMAGE} {END}")
    return Qwen2AudioProcessor(_features(), tokens, chat_template=template)


def glmasr(template: str = TEMPLATE) -> Any:
    from transformers import GlmAsrProcessor

    template = template.replace("AUDIO", IMAGE)
    return GlmAsrProcessor(_features(), tokenizer(), template, audio_token=IMAGE)


HEARING: Mapping[str, Callable[..., Any]] = {
    "qwen2_audio": qwen2_audio,
    "glmasr": glmasr,
}
"""Processors by the type of their model."""


def publish_hearing(model_type: str, directory: Path) -> Path:
    """Write a random model of a type and its processor, as its publisher would."""
    publish_with_sounds(model_type, directory)
    HEARING[model_type]().save_pretrained(directory)
    return directory


def samples(number: int, count: int | None = None) -> Any:
    """Return a sound as 16 bits; those of other numbers differ in it, and some in length."""
    count = count or 4000 + 3000 * (number % 4)
    draw = np.random.default_rng(number)
    return draw.integers(-20_000, 20_000, count, dtype=np.int16)


def write_sound(path: Path, values: Any, rate: int = RATE, channels: int = 1) -> str:
    """Write a WAV file; return its name."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(values.dtype.itemsize)
        file.setframerate(rate)
        file.writeframes(values.tobytes())
    return path.name


def _written(folder: Path, number: int, count: int) -> list[str]:
    return [
        write_sound(folder / f"{number}_{place}.wav", samples(3 * number + place))
        for place in range(count)
    ]


def sound_rows(
    folder: Path, count: int = 9, sounds: Sequence[int] = (1, 2, 0)
) -> list[dict[str, Any]]:
    """Return chats with so many sounds in turn, whose files are written to a folder."""
    rows = []
    for number in range(count):
        names = _written(folder, number, sounds[number % len(sounds)])
        asked: list[dict[str, Any]] = [{"type": "audio"}] * len(names)
        asked = [*asked, {"type": "text", "text": words(number, 3)}]
        answer = [{"type": "text", "text": words(number + 1, 5 + number % 4)}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "audios": names})
    return rows


def sound_examples(folder: Path, count: int = 4) -> list[dict[str, Any]]:
    """Return pairs of answers to prompts with sounds."""
    rows = []
    for number in range(count):
        names = _written(folder, number, 1 + number % 2)
        asked: list[dict[str, Any]] = [{"type": "audio"}] * len(names)
        asked = [*asked, {"type": "text", "text": words(number, 3)}]
        chosen, rejected = (
            [{"role": "assistant", "content": words(number + more, 4 + number % 3)}]
            for more in (1, 4)
        )
        row = {"prompt": [{"role": "user", "content": asked}], "audios": names}
        rows.append(row | {"chosen": chosen, "rejected": rejected})
    return rows
