"""The forms of rows with images, what of them is trained on, and what is refused by row."""

from __future__ import annotations

import base64
import io
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from imageprocessors import picture, publish_with_processor
from mediareading import reading
from transformers import ProcessorMixin

from lema import LemaConfig
from lema.data import TokenDataset
from lema.data.media.processor import WRITES
from lema.data.media.rows import RowMedia
from lema.data.media.sounds import wav_of
from lema.data.sets.sources import data_files
from lema.errors import DataError
from lema.model.files import ModelFiles, read_data

IMAGE = 90
QUESTION = {"type": "text", "text": "w5 w6"}
ANSWER = {"role": "assistant", "content": "w7 w8 w9"}
# "w81", four tokens of the image, "w5 w6", "</s>", "w82", the answer and its end
TOKENS = [81, *[IMAGE] * 4, 5, 6, 2, 82, 7, 8, 9, 2]
LABELS = [-100] * 9 + [7, 8, 9, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_with_processor("llava", tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture
def read(model: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return what reads rows as a run with these settings does; the folder has an image."""
    picture(1).save(tmp_path / "one.png")
    picture(2).save(tmp_path / "two.png")

    return reading(model, tmp_path)


def chat(*parts: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, QUESTION]}, ANSWER], **columns}


def content(number: int = 1) -> bytes:
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return file.getvalue()


def encoded(number: int = 1) -> str:
    return base64.b64encode(content(number)).decode()


def images_of(data: TokenDataset, index: int = 0) -> list[Any]:
    images = data.images(index)
    assert isinstance(images, RowMedia)
    (decoded,) = images.decoded()
    return decoded


def assert_first(data: TokenDataset, number: int = 1) -> None:
    row = data[0]
    assert (row["input_ids"], row["labels"]) == (TOKENS, LABELS)
    (image,) = images_of(data)
    assert image.tobytes() == picture(number).tobytes()


PART = {"type": "image"}
OF_JSON = {
    "a column of paths": chat(PART, images=["one.png"]),
    "a column with one path": chat(PART, image="one.png"),
    "an object with a path": chat(PART, images=[{"bytes": None, "path": "one.png"}]),
    "bytes in base64": chat(PART, images=[{"bytes": encoded(), "path": None}]),
    "a data URL": chat(PART, images=[f"data:image/png;base64,{encoded()}"]),
    "a part with an image": chat({**PART, "image": "one.png"}),
    "a part with a path": chat({**PART, "path": "one.png"}),
    "a part with a URL of a file": chat({**PART, "url": "one.png"}),
    "a part with base64": chat({**PART, "base64": encoded()}),
    "a part of OpenAI": chat(
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded()}"}}
    ),
    "nulls of a table": chat({**PART, "text": None, "image": None}, images=["one.png"]),
    "no part": {"messages": [{"role": "user", "content": "w5 w6"}, ANSWER], "images": ["one.png"]},
    "a word for the image": {
        "messages": [{"role": "user", "content": "<image>w5 w6"}, ANSWER],
        "images": ["one.png"],
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "<image>w5 w6"},
            {"from": "gpt", "value": "w7 w8 w9"},
        ],
        "image": "one.png",
    },
    "prompt and completion": {
        "prompt": [{"role": "user", "content": [PART, QUESTION]}],
        "completion": [ANSWER],
        "images": ["one.png"],
    },
}


@pytest.mark.parametrize("row", OF_JSON.values(), ids=OF_JSON.keys())
def test_an_image_is_read_from_each_form(read: Callable[..., Any], row: Any) -> None:
    data = read([row])
    assert_first(data)
    assert data.notes == ()


def test_bytes_of_parquet_and_objects_of_pillow_are_read(
    read: Callable[..., Any], tmp_path: Path
) -> None:
    row = chat({**PART, "text": None}, images=[{"bytes": content(), "path": None}])
    row["messages"][1] = {**ANSWER, "content": [{"type": "text", "text": ANSWER["content"]}]}
    table = pyarrow.Table.from_pylist([row])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert_first(read(str(tmp_path / "rows.parquet")))
    assert_first(read(iter([chat(PART, images=[picture(1)])])))
    assert_first(read(iter([chat({**PART, "image": content()})])))
    assert_first(
        read(iter([chat(PART, images=[tmp_path / "one.png"])]), image_folder=str(tmp_path))
    )


def test_rows_that_hold_images_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    def sizes(nbytes: int, count: int) -> list[int]:
        draw = random.Random(nbytes)
        held = ({"bytes": draw.randbytes(nbytes), "path": None} for _ in range(count))
        rows = [chat(PART, images=[image]) for image in held]
        for row in rows:
            row["messages"][1] = {"role": "assistant", "content": [{"type": "text", "text": "w7"}]}
        file = tmp_path / f"{nbytes}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, compression="none")
        return [piece.num_rows() for _, piece in data_files(str(file))[0].pieces()]

    assert sizes(10, 600) == [512, 88]
    assert sizes(1 << 20, 40) == [17, 17, 6]  # of a mebibyte each


def test_several_images_and_none_in_one_file(read: Callable[..., Any]) -> None:
    later = [
        *chat(PART, PART)["messages"],
        {"role": "user", "content": [QUESTION, PART]},
        {"role": "assistant", "content": "w10"},
    ]
    rows = [
        {"messages": later, "images": ["one.png", "two.png", "one.png"]},
        {"messages": [{"role": "user", "content": "w5"}, ANSWER], "images": []},
        {"messages": [{"role": "user", "content": "w5"}, ANSWER], "images": None},
    ]
    data = read(rows)
    assert [image.tobytes() for image in images_of(data)] == [
        picture(number).tobytes() for number in (1, 2, 1)
    ]
    ids, labels = (data[0][name] for name in ("input_ids", "labels"))
    assert ids.count(IMAGE) == 12
    assert [label for label in labels if label != -100] == [7, 8, 9, 2, 10, 2]
    assert images_of(data, 1) == images_of(data, 2) == []


def test_no_token_of_an_image_is_trained(read: Callable[..., Any]) -> None:
    row = read([chat(PART, images=["one.png"])], train_on="all")[0]
    assert row["labels"] == [-100 if token == IMAGE else token for token in row["input_ids"]]
    row = read([chat(PART, images=["one.png"])], train_on="last")[0]
    assert row["labels"] == LABELS


REFUSED = {
    "an image that is not there": (chat(PART, images=["three.png"]), "three.png"),
    "a URL without consent": (chat(PART, images=["https://a.b/c.png"]), "image_urls: true"),
    "a path above the folder": (chat(PART, images=["../one.png"]), "outside"),
    "an absolute path": (chat(PART, images=["/etc/hostname"]), "image_folder"),
    "a link out of the folder": (chat(PART, images=["link.png"]), "outside"),
    "a pipe": (chat(PART, images=["pipe.png"]), "pipe"),
    "a directory": (chat(PART, images=["folder.png"]), "directory"),
    "text": (chat(PART, images=["text.png"]), "no image of a format"),
    "fewer places": (
        chat(PART, images=["one.png", "two.png"]),
        "2 images, and its messages have 1",
    ),
    "an image in a part of text": (
        chat({"type": "text", "text": "w5", "image": "one.png"}),
        "has 'image', which would be lost",
    ),
    "two columns": (
        chat(PART, image="one.png", images=["two.png"]),
        "both 'images' and 'image'",
    ),
    "fewer images": (chat(PART, PART, images=["one.png"]), "1 images, and its messages have 2"),
    "no column": (chat(PART), "no column 'images'"),
    "no base64": (chat({**PART, "base64": "%%%"}), "no base64"),
    "another data URL": (chat(PART, images=["data:image/png,abc"]), "base64"),
    "two values": (chat({**PART, "path": "one.png", "url": "two.png"}), "several values"),
    "a number": (chat(PART, images=[7]), "an image is a int"),
    "an empty object": (chat(PART, images=[{}]), "neither bytes nor a path"),
    "video": (chat({"type": "video", "path": "a.mp4"}), "cannot be read"),
    "a word of the processor": (
        chat(PART, {"type": "text", "text": "<image>"}, images=["one.png"]),
        "processor refuses",
    ),
    "an image in an answer": (
        {
            "messages": [
                {"role": "user", "content": "w5"},
                {"role": "assistant", "content": [PART]},
            ],
            "images": ["one.png"],
        },
        "an answer holds an image",
    ),
    "its token in text without an image": ({"text": "w5 <image> w6"}, "and no image"),
    "its token in a chat without an image": (
        {"messages": [{"role": "user", "content": "w5 <image>"}, ANSWER]},
        "and no image",
    ),
    "its token in ids": ({"input_ids": [5, IMAGE, 6]}, "and no image"),
    "a column of videos": (chat(videos=["one.png"]), "takes no videos"),
    "a column of sound": (chat(PART, images=["one.png"], audio="a.wav"), "takes no sounds"),
    "text with images": ({"text": "w5 w6", "images": ["one.png"]}, "only chats"),
}


@pytest.mark.parametrize(("row", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_is_refused_by_row(
    read: Callable[..., Any], tmp_path: Path, row: Any, reason: str
) -> None:
    import os

    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "a.wav").write_bytes(wav_of(np.zeros(9, np.float32), 16_000))
    (tmp_path / "link.png").symlink_to("/etc/hostname")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    goods = {"messages": chat(PART, images=["one.png"]), "input_ids": {"input_ids": [5, 6]}}
    good = next((goods[name] for name in goods if name in row), {"text": "w5 w6"})
    with pytest.raises(DataError) as refused:
        read([good, row])
    error = refused.value
    assert reason in str(error)
    assert error.where.startswith(f"{tmp_path / 'rows.jsonl'}:2")
    assert error.how


def test_a_model_that_reads_text_alone_refuses_images(read: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="set modalities: all"):
        read([chat({**PART, "path": "one.png"})], modalities="text")


OF_TEXT: dict[str, Any] = {
    "a chat": {"messages": [{"role": "user", "content": "<image> w5"}, ANSWER]},
    "a chat of ShareGPT": {
        "conversations": [{"from": "human", "value": "w5"}, {"from": "gpt", "value": "w6"}]
    },
    "a pair": {
        "prompt": [{"role": "user", "content": "w5"}],
        "chosen": [ANSWER],
        "rejected": [{**ANSWER, "content": "w6"}],
    },
}


@pytest.mark.parametrize("row", OF_TEXT.values(), ids=OF_TEXT.keys())
@pytest.mark.parametrize("columns", [{"images": ["one.png"]}, {"image": "one.png"}])
def test_a_model_that_reads_text_alone_refuses_a_column_of_images(
    read: Callable[..., Any], row: dict[str, Any], columns: dict[str, Any]
) -> None:
    objective = "dpo" if "chosen" in row else "sft"
    settings = {"modalities": "text", "objective": objective}
    with pytest.raises(DataError, match="opened for text alone"):
        read([{**row, **columns}], **settings)
    assert len(read([{**row, **dict.fromkeys(columns)}], **settings)) == 1


def test_a_pair_with_the_token_of_an_image_in_its_text_is_refused(read: Callable[..., Any]) -> None:
    pair = {**OF_TEXT["a pair"], "prompt": [{"role": "user", "content": "w5 <image>"}]}
    with pytest.raises(DataError, match="and no image"):
        read([pair], objective="dpo")


def test_limits_are_settings(read: Callable[..., Any]) -> None:
    rows = [chat(PART, images=["one.png"])]
    with pytest.raises(DataError, match="raise max_image_pixels"):
        read(rows, max_image_pixels=1000)
    with pytest.raises(DataError, match="raise max_image_bytes"):
        read(rows, max_image_bytes=1000)
    many = [chat(*[PART] * 5, images=["one.png"] * 5)]
    assert read(many, max_image_pixels=2000).counts.rows == 1
    with pytest.raises(DataError, match="images of the row have more than"):
        read(many, max_image_pixels=1450)
    with pytest.raises(DataError, match="no such folder"):
        read(rows, image_folder="nowhere")


def test_paths_are_relative_to_the_folder_that_is_set(
    read: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "pictures").mkdir()
    picture(3).save(tmp_path / "pictures" / "one.png")
    folder = tmp_path / "pictures"
    for name in ("one.png", str(folder / "one.png"), f"file://{folder / 'one.png'}"):
        data = read([chat(PART, images=[name])], image_folder=str(folder))
        (image,) = images_of(data)
        assert image.tobytes() == picture(3).tobytes()


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved.png":
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname")
            self.end_headers()
            return
        found = self.path == "/one.png"
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            self.wfile.write(content())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Server) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def test_urls_are_fetched_with_consent(
    read: Callable[..., Any], server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    data = read([chat({**PART, "url": f"{server}/one.png"})], image_urls=True)
    assert_first(data)
    for name, reason in (("two.png", "404"), ("moved.png", "cannot be fetched")):
        with pytest.raises(DataError, match=reason):
            read([chat({**PART, "url": f"{server}/{name}"})], image_urls=True)
    with pytest.raises(DataError, match="raise max_image_bytes"):
        read([chat({**PART, "url": f"{server}/one.png"})], image_urls=True, max_image_bytes=100)


@pytest.mark.parametrize("side", ["right", "left"])
def test_no_cut_goes_through_an_image(read: Callable[..., Any], side: str) -> None:
    # the image stands behind 7 of 19 tokens in the first row, and behind 1 in the second
    late = chat({"type": "text", "text": "w10 w11 w12 w13 w14 w15"}, PART, images=["one.png"])
    rows = [late, chat(PART, images=["one.png"])]
    whole = read(rows)
    assert whole.lengths.tolist() == [19, 13]
    assert whole[0]["input_ids"][7:11] == [IMAGE] * 4
    length = {"right": 10, "left": 12}[side]
    data = read(rows, max_length=length, truncation_side=side)
    skipped = [one["why"] for one in data.skipped()]
    if side == "right":  # 10 tokens: through the first image, and behind that of the second
        assert skipped == ["dropped, because the cut would take an image", "truncated"]
        assert data[0]["input_ids"] == TOKENS[:10]
    else:  # from the eighth token on, with all of the image; and from the second on
        assert skipped == ["truncated", "truncated"]
        assert data[0]["input_ids"] == whole[0]["input_ids"][7:]
        (images,) = data[0]["images"].records
        assert (images.start, images.end) == (7, 11)
        with pytest.raises(DataError, match="2 were dropped"):
            read(rows, max_length=11, truncation_side="left")
    assert data.counts.dropped == skipped.count("dropped, because the cut would take an image")
    with pytest.raises(DataError, match="more than max_length"):
        read(rows, max_length=length, overlong="error")
    assert (
        read([*rows, chat(PART, images=["one.png"])], max_length=13, overlong="drop").counts.rows
        == 2
    )


def test_pairs_take_their_images_in_the_prompt(read: Callable[..., Any]) -> None:
    asked = [{"role": "user", "content": [PART, QUESTION]}]
    sides = {"chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "w10"}]}
    rows = [
        {"prompt": asked, **sides, "images": ["one.png"]},
        {name: [*asked, *answer] for name, answer in sides.items()} | {"images": ["one.png"]},
    ]
    explicit, implicit = read(rows, objective="dpo")
    assert explicit == [
        {**row, "images": images["images"]} for row, images in zip(implicit, explicit, strict=True)
    ]
    assert explicit[0]["input_ids"] == TOKENS
    assert explicit[0]["labels"] == LABELS
    assert explicit[1]["input_ids"] == [*TOKENS[:9], 10, 2]
    with pytest.raises(DataError, match="a completion holds an image"):
        user = {"role": "user", "content": [PART]}
        later = {name: [*answer, user, ANSWER] for name, answer in sides.items()}
        read([{"prompt": asked, **later, "images": ["one.png"] * 2}], objective="dpo")
    short = read(rows, objective="kto", max_length=12, overlong="drop")
    assert [row[0]["input_ids"] for row in short] == [[*TOKENS[:9], 10, 2]] * 2


@pytest.mark.skipif(not hasattr(ProcessorMixin, WRITES), reason="processors tell no offsets")
def test_the_token_of_an_image_beside_its_images_is_refused(tmp_path: Path) -> None:
    """Gemma's processor does not count such tokens itself."""
    model = publish_with_processor("gemma3", tmp_path / "gemma3")
    picture(1).save(tmp_path / "one.png")
    config = LemaConfig(str(model), device="cpu", modalities="all", image_folder=str(tmp_path))
    answer = {**ANSWER, "content": "w7 <image>"}
    asked = {"role": "user", "content": [PART, QUESTION]}
    rows = [{"messages": [asked, answer], "images": ["one.png"]}]
    with pytest.raises(DataError, match="beside its images"):
        read_data(config, ModelFiles(config), iter(rows))
