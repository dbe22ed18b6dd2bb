"""Tiny models that hear, and batches with sounds that fit them; batches with frames of a video for
models of `imagerows` that see videos.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from imagerows import FIRST_WORD, LAST_WORD
from publishedclass import publish
from tinyconfig import tiny_config
from torch import Tensor
from transformers import PreTrainedConfig

__all__ = ["SOUND_TYPES", "VIDEO_TYPES", "publish_with_sounds", "sound_batch", "video_batch"]

SOUND_TOKEN = 90
MELS = 8
FRAMES = 32
AUDIO = {"max_source_positions": FRAMES // 2, "num_mel_bins": MELS}
SOUNDS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_audio": {"audio_config": AUDIO, "audio_token_index": SOUND_TOKEN},
    # four frames of the tower are a token of these
    "glmasr": {
        "audio_config": {"num_mel_bins": MELS, "intermediate_size": 128},
        "audio_token_id": SOUND_TOKEN,
    },
    "voxtral": {"audio_config": AUDIO | {"intermediate_size": 128}, "audio_token_id": SOUND_TOKEN},
}
TOKENS = {"qwen2_audio": 8, "glmasr": 4, "voxtral": 4}  # of one sound
MASKS = {"qwen2_audio": "feature_attention_mask", "glmasr": "input_features_mask"}
SOUND_TYPES = tuple(SOUNDS)
VIDEO_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
VIDEO = 2  # the kind of a token of a video


def sound_config(model_type: str) -> PreTrainedConfig:
    """Return a tiny config of a type, whose sounds have few tokens."""
    config = tiny_config(model_type)
    settings = deepcopy(config.to_dict())
    for name, value in SOUNDS[model_type].items():
        settings[name] = settings[name] | value if isinstance(value, dict) else value
    settings.pop("architectures", None)
    return type(config).from_dict(settings)


def publish_with_sounds(model_type: str, directory: Path) -> Path:
    """Write a random model of a type that hears, as its publisher would."""
    return publish(model_type, directory, sound_config(model_type))


def _rows(
    counts: Sequence[int], token: int, length: int, before: Sequence[int], seed: int
) -> dict[str, Tensor]:
    """Return rows of words with tokens in them that stand for what is seen or heard."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row, count in enumerate(counts):
        words = torch.randint(FIRST_WORD, LAST_WORD, (9 - row,), generator=generator).tolist()
        inside = [*before, *[token] * length, 5] * count
        rows.append(words[:2] + inside + words[2:])
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill((mask == 0) | (ids == token), -100)
    labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def sound_batch(model_type: str, counts: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Return a batch as a processor and a collator make it.

    Args:
        model_type: one of `SOUND_TYPES`.
        counts: how many sounds each row has.
        seed: of everything that is drawn.
    """
    batch = _rows(counts, SOUND_TOKEN, TOKENS[model_type], (), seed)
    if count := sum(counts):
        generator = torch.Generator().manual_seed(seed + 1)
        batch["input_features"] = torch.randn(count, MELS, FRAMES, generator=generator)
        if model_type in MASKS:
            batch[MASKS[model_type]] = torch.ones(count, FRAMES, dtype=torch.long)
    return batch


def video_batch(whole: Any, counts: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Return a batch with videos of two pairs of frames.

    Args:
        whole: the whole model, of one of `VIDEO_TYPES`.
        counts: how many videos each row has.
        seed: of everything that is drawn.
    """
    config = whole.config
    vision = config.vision_config
    by_frame = config.model_type in ("qwen3_vl", "glm4v")  # which stand apart in the text
    pairs, side = 2, 4
    length = side * side // vision.spatial_merge_size**2
    batch = _rows(
        [pairs * count if by_frame else count for count in counts],
        config.image_token_id if config.model_type == "glm4v" else config.video_token_id,
        length if by_frame else pairs * length,
        [config.video_start_token_id] if config.model_type == "glm4v" else [],
        seed,
    )
    token = config.image_token_id if config.model_type == "glm4v" else config.video_token_id
    batch["mm_token_type_ids"] = (batch["input_ids"] == token).long() * VIDEO
    if count := sum(counts):
        generator = torch.Generator().manual_seed(seed + 1)
        values = 3 * vision.temporal_patch_size * vision.patch_size**2
        grid = torch.tensor([[pairs, side, side]] * count)
        patches = count * pairs * side * side
        batch["pixel_values_videos"] = torch.randn(patches, values, generator=generator)
        batch["video_grid_thw"] = grid
    return batch
