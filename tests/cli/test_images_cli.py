"""`lema generate`, `lema chat` and `lema eval` with images: the tokens and the loss of the whole
model of `transformers` with the published processor and PEFT's adapter.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned import aligned
from clirun import lema as command
from clirun import write_rows
from imageprocessors import PROCESSORS, picture, publish_with_processor, words
from imagerows import TOWERLESS
from parity import draw_b
from peft import LoraConfig, PeftModel
from PIL import Image
from publishedclass import published_class
from transformers import AutoConfig

import lema
from lema.storage.modelfiles import load_processor
from lema_tools.generation.images import in_place

NEW = 6
Directories = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Return a directory with a model that sees images, its adapter and two images, written
    once."""
    root = tmp_path_factory.mktemp("trained")

    def directory(model_type: str) -> Path:
        path = root / model_type
        if path.exists():
            return path
        publish_with_processor(model_type, path / "model")
        adapter = LoraConfig(r=4, target_modules=TOWERLESS, task_type="CAUSAL_LM")
        model = lema.streamed(path / "model", adapter, modalities="all", device="cpu", seed=1)
        draw_b(model)
        model.save_pretrained(str(path / "adapter"))
        model.close()
        for number in range(2):
            picture(number).save(path / f"{number}.png")
        return path

    return directory


def whole(directory: Path) -> Any:
    kind = published_class(AutoConfig.from_pretrained(directory / "model"))
    base = aligned(kind.from_pretrained(directory / "model", dtype=torch.float32))
    return PeftModel.from_pretrained(base, str(directory / "adapter")).eval()


def processor_of(directory: Path) -> Any:
    """The published processor, of images alone where torchvision is not there."""
    return load_processor(directory / "model", trusted=False)


def answer(directory: Path, turns: list[dict[str, Any]], images: list[int]) -> str:
    """What `transformers` makes of a chat with images of these numbers."""
    processor = processor_of(directory)
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    loaded = [Image.open(directory / f"{number}.png").convert("RGB") for number in images]
    inputs = processor(
        text=[text],
        images=[loaded] if images else None,
        add_special_tokens=False,
        return_tensors="pt",
    )
    tokens = whole(directory).generate(**inputs, max_new_tokens=NEW, do_sample=False)
    made = tokens[0, inputs["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(made, skip_special_tokens=True))


def user(text: str, images: int = 0) -> dict[str, Any]:
    parts = [{"type": "image"}] * images
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.mark.parametrize("model_type", PROCESSORS)
def test_an_image_and_a_prompt_are_answered_as_transformers_does(
    model_type: str, trained: Directories, capfd: Any
) -> None:
    directory = trained(model_type)
    arguments = ["--image", directory / "0.png", "--image", directory / "1.png"]
    arguments += ["--prompt", words(1, 4), "--max-new-tokens", NEW, "--set", "device=cpu"]
    capfd.readouterr()
    assert command("generate", directory / "adapter", *arguments) == 0
    expected = answer(directory, [user(words(1, 4), images=2)], [0, 1])
    assert capfd.readouterr().out.strip() == expected.strip()
    if model_type == "llava":  # of which another image has another answer
        assert command("generate", directory / "adapter", *arguments[2:]) == 0
        assert capfd.readouterr().out.strip() != expected.strip()


def test_rows_name_their_images_and_go_in_batches(
    trained: Directories, tmp_path: Path, capfd: Any
) -> None:
    directory = trained("gemma3")
    rows: list[dict[str, Any]] = [
        {"prompt": words(7, 3), "images": ["0.png", "1.png"]},
        {"messages": [{"role": "user", "content": words(2, 5)}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": words(3, 2)},
                        {"type": "image", "path": "1.png"},
                        {"type": "text", "text": words(4, 3)},
                    ],
                }
            ]
        },
    ]
    file = write_rows(directory / "prompts.jsonl", rows)
    out = tmp_path / "out.jsonl"
    for size in (1, 3):
        arguments = ["--prompts", file, "--output", out, "--batch-size", size, "--chat"]
        arguments += ["--max-new-tokens", NEW, "--set", "device=cpu"]
        assert command("generate", directory / "adapter", *arguments) == 0, capfd.readouterr()
        found = [json.loads(line)["completion"] for line in out.read_text().splitlines()]
        mixed = rows[2]["messages"][0]["content"]
        turns = [{"role": "user", "content": [mixed[0], {"type": "image"}, mixed[2]]}]
        assert [text.strip() for text in found] == [
            text.strip()
            for text in (
                answer(directory, [user(words(7, 3), images=2)], [0, 1]),
                answer(directory, [user(words(2, 5))], []),
                answer(directory, turns, [1]),
            )
        ]
        out.unlink()


