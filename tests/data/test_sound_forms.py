"""The forms of rows with sounds, what of them is trained on, and what is refused by row."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from imageprocessors import IMAGE_TOKEN
from mediareading import reading
from soundprocessors import RATE, publish_hearing, samples, write_sound

from lema.data import TokenDataset
from lema.data.media.rows import RowMedia
from lema.data.media.sounds import wav_of
from lema.errors import DataError

QUESTION = {"type": "text", "text": "w5 w6"}
ANSWER = {"role": "assistant", "content": "w7 w8 w9"}
PART = {"type": "audio"}
COUNT = 8000  # samples of the sound, for which the processor writes four tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_hearing("qwen2_audio", tmp_path_factory.mktemp("models") / "qwen2_audio")


def expected() -> Any:
    return samples(1, COUNT).astype(np.float32) / np.float32(2**15)


@pytest.fixture
def read(model: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return what reads rows as a run with these settings does; the folder has a sound."""
    write_sound(tmp_path / "one.wav", samples(1, COUNT))

    return reading(model, tmp_path)


def chat(*parts: Any, **columns: Any) -> dict[str, Any]:
    content = [*parts, QUESTION] if parts else "w5 w6"
    return {"messages": [{"role": "user", "content": content}, ANSWER], **columns}


def sounds_of(data: TokenDataset, index: int = 0) -> list[Any]:
    images = data.images(index)
    assert isinstance(images, RowMedia)
    (decoded,) = images.decoded()
    return decoded


def assert_heard(data: TokenDataset) -> None:
    row = data[0]
    # "w81 w91", the sound's tokens, "w92 w5 w6 </s> w82", the answer and its end
    assert row["input_ids"] == [81, 91, *[IMAGE_TOKEN] * 4, 92, 5, 6, 2, 82, 7, 8, 9, 2]
    assert row["labels"] == [-100] * 11 + [7, 8, 9, 2]
    (sound,) = sounds_of(data)
    assert np.array_equal(sound, expected())
    assert data.notes == ()


def content() -> bytes:
    return wav_of(expected(), RATE)


def encoded() -> str:
    return base64.b64encode(content()).decode()


NUMBERS = {"array": [float(value) for value in expected()], "sampling_rate": RATE}
OF_JSON = {
    "a column of paths": chat(PART, audios=["one.wav"]),
    "a column with one path": chat(PART, audio="one.wav"),
    "an object with a path": chat(PART, audio={"bytes": None, "path": "one.wav"}),
    "bytes in base64": chat(PART, audio=[{"bytes": encoded(), "path": None}]),
    "a data URL": chat(PART, audio=[f"data:audio/wav;base64,{encoded()}"]),
    "an array": chat(PART, audio=NUMBERS),
    "a part with a path": chat({**PART, "path": "one.wav"}),
    "a part with a sound": chat({**PART, "audio": "one.wav"}),
    "a part with a URL of a file": chat({**PART, "url": "one.wav"}),
    "a part with an array": chat({**PART, "audio": NUMBERS}),
    "a part with an array and its rate": chat(
        {**PART, "audio": NUMBERS["array"], "sampling_rate": RATE}
    ),
    "a part of Qwen": chat({**PART, "audio_url": "one.wav"}),
    "a part of OpenAI": chat(
        {"type": "input_audio", "input_audio": {"data": encoded(), "format": "wav"}}
    ),
    "nulls of a table": chat({**PART, "text": None, "audio": None}, audios=["one.wav"]),
    "no part": chat(audios=["one.wav"]),
    "a word for the sound": {
        "messages": [{"role": "user", "content": "<audio>w5 w6"}, ANSWER],
        "audios": ["one.wav"],
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "<audio>w5 w6"},
            {"from": "gpt", "value": "w7 w8 w9"},
        ],
        "audios": ["one.wav"],
    },
    "prompt and completion": {
        "prompt": [{"role": "user", "content": [PART, QUESTION]}],
        "completion": [ANSWER],
        "audios": ["one.wav"],
    },
}


@pytest.mark.parametrize("row", OF_JSON.values(), ids=OF_JSON.keys())
def test_a_sound_is_read_from_each_form(read: Callable[..., Any], row: Any) -> None:
    assert_heard(read([row]))


def test_sounds_are_read_from_memory_and_from_columns(
    read: Callable[..., Any], tmp_path: Path
) -> None:
    both = {"array": np.stack([expected(), expected()]), "sampling_rate": RATE}
    for value in ({**NUMBERS, "array": expected()}, both, content()):
        assert_heard(read(iter([chat(PART, audio=[value])])))
    file = tmp_path / "rows.parquet"
    kinds = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table(
        {
            "messages": [_as_parts(chat(PART)["messages"])],
            "audio": pyarrow.array([{"bytes": content(), "path": None}], kinds),
        }
    )
    pyarrow.parquet.write_table(table, file)
    assert_heard(read(str(file)))


