"""Videos in files: frames are those of `transformers.video_utils.load_video`, a row trains on what
the processor makes of them, and what is damaged or too large is refused by row.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from imageprocessors import words
from mediareading import reading
from PIL import Image
from transformers.video_utils import load_video
from videoprocessors import publish_seeing

from lema.data.batches import Batches
from lema.data.media.decode import Unusable
from lema.data.media.limits import MediaLimits
from lema.data.media.videos import Facts, Video, decoded_video
from lema.errors import DataError
from lema.storage.modelfiles import load_processor

FILMS = [
    ("mpeg4", "mp4"),
    ("libx264", "mp4"),
    ("mpeg4", "avi"),
    ("libvpx", "webm"),
    ("mjpeg", "mkv"),
]
PART = {"type": "video"}


def film(codec: str, container: str, count: int = 24, rate: int = 8, side: int = 64) -> bytes:
    """Return a film in which a square moves."""
    file = io.BytesIO()
    kind = "matroska" if container == "mkv" else container
    with av.open(file, "w", format=kind) as output:
        stream: Any = output.add_stream(codec, rate=rate)
        stream.width = stream.height = side
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number in range(count):
            pixels = np.full((side, side, 3), 40, np.uint8)
            pixels[number % side : number % side + 9, 5:14] = (200, 10 * number % 256, 90)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


def every(facts: Facts) -> Sequence[int]:
    return range(facts.num_frames)


@pytest.mark.parametrize(("codec", "container"), FILMS)
def test_frames_are_those_that_transformers_loads(
    codec: str, container: str, tmp_path: Path
) -> None:
    path = tmp_path / f"film.{container}"
    path.write_bytes(film(codec, container))

    def chosen(facts: Facts) -> Sequence[int]:
        return [0, 7, facts.num_frames - 1]

    video = decoded_video(path.read_bytes(), MediaLimits(), chosen)
    assert (video.facts.num_frames, video.facts.rate) == (24, 8.0)
    numbers = [0, 7, 23]
    frames, metadata = load_video(str(path), backend="pyav", sample_indices_fn=lambda **_: numbers)
    assert np.array_equal(video.frames, frames)
    theirs = {**metadata}
    if theirs["total_num_frames"]:  # which some containers do not say in their header
        mine = video.metadata
        assert {name: theirs[name] for name in mine} == mine


def test_an_animated_image_is_a_video() -> None:
    draw = np.random.default_rng(1)
    pictures = [Image.fromarray(draw.integers(0, 256, (8, 12, 3), np.uint8)) for _ in range(5)]
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        file = io.BytesIO()
        rest = pictures[1:]
        pictures[0].save(file, kind, save_all=True, append_images=rest, duration=250, **options)
        video = decoded_video(file.getvalue(), MediaLimits(), every)
        assert np.array_equal(video.frames, np.stack([np.asarray(one) for one in pictures]))
    file = io.BytesIO()
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=250)
    video = decoded_video(file.getvalue(), MediaLimits(), lambda _: [1, 3])
    assert (video.facts.num_frames, video.facts.rate, video.numbers) == (5, 4.0, (1, 3))


def read(model: Path, folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Any:
    return reading(model, folder)(rows, **changes)


def row_of(name: str, number: int = 0) -> dict[str, Any]:
    asked = [PART, {"type": "text", "text": words(number, 3)}]
    answer = {"role": "assistant", "content": words(number + 1, 4)}
    return {"messages": [{"role": "user", "content": asked}, answer], "videos": [name]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_seeing("qwen3_vl", tmp_path_factory.mktemp("models") / "qwen3_vl")


@pytest.mark.parametrize("fps", [None, 1.0])
def test_a_film_is_given_to_the_processor_as_transformers_gives_it(
    model: Path, tmp_path: Path, fps: float | None
) -> None:
    (tmp_path / "film.mp4").write_bytes(film("mpeg4", "mp4"))
    data = read(model, tmp_path, [row_of("film.mp4")], video_fps=fps)
    (batch,) = Batches(data, 1).micro_batches([0])
    mine = batch["images"].inputs(batch["input_ids"])
    processor: Any = load_processor(model, trusted=False)
    part = processor.video_processor
    chosen = {"fps": fps} if fps else {}
    frames, metadata = load_video(
        str(tmp_path / "film.mp4"),
        backend="pyav",
        sample_indices_fn=lambda metadata: part.sample_frames(metadata=metadata, **chosen),
    )
    (described,) = data.images(0).described()[0]
    assert described["size"] == [64, 64, len(frames)]
    messages = [
        {"role": "user", "content": row_of("")["messages"][0]["content"]},
        {"role": "assistant", "content": [{"type": "text", "text": words(1, 4)}]},
    ]
    text = processor.apply_chat_template(messages, tokenize=False)
    theirs = processor(
        text=[text],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        add_special_tokens=False,
        return_tensors="pt",
    )
    assert torch.equal(theirs["input_ids"], batch["input_ids"])
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def _hostile() -> dict[str, tuple[bytes, str]]:
    plain = film("mpeg4", "mp4")
    webm = film("libvpx", "webm")
    playlist = b"ffconcat version 1.0\nfile /etc/hostname\n"
    sound = io.BytesIO()
    with av.open(sound, "w", format="mp4") as output:
        stream: Any = output.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 16_000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return {
        "empty": (b"", "empty"),
        "cut off": (webm[: len(webm) * 2 // 3], ""),
        "cut off at the end": (plain[:-300], ""),
        "a header alone": (plain[:40], ""),
        "a beginning": (b"\0\0\0\x18ftypmp42" + bytes(40), ""),
        "text": (b"no video at all\n" * 9, "no video of a format"),
        "a list of files": (playlist, "no video of a format"),
        "a playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "no video of a format"),
        "a page": (b"<html><video src='x.mp4'></html>", "no video of a format"),
        "a program": (b"\x7fELF" + bytes(64), "no video of a format"),
        "zeros": (bytes(4096), "no video of a format"),
        "a sound": (sound.getvalue(), "has no video"),
        "a picture of another format": (b"BM" + bytes(60), "no video of a format"),
    }


@pytest.mark.parametrize("name", _hostile())
def test_a_hostile_video_is_refused_by_row_and_file(name: str, model: Path, tmp_path: Path) -> None:
    content, reason = _hostile()[name]
    (tmp_path / "bad.mp4").write_bytes(content)
    (tmp_path / "good.mp4").write_bytes(film("mpeg4", "mp4"))
    with pytest.raises(DataError) as refused:
        read(model, tmp_path, [row_of("good.mp4"), row_of("bad.mp4")], video_fps=1.0)
    assert reason in str(refused.value)
    assert refused.value.where == f"{tmp_path / 'rows.jsonl'}:2, videos, video 1"
    assert refused.value.how


def test_flipped_bits_are_decoded_as_pyav_does_or_refused() -> None:
    draw = np.random.default_rng(5)
    for codec, container in FILMS:
        content = film(codec, container)
        for _ in range(8):
            changed = bytearray(content)
            for place in draw.integers(0, len(content), 5):
                changed[place] ^= 1 << int(draw.integers(0, 8))
            try:
                video = decoded_video(bytes(changed), MediaLimits(), every)
            except Unusable:
                continue
            assert isinstance(video, Video)
            assert video.frames.shape[1:] == (video.facts.height, video.facts.width, 3)


def test_limits_are_settings(model: Path, tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_bytes(film("mpeg4", "mp4"))
    rows = [row_of("film.mp4")]
    for changes, reason in (
        ({"max_media_bytes": "1kB"}, "raise max_media_bytes"),
        ({"max_media_seconds": 2.9}, "raise max_media_seconds"),
        ({"max_video_frames": 5}, "raise max_video_frames"),
        ({"max_image_pixels": 4000}, "raise max_image_pixels"),
        ({"max_image_pixels": 5000}, "pixels together"),
    ):
        with pytest.raises(DataError, match=reason):
            read(model, tmp_path, rows, **changes)
    frames = [f"{number}.png" for number in range(3)]
    for number, name in enumerate(frames):
        Image.new("RGB", (16, 16 + 4 * number)).save(tmp_path / name)
    for value, reason in (
        (frames, "sizes that differ"),
        ([], "no frames"),
        (["0.png"] * 9, "raise max_video_frames"),
        (["0.png", "nothing.png"], "cannot be read"),
    ):
        with pytest.raises(DataError, match=reason):
            read(model, tmp_path, [row_of(value)], max_video_frames=8)  # type: ignore[arg-type]