@pytest.mark.parametrize(
    ("content", "settings", "said"),
    [
        (None, [], "cannot be read"),
        (b"no image", [], "no image of a format that is read"),
        (b"", [], "the file is empty"),
        ("picture", ["max_image_pixels=100"], "more than 100"),
        ("picture", ["max_image_bytes=10"], "more than 10 bytes"),
        ("picture", ["modalities=text"], "opened for text alone"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused(
    content: Any, settings: list[str], said: str, trained: Directories, tmp_path: Path, capfd: Any
) -> None:
    directory = trained("llava")
    image = tmp_path / "image.png"
    if content == "picture":
        picture(1).save(image)
    elif content is not None:
        image.write_bytes(content)
    options = [part for one in ["device=cpu", *settings] for part in ("--set", one)]
    arguments = ["--image", image, "--prompt", words(1, 2), *options]
    assert command("generate", directory / "adapter", *arguments) == 3
    assert said in capfd.readouterr().err


def test_an_image_is_named_by_path_or_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(tmp_path / "one.png")
    assert [in_place(name) for name in ("one.png", file, f"file://{file}")] == [file] * 3
    assert in_place("https://a.b/one.png") == "https://a.b/one.png"


def test_images_stand_in_chats_alone(trained: Directories, capfd: Any) -> None:
    directory = trained("llava")
    image = ["--image", directory / "0.png"]
    for arguments in (["--prompts", directory / "x.txt"], ["--prompt", "w3", "--raw"]):
        assert command("generate", directory / "adapter", *image, *arguments) == 2
        assert "images stand in messages of a chat" in capfd.readouterr().err


def test_a_chat_takes_images(
    trained: Directories, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = trained("qwen2_vl")
    saved = tmp_path / "chat.jsonl"
    lines = [
        f"/image {directory / '0.png'}",
        words(1, 3),
        f"/image {tmp_path / 'none.png'}",
        f"/image {directory / '1.png'}",
        words(2, 4),
        f"/save {saved}",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    capfd.readouterr()
    settings = ["--set", "device=cpu", "--max-new-tokens", NEW]
    assert command("chat", directory / "adapter", *settings) == 3  # of the image that is not there
    printed, said = capfd.readouterr()
    first = answer(directory, [user(words(1, 3), images=1)], [0])
    turns = [
        user(words(1, 3), images=1),
        {"role": "assistant", "content": [{"type": "text", "text": first}]},
        user(words(2, 4), images=1),
    ]
    second = answer(directory, turns, [0, 1])
    assert [line.strip() for line in printed.splitlines()] == [first.strip(), second.strip()]
    assert "none.png" in said
    (row,) = [json.loads(line) for line in saved.read_text().splitlines()]
    contents = [turn["content"] for turn in row["messages"]]
    assert contents[0][0] == {"type": "image", "path": str(directory / "0.png")}
    assert contents[2][1] == {"type": "text", "text": words(2, 4)}
    # and the row is one to train on
    options = ["--set", "device=cpu", "--set", f"image_folder={directory}"]
    assert command("eval", directory / "adapter", "--data", saved, *options) == 0


def test_a_chat_that_shall_read_text_alone_shows_no_images(
    trained: Directories, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = trained("llava")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {directory / '0.png'}\n"))
    settings = ["--set", "device=cpu", "--set", "modalities=text"]
    assert command("chat", directory / "adapter", *settings) == 2
    assert "without --set modalities=text" in capfd.readouterr().err


def test_a_chat_goes_on_where_the_model_sees_no_images(
    trained: Directories, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is opened anew for the first image; what refuses that ends one line alone."""
    directory = trained("llava")
    lines = f"/image {directory / '0.png'}\n{words(1, 3)}\n"
    opened = []

    def with_images(settings: list[str] | None) -> list[str]:
        opened.append(settings)
        return [*(settings or []), "modalities=all", "towers=nowhere"]

    monkeypatch.setattr("lema_tools.chat.model.with_images", with_images)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    capfd.readouterr()
    settings = ["--set", "device=cpu", "--max-new-tokens", NEW]
    assert command("chat", directory / "adapter", *settings) == 2
    printed, said = capfd.readouterr()
    assert opened
    assert "towers" in said
    assert printed.strip() == answer(directory, [user(words(1, 3))], []).strip()


@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl", "idefics3"])
def test_rows_with_images_have_the_loss_of_the_whole_model(
    model_type: str, trained: Directories, capfd: Any
) -> None:
    directory = trained(model_type)
    said = words(5, 4)
    messages = [user(words(1, 3), images=1), {"role": "assistant", "content": said}]
    file = write_rows(directory / "eval.jsonl", [{"messages": messages, "images": ["0.png"]}])
    options = ["--set", "device=cpu"]
    capfd.readouterr()
    assert command("eval", directory / "adapter", "--data", file, *options) == 0
    printed = dict(line.split() for line in capfd.readouterr().out.splitlines())
    processor = processor_of(directory)
    text = processor.apply_chat_template(
        [messages[0], {"role": "assistant", "content": [{"type": "text", "text": said}]}],
        tokenize=False,
    )
    image = Image.open(directory / "0.png").convert("RGB")
    inputs = processor(text=[text], images=[[image]], add_special_tokens=False, return_tensors="pt")
    ids = inputs["input_ids"][0]
    taught = processor.tokenizer(f"{said} </s>", add_special_tokens=False)["input_ids"]
    labels = torch.full_like(ids, -100)
    labels[-len(taught) :] = torch.tensor(taught)
    assert ids[-len(taught) :].tolist() == taught
    with torch.no_grad():
        loss = whole(directory)(**inputs, labels=labels[None]).loss.item()
    assert float(printed["eval_loss"]) == pytest.approx(loss, rel=1e-5)
