"""Tiny processors of models that see videos, as they are published, and rows that they read: videos
of a few frames that fit the models of `imagerows`. They need torchvision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from imageprocessors import IMAGE, TEMPLATE, picture, tokenizer, words, written_pictures
from imagerows import image_config, publish_with_images

__all__ = ["SEEING", "publish_seeing", "video_examples", "video_rows", "written_frames"]

PARTS = {"patch_size": 4, "merge_size": 2}
SIZE = {"shortest_edge": 64, "longest_edge": 128}  # pixels of an image, or of a frame


def _processor(model_type: str) -> Any:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[model_type]
    config: Any = image_config(model_type)
    names = tokenizer().convert_ids_to_tokens(
        [config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    )
    video, start, end = names
    special = {"image_token": IMAGE, "video_token": video}
    special |= {"vision_start_token": start, "vision_end_token": end}
    videos = transformers.Qwen3VLVideoProcessor if name == "Qwen3VL" else None
    videos = videos or transformers.Qwen2VLVideoProcessor
    total = {name: 4 * size for name, size in SIZE.items()}  # of all frames
    template = TEMPLATE.replace("IMAGE", f"{start} {IMAGE} {end}")
    # the processor of Qwen3-VL puts the ends of each frame itself
    inside = video if name == "Qwen3VL" else f"{start} {video} {end}"
    return getattr(transformers, f"{name}Processor")(
        Qwen2VLImageProcessorPil(**PARTS, size=SIZE),
        tokenizer(**special),
        videos(**PARTS, size=total if name == "Qwen3VL" else SIZE),
        chat_template=template.replace("VIDEO", inside),
    )


SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Types whose processors are here."""


def publish_seeing(model_type: str, directory: Path) -> Path:
    """Write a random model of a type and its processor, as its publisher would."""
    publish_with_images(model_type, directory)
    _processor(model_type).save_pretrained(directory)
    return directory


def written_frames(folder: Path, number: int, count: int = 4) -> list[str]:
    """Write frames of one size; return their names in the folder."""
    names = [f"{number}_frame_{place}.png" for place in range(count)]
    for place, name in enumerate(names):
        picture(number + 4 * place).save(folder / name)
    return names


def _asked(folder: Path, number: int, videos: int, images: int) -> tuple[Any, dict[str, Any]]:
    """Return the parts of a question, and the columns with what they stand for."""
    columns: dict[str, Any] = {
        "videos": [
            written_frames(folder, 100 * number + place, 4 // videos) for place in range(videos)
        ],
        "images": written_pictures(folder, number, images),
    }
    parts = [{"type": "image"}] * images + [{"type": "video"}] * videos
    return [*parts, {"type": "text", "text": words(number, 3)}], columns


def video_rows(folder: Path, count: int = 6) -> list[dict[str, Any]]:
    """Return chats with a video, with two and an image, and with none, as files in a folder."""
    rows = []
    for number in range(count):
        asked, columns = _asked(folder, number, (1, 2, 0)[number % 3], (0, 1, 0)[number % 3])
        answer = [{"type": "text", "text": words(number + 1, 5 + number % 4)}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, **columns})
    return rows


def video_examples(folder: Path, count: int = 4) -> list[dict[str, Any]]:
    """Return pairs of answers to prompts with a video."""
    rows = []
    for number in range(count):
        asked, columns = _asked(folder, number, 1, number % 2)
        chosen, rejected = (
            [{"role": "assistant", "content": words(number + more, 4 + number % 3)}]
            for more in (1, 4)
        )
        row = {"prompt": [{"role": "user", "content": asked}], **columns}
        rows.append(row | {"chosen": chosen, "rejected": rejected})
    return rows
