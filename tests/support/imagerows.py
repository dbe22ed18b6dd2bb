"""Tiny models that see images, and batches with images that fit them, of any type in `IMAGE_TYPES`.

A processor of the hub has files that are not here, so pixels are drawn, and the number of a row's
image tokens is what the model's own tower makes of them.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from publishedclass import publish
from tinyconfig import tiny_config
from torch import Tensor
from transformers import PreTrainedConfig

__all__ = ["BROKEN", "IMAGE_TYPES", "LOOPED", "STREAMED_IMAGES", "TOWERLESS", "image_batch"]
__all__ += ["image_config", "publish_with_images"]

IMAGE_TOKEN = 90
FIRST_SPECIAL = 91  # where the other special tokens begin
FIRST_WORD, LAST_WORD = 3, 80
Pixels = dict[str, Tensor]

# Settings of a tower, by the type of the whole: images of few tokens.
TOWERS: Mapping[str, Mapping[str, Any]] = {
    "llava": {"image_size": 28},
    "llava_next": {"image_size": 28},
    "qwen2_vl": {"patch_size": 4},
    "qwen2_5_vl": {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"patch_size": 4, "deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": {"patch_size": 4, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": {"patch_size": 4},
    "glm4v": {"patch_size": 4, "image_size": 16},
    "gemma3": {"image_size": 32, "patch_size": 8},
    "idefics3": {"image_size": 32, "patch_size": 8},
    "smolvlm": {"image_size": 32, "patch_size": 8},
    "paligemma": {"image_size": 28},
    "internvl": {"image_size": [28, 28], "patch_size": [7, 7]},
    "mistral3": {"image_size": 32, "patch_size": 4},
    "aya_vision": {"image_size": 28, "patch_size": 7},
    "gemma4": {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    },
    "kimi_k25": {"patch_size": 4},
    "deepseek_vl": {"image_size": 16, "patch_size": 8},
    "ovis2": {"image_size": 28, "patch_size": 7},
    "llama4": {
        "image_size": 28,
        "patch_size": 7,
        "intermediate_size": 128,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "cohere2_vision": {"image_size": 28, "patch_size": 7},
    "deepseek_vl_hybrid": {"image_size": 16, "patch_size": 8},
    "ernie4_5_vl_moe": {"patch_size": 4},
    "exaone4_5": {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
    "glm46v": {"patch_size": 4, "image_size": 16},
    "glm4v_moe": {"patch_size": 4, "image_size": 16},
    "glm_ocr": {"patch_size": 4, "image_size": 16},
    "got_ocr2": {"image_size": 64, "patch_size": 8},
    # so many positions that its table would be looked up row by row if it were one of words
    "hunyuan_vl": {"patch_size": 4, "max_image_size": 1600},
    "janus": {"image_size": 28},
    "lfm2_vl": {"patch_size": 4},
    "lighton_ocr": {"image_size": 32, "patch_size": 4},
    "llava_onevision": {"image_size": 28},
    "paddleocr_vl": {"patch_size": 4},
    "qwen3_5_moe": {"patch_size": 4},
    "video_llava": {"image_size": 28},
    "vipllava": {"image_size": 28},
    "mllama": {"image_size": 28, "vision_output_dim": 64, "intermediate_layers_indices": [1]},
}
TILINGS = [[28, 56], [56, 28], [56, 56]]
WHOLES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_vl_hybrid": {
        "high_res_vision_config": {
            "model_type": "sam_vision_model",
            "hidden_size": 32,
            "output_channels": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "window_size": 5,
            "global_attn_indexes": [1],
            "mlp_dim": 32,
        }
    },
    "exaone4_5": {"image_token_id": IMAGE_TOKEN},
    "llava_next": {"image_grid_pinpoints": TILINGS},
    "llava_onevision": {"image_grid_pinpoints": TILINGS},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "gemma3": {"mm_tokens_per_image": 4},
    "kimi_k25": {"projection_hidden_size": 32},
}
# Types with a kind of each token, text or image, of which their positions are made.
BY_KIND = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v")
BY_KIND += ("glm46v", "glm4v_moe", "glm_ocr", "ernie4_5_vl_moe", "exaone4_5", "hunyuan_vl")
IMAGE_TYPES = tuple(TOWERS)
# "it does not run its layers once each": it leaves out layers on text alone, by which it is learnt
LOOPED = "mllama"
# transformers 5.24 fails on it itself: its language model's output has no image_outputs. 5.20 does not.
BROKEN = "llama4"
STREAMED_IMAGES = tuple(kind for kind in IMAGE_TYPES if kind not in (LOOPED, BROKEN))
# Names of linear modules of the language model.
TOWERLESS = r"(?!.*(vision|visual|tower|connector|projector|aligner|abstractor|embed_)).*\.(q_proj|k_proj|o_proj|gate_proj|down_proj|up_proj|in_proj_qkv|q_a_proj|kv_b_proj)"


def image_config(model_type: str) -> PreTrainedConfig:
    """Return a tiny config of a type, whose images have few tokens."""
    config = tiny_config(model_type)
    settings = deepcopy(config.to_dict())
    vision = settings.get("vision_config") or {}
    settings["vision_config"] = {**vision, **TOWERS[model_type]}
    settings |= WHOLES.get(model_type, {})
    special = FIRST_SPECIAL
    for name, value in settings.items():
        if not name.endswith(("_token_id", "_token_index")) or value is None or value < LAST_WORD:
            continue
        if name in ("image_token_id", "image_token_index"):
            settings[name] = IMAGE_TOKEN
        else:
            settings[name] = min(special, 95)
            special += 1
    if "image_token_index" in settings:
        settings["image_token_index"] = IMAGE_TOKEN
    if "visual_indicator_token_ids" in settings:
        settings["visual_indicator_token_ids"] = [91, 92, 93, 94, 95]
    if model_type == "gemma4":
        settings["audio_config"] = None
    settings.pop("architectures", None)
    return type(config).from_dict(settings)


def publish_with_images(model_type: str, directory: Path) -> Path:
    """Write a random model of a type that sees images, as its publisher would."""
    return publish(model_type, directory, image_config(model_type))


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _whole_images(config: Any, number: int) -> Pixels:
    size = config.vision_config.image_size
    side = size if isinstance(size, int) else size[0]
    return {"pixel_values": _drawn(1, 3, side, side, seed=number)}


def _tiled_images(config: Any, number: int) -> Pixels:
    side = config.vision_config.image_size
    sizes = ((28, 56), (56, 28), (40, 50))
    counts = (3, 3, 5)
    kind = number % 3
    return {
        "pixel_values": _drawn(1, counts[kind], 3, side, side, seed=number),
        "image_sizes": torch.tensor([sizes[kind]]),
    }


def _patches(config: Any, number: int) -> Pixels:
    vision = config.vision_config
    height, width = ((4, 4), (4, 6), (6, 4))[number % 3]
    times = getattr(vision, "temporal_patch_size", 1)
    values = 3 * times * vision.patch_size**2
    return {
        "pixel_values": _drawn(height * width, values, seed=number),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def _patches_kimi(config: Any, number: int) -> Pixels:
    found = _patches(config, number)
    side = config.vision_config.patch_size
    return {**found, "pixel_values": found["pixel_values"].view(-1, 3, side, side)}


def _sized(config: Any, number: int) -> Pixels:
    height, width = ((16, 16), (16, 24), (24, 16))[number % 3]
    image = torch.zeros(1, 3, 24, 24)
    image[:, :, :height, :width] = _drawn(1, 3, height, width, seed=number)
    return {"pixel_values": image, "image_sizes": torch.tensor([[height, width]])}


def _positioned(config: Any, number: int) -> Pixels:
    side = config.vision_config.patch_size
    height, width = ((4, 4), (4, 2), (2, 4))[number % 3]
    places = [(x, y) for y in range(height) for x in range(width)]
    pixels = torch.zeros(1, 16, 3 * side**2)
    pixels[:, : len(places)] = _drawn(1, len(places), 3 * side**2, seed=number).sigmoid()
    padded = places + [(-1, -1)] * (16 - len(places))
    return {"pixel_values": pixels, "image_position_ids": torch.tensor([padded])}


def _tiles(config: Any, number: int) -> Pixels:
    side = config.vision_config.image_size
    kind = number % 2  # one tile, or two
    pixels = torch.zeros(1, 4, 3, side, side)
    pixels[:, : kind + 1] = _drawn(1, kind + 1, 3, side, side, seed=number)
    mask = torch.zeros(1, 4, dtype=torch.long)
    mask[:, : kind + 1] = 1
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.tensor([kind + 1]),
        "aspect_ratio_mask": mask,
    }


def _two_sizes(config: Any, number: int) -> Pixels:
    side = config.high_res_vision_config.image_size
    fine = _drawn(1, 3, side, side, seed=number)
    return {**_whole_images(config, number), "high_res_pixel_values": fine}


def _masked(config: Any, number: int) -> Pixels:
    side = config.vision_config.patch_size
    height, width = ((4, 4), (4, 2), (2, 4))[number % 3]
    count = height * width
    pixels = torch.zeros(1, 16, 3 * side**2)
    pixels[:, :count] = _drawn(1, count, 3 * side**2, seed=number)
    shape = torch.tensor([[height, width]])
    mask = (torch.arange(16) < count).long()[None]
    return {"pixel_values": pixels, "spatial_shapes": shape, "pixel_attention_mask": mask}


DRAWN: Mapping[str, Callable[[Any, int], Pixels]] = {
    **dict.fromkeys(TOWERS, _whole_images),
    **dict.fromkeys(BY_KIND, _patches),
    "deepseek_vl_hybrid": _two_sizes,
    "kimi_k25": _patches_kimi,
    "lfm2_vl": _masked,
    "lighton_ocr": _sized,
    "llava_next": _tiled_images,
    "llava_onevision": _tiled_images,
    "mistral3": _sized,
    "paddleocr_vl": _patches_kimi,
    "gemma4": _positioned,
    "mllama": _tiles,
}
# Types whose pixels have a row for each row of the batch.
BY_ROW = ("idefics3", "smolvlm", "mllama")


def image_batch(whole: Any, images: Sequence[int], words: int = 9, seed: int = 0) -> Pixels:
    """Return a batch as a processor and a collator make it, padded on the right.

    Args:
        whole: the whole model, whose tower says how many tokens an image has.
        images: how many images each row has.
        words: of the longest row, at least 4.
        seed: of everything that is drawn.
    """
    config = whole.config
    kind = config.model_type
    generator = torch.Generator().manual_seed(100 + seed)
    rows: list[list[int]] = []
    pixels: list[list[Pixels]] = []
    number = seed
    for row, count in enumerate(images):
        text = torch.randint(
            FIRST_WORD, LAST_WORD, (max(4, words - row),), generator=generator
        ).tolist()
        tokens = text[:2]
        pixels.append([])
        for _ in range(count):
            image = DRAWN[kind](config, number)
            number += 1
            pixels[-1].append(image)
            tokens += [IMAGE_TOKEN] * (1 if kind == "mllama" else _num_tokens(whole, image)) + [5]
        rows.append(tokens + text[2:])
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    seen = ids == IMAGE_TOKEN
    labels = ids.masked_fill((mask == 0) | seen, -100)
    labels[:, :2] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if kind in ("gemma3", "paligemma"):
        types = seen if kind == "gemma3" else (torch.arange(width) >= width - 4).expand_as(ids)
        batch["token_type_ids"] = types.long()
    if kind in (*BY_KIND, "gemma4", "paddleocr_vl"):
        batch["mm_token_type_ids"] = seen.long()
    if not sum(images):
        return batch
    return batch | (_by_row(kind, pixels, ids) if kind in BY_ROW else _joined(pixels))


def _joined(pixels: Sequence[Sequence[Pixels]]) -> Pixels:
    every = [image for row in pixels for image in row]
    if every[0]["pixel_values"].dim() == 5:  # tiles of images are padded to the most
        most = max(image["pixel_values"].shape[1] for image in every)
        for image in every:
            values = image["pixel_values"]
            padding = values.new_zeros(1, most - values.shape[1], *values.shape[2:])
            image["pixel_values"] = torch.cat([values, padding], dim=1)
    return {name: torch.cat([image[name] for image in every]) for name in every[0]}


def _by_row(kind: str, pixels: Sequence[Sequence[Pixels]], ids: Tensor) -> Pixels:
    most = max(map(len, pixels))
    like = next(image for row in pixels for image in row)
    batch: Pixels = {}
    for name, value in like.items():
        stacked = value.new_zeros(len(pixels), most, *value.shape[1:])
        for row, images in enumerate(pixels):
            for place, image in enumerate(images):
                stacked[row, place] = image[name][0]
        batch[name] = stacked
    if kind == "mllama":
        size, width = ids.shape
        seen = (ids == IMAGE_TOKEN).cumsum(dim=1)
        mask = torch.zeros(size, width, most, 4, dtype=torch.long)
        for row in range(size):
            for place in range(most):
                tiles = batch["aspect_ratio_mask"][row, place]
                mask[row, :, place] = (seen[row] == place + 1).long()[:, None] * tiles
        batch["cross_attention_mask"] = mask
    return batch


@torch.no_grad()
def _num_tokens(whole: Any, image: Pixels) -> int:
    arguments = dict(image)
    if whole.config.model_type in ("idefics3", "smolvlm"):
        arguments["pixel_values"] = arguments["pixel_values"][None]
    whole = whole.get_base_model() if isinstance(whole, PeftModel) else whole
    owner = whole if hasattr(whole, "get_image_features") else whole.model
    features = owner.get_image_features(**arguments)
    if not isinstance(features, Tensor | list | tuple):
        features = (
            features.last_hidden_state if features.pooler_output is None else features.pooler_output
        )
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1]).shape[0]
    return sum(part.reshape(-1, part.shape[-1]).shape[0] for part in features)