def _as_parts(messages: Any) -> Any:
    """Return messages with contents of one kind, as columns have them."""
    return [
        message
        if isinstance(message["content"], list)
        else {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def test_a_column_of_sounds_may_have_another_name_or_be_left_unread(
    read: Callable[..., Any],
) -> None:
    row = {**chat(PART), "clip": "one.wav"}
    assert_heard(read([row], columns={"audio": "clip"}))
    row = {**chat(), "audio": "of another kind"}
    data = read([row], columns={"audio": "NONE"})
    assert not data.has_images


def _wav(code: int, bits: int, data: bytes, channels: int = 1, rate: int = RATE) -> bytes:
    align = channels * bits // 8
    form = struct.pack("<HHIIHH", code, channels, rate, rate * align, align, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    body += b"LIST" + struct.pack("<I", 3) + b"abc\0"
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_each_width_of_wav_is_scaled_as_libsndfile_does(
    read: Callable[..., Any], tmp_path: Path
) -> None:
    whole = np.array([0, 1, -1, 2**31 - 1, -(2**31), 123_456_789] * 700, dtype="<i4")
    files = {
        "8": (_wav(1, 8, ((whole >> 24) + 128).astype("u1").tobytes()), (whole >> 24) / 2**7),
        "16": (_wav(1, 16, (whole >> 16).astype("<i2").tobytes()), (whole >> 16) / 2**15),
        "24": (
            _wav(1, 24, whole.view("u1").reshape(-1, 4)[:, 1:].tobytes()),
            (whole >> 8) / 2**23,
        ),
        "32": (_wav(1, 32, whole.tobytes()), whole.astype(np.float32) / 2**31),
        "float": (_wav(3, 32, (whole / 2**31).astype("<f4").tobytes()), whole / 2**31),
        "double": (_wav(3, 64, (whole / 2**31).astype("<f8").tobytes()), whole / 2**31),
        "stereo": (
            _wav(1, 16, np.repeat(whole >> 16, 2).astype("<i2").tobytes(), channels=2),
            (whole >> 16) / 2**15,
        ),
    }
    for name, (wav, numbers) in files.items():
        (tmp_path / f"{name}.wav").write_bytes(wav)
        (sound,) = sounds_of(read([chat(PART, audio=f"{name}.wav")]))
        assert np.array_equal(sound, numbers.astype(np.float32)), name


def _hostile() -> dict[str, tuple[bytes, str]]:
    plain = content()
    short = _wav(1, 16, samples(1, 400).tobytes())
    nan = expected()
    nan[5] = np.nan
    infinite = expected()
    infinite[5] = np.inf
    huge = bytearray(short)
    huge[short.index(b"data") + 4 : short.index(b"data") + 8] = struct.pack("<I", 0x7FFFFFFF)
    no_align = bytearray(short)
    no_align[32:34] = b"\0\0"
    return {
        "empty": (b"", "empty"),
        "cut off": (plain[: len(plain) // 2], "cut off"),
        "cut off in the header": (plain[:30], "damaged"),
        "cut off before the data": (plain[:40], "cut off"),
        "a header alone": (plain[:12], "cut off"),
        "no samples": (_wav(1, 16, b""), "no samples"),
        "half a sample": (_wav(1, 16, b"abc"), "within a sample"),
        "not a number": (wav_of(nan, RATE), "not finite"),
        "infinite": (wav_of(infinite, RATE), "not finite"),
        "too large for a number": (_wav(3, 64, np.full(9, 1e300).tobytes()), "not finite"),
        "a header of two gigabytes": (bytes(huge), "cut off"),
        "no width": (bytes(no_align), "damaged"),
        "no channels": (_wav(1, 16, b"ab", channels=0), "damaged"),
        "many channels": (_wav(1, 16, bytes(2000), channels=1000), "1,000 channels"),
        "no rate": (_wav(1, 16, b"abcd", rate=0), "of 0 samples a second"),
        "a rate without end": (_wav(1, 16, b"abcd", rate=2**30), "samples a second"),
        "a long sound": (_wav(1, 8, bytes(2_000_000), rate=1000), "2,000 seconds"),
        "data before the form": (b"RIFF\0\0\0\0WAVEdata" + bytes(40), "damaged"),
        "text": (b"no sound at all\n" * 9, "no sound of a format"),
        "a page": (b"<html><audio src='x.wav'></html>", "no sound of a format"),
        "zeros": (bytes(4096), "no sound of a format"),
        "a program": (b"\x7fELF" + bytes(64), "no sound of a format"),
        "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(64), "no sound of a format"),
        "a playlist": (b"#EXTM3U\nfile:///etc/hostname\n", "no sound of a format"),
    }


@pytest.mark.parametrize("name", _hostile())
def test_a_hostile_sound_is_refused_by_row_and_file(
    read: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    wav, reason = _hostile()[name]
    (tmp_path / "bad.wav").write_bytes(wav)
    with pytest.raises(DataError) as refused:
        read([chat(PART, audio="one.wav"), chat(PART, audio="bad.wav")])
    assert reason in str(refused.value)
    assert refused.value.where == f"{tmp_path / 'rows.jsonl'}:2, audio, audio 1"
    assert refused.value.how


REFUSED: dict[str, tuple[Any, str]] = {
    "no such file": (chat(PART, audio="nothing.wav"), "cannot be read"),
    "a link out of the folder": (chat(PART, audio="link.wav"), "lies outside"),
    "a pipe": (chat(PART, audio="pipe.wav"), "cannot be read"),
    "a folder": (chat(PART, audio="folder.wav"), "cannot be read"),
    "a URL": (chat(PART, audio="https://example.com/a.wav"), "set image_urls"),
    "an array without a rate": (chat(PART, audio={"array": [0.1]}), "sampling rate of None"),
    "an array of words": (
        chat(PART, audio={"array": ["a"], "sampling_rate": RATE}),
        "other than numbers",
    ),
    "an array of arrays": (
        chat(PART, audio={"array": [[[0.1]]], "sampling_rate": RATE}),
        "the shape",
    ),
    "an array without end": (
        chat(PART, audio={"array": [0.0] * 3601, "sampling_rate": 1}),
        "3,601 seconds",
    ),
    "a part too many": (chat(PART, PART, audio="one.wav"), "1 audios, and its messages have 2"),
    "a sound too many": (chat(PART, audios=["one.wav"] * 2), "2 audios, and its messages have 1"),
    "no column": (chat(PART), "no column 'audios'"),
    "its token without a sound": (chat({"type": "text", "text": "<image>"}), "and no image"),
    "a sound in an answer": (
        {"messages": [{"role": "user", "content": "w5"}, {**ANSWER, "content": [PART]}]},
        "an answer holds audio",
    ),
    "an image": (chat({"type": "image"}, images=["one.png"]), "takes no images"),
    "a video": (chat({"type": "video"}, videos=["one.png"]), "takes no videos"),
    "another rate": (chat(PART, audio="slow.wav"), "8,000 samples a second"),
    "a sound that is too short": (
        chat(PART, audio={"array": [0.1] * 9, "sampling_rate": RATE}),
        "no token for a sound",
    ),
    "text with a sound": ({"text": "w5 w6", "audio": "one.wav"}, "only chats"),
}


@pytest.mark.parametrize(("row", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_is_refused_by_row(
    read: Callable[..., Any], tmp_path: Path, row: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import sys

    from imageprocessors import picture

    monkeypatch.setitem(sys.modules, "soxr", None)  # as if it were not installed
    picture(1).save(tmp_path / "one.png")
    (tmp_path / "link.wav").symlink_to("/etc/hostname")
    (tmp_path / "folder.wav").mkdir()
    os.mkfifo(tmp_path / "pipe.wav")
    write_sound(tmp_path / "slow.wav", samples(1), RATE // 2)
    good = chat(PART, audio="one.wav") if "messages" in row else {"text": "w5 w6"}
    with pytest.raises(DataError) as refused:
        read([good, row])
    assert reason in str(refused.value)
    assert refused.value.where.startswith(f"{tmp_path / 'rows.jsonl'}:2")
    assert refused.value.how


def test_limits_are_settings(read: Callable[..., Any]) -> None:
    rows = [chat(PART, audio="one.wav")]
    with pytest.raises(DataError, match="raise max_media_bytes"):
        read(rows, max_media_bytes="1kB")
    with pytest.raises(DataError, match="raise max_media_seconds"):
        read(rows, max_media_seconds=0.4)
    many = [chat(*[PART] * 5, audios=["one.wav"] * 5)]
    assert read(many, max_media_seconds=0.7).counts.rows == 1
    with pytest.raises(DataError, match="sounds of the row have"):
        read(many, max_media_seconds=0.55)


def test_a_model_that_reads_text_alone_refuses_sounds(read: Callable[..., Any]) -> None:
    for row in (chat({**PART, "path": "one.wav"}), chat(audio="one.wav")):
        with pytest.raises(DataError, match="set modalities: all"):
            read([row], modalities="text")
