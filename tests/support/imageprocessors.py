"""Tiny processors of models that see images, as they are published, and rows that they read.

A processor of the hub has files that are not here. These have a tokenizer of words, and images of
few tokens that fit the models of `imagerows`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from imagerows import IMAGE_TOKEN, publish_with_images
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lema.compat import without_video

__all__ = [
    "PROCESSORS",
    "image_examples",
    "image_rows",
    "picture",
    "publish_with_processor",
    "tokenizer",
    "words",
]

SIZE = 96
IMAGE = "<image>"
WORDS = [f"w{number}" for number in range(SIZE)]
BEGIN, END = "w91", "w92"  # of an image, where a type has words for that
USER, ANSWER, OTHER = "w81", "w82", "w83"
VIDEO = "w91"
TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ {{'user': '{USER} ', 'assistant': '{ANSWER} '}}.get(message.role, '{OTHER} ') }}}}"
    "{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE {% elif part.type == 'video' %}VIDEO "
    "{% elif part.type == 'audio' %}AUDIO {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}</s> {% endfor %}"
    f"{{% if add_generation_prompt %}}{ANSWER} {{% endif %}}"
)


def tokenizer(**tokens: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words; `tokens` are those that a type names."""
    names = {0: "<pad>", 1: "<s>", 2: "</s>", IMAGE_TOKEN: IMAGE}
    # of idefics3
    names |= {93: "<fake_token_around_image>", 94: "<global-img>", 95: "<end_of_utterance>"}
    vocabulary = {names.get(number, WORDS[number]): number for number in range(SIZE)}
    level = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    level.add_special_tokens([AddedToken(IMAGE, special=True)])
    level.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=level, **special, extra_special_tokens={**tokens}
    )


def llava(template: str = TEMPLATE) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    side = {"height": 28, "width": 28}
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=side)
    return LlavaProcessor(
        images,
        tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=template.replace("IMAGE", IMAGE),
    )


def gemma3(template: str = TEMPLATE) -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    tokens = tokenizer(boi_token=BEGIN, eoi_token=END, image_token=IMAGE)
    template = template.replace("IMAGE", BEGIN)
    return Gemma3Processor(images, tokens, chat_template=template, image_seq_length=4)


def llava_next(template: str = TEMPLATE) -> Any:
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    side = {"height": 28, "width": 28}
    tiles = [[28, 56], [56, 28], [56, 56]]
    return LlavaNextProcessor(
        LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size=side, image_grid_pinpoints=tiles
        ),
        tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=template.replace("IMAGE", IMAGE),
    )


def idefics3(template: str = TEMPLATE) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    side = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    template = template.replace("IMAGE", IMAGE)
    return Idefics3Processor(images, tokenizer(), image_seq_len=4, chat_template=template)


def _of_qwen(name: str, template: str) -> Any:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 512}
    )
    special = {"vision_bos_token": END, "vision_eos_token": "w88", "video_token": VIDEO}
    tokens = tokenizer(image_token=IMAGE, **special)
    kind = getattr(transformers, f"{name}Processor")
    template = template.replace("IMAGE", f"{END} {IMAGE} w88")
    with without_video():
        return kind(images, tokens, chat_template=template)


def qwen2_vl(template: str = TEMPLATE) -> Any:
    return _of_qwen("Qwen2VL", template)


def qwen3_vl(template: str = TEMPLATE) -> Any:
    return _of_qwen("Qwen3VL", template)


PROCESSORS: Mapping[str, Callable[..., Any]] = {
    "llava": llava,
    "llava_next": llava_next,
    "gemma3": gemma3,
    "idefics3": idefics3,
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
}


def publish_with_processor(model_type: str, directory: Path) -> Path:
    """Write a random model of a type and its processor, as its publisher would."""
    publish_with_images(model_type, directory)
    processor = PROCESSORS[model_type]()
    if getattr(processor, "video_processor", ...) is not None:
        processor.save_pretrained(directory)
        return directory
    # as it was published, with a file for each part
    processor.tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(processor.chat_template)
    processor.image_processor.save_pretrained(directory)
    file = directory / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "processor_class": type(processor).__name__}))
    return directory


def picture(number: int) -> Image.Image:
    """Return an image that differs from those of other numbers, and from some of them in size."""
    generator = torch.Generator().manual_seed(number)
    size = (30 + 5 * (number % 4), 40, 3)
    values = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    return Image.fromarray(values.numpy())


def words(start: int, count: int) -> str:
    """Return some words of the tokenizer."""
    return " ".join(WORDS[5 + (7 * start + 3 * number) % 70] for number in range(count))


def image_rows(folder: Path, count: int = 9) -> list[dict[str, Any]]:
    """Return chats with one, two and no images, whose files are written to a folder."""
    rows = []
    for number in range(count):
        paths = written_pictures(folder, number, (1, 2, 0)[number % 3])
        asked: list[dict[str, Any]] = [{"type": "image"}] * len(paths)
        asked = [*asked, {"type": "text", "text": words(number, 3)}]
        answer = [{"type": "text", "text": words(number + 1, 5 + number % 4)}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "images": paths})
    return rows


def image_examples(folder: Path, count: int = 8, *, labelled: bool = False) -> list[dict[str, Any]]:
    """Return pairs of answers to prompts with an image, or answers with a label."""
    rows = []
    for number in range(count):
        paths = written_pictures(folder, number, 1 + number % 2)
        asked: list[dict[str, Any]] = [{"type": "image"}] * len(paths)
        asked = [*asked, {"type": "text", "text": words(number, 3)}]
        answers = [
            [{"role": "assistant", "content": words(number + more, 4 + number % 3)}]
            for more in (1, 4)
        ]
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": asked}], "images": paths}
        if labelled:
            row |= {"completion": answers[0], "label": number % 2 == 0}
        else:
            row |= {"chosen": answers[0], "rejected": answers[1]}
        rows.append(row)
    return rows


def written_pictures(folder: Path, number: int, count: int) -> list[str]:
    """Write images of a row; return their names in the folder."""
    names = [f"{number}_{place}.png" for place in range(count)]
    for place, name in enumerate(names):
        picture(3 * number + place).save(folder / name)
    return names
