"""What MLPs in tiles of tokens take on the device: the tensors between their products are those of
one tile, so their bytes fall by the number of tiles.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from meteredstep import second_step
from smallrun import settings, write_model
from torch import Tensor

from lema import LemaModel

HIDDEN, WIDTH, LAYERS, TOKENS = 32, 512, 3, 256


def row() -> dict[str, Tensor]:
    ids = torch.randint(1, 290, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def peak(tmp_path: Path, tile: int | None, width: int, **options: Any) -> int:
    """Return the most bytes of a step's tensors, and check that the plan counts them."""
    directory = tmp_path / str(width)
    if not directory.exists():
        sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": width}
        write_model(directory, "llama", dtype=torch.float32, max_position_embeddings=512, **sizes)
    settled = {"gradient_checkpointing": True, "device_memory": None, "loss_chunk_tokens": 16}
    model = LemaModel(settings(directory, tmp_path, mlp_tile_tokens=tile, **settled, **options))
    model.initialize_lora()
    model.skeleton.train()
    found = second_step(model, [row()]).peak
    model.close()
    return found


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_part_of_mlps_falls_by_the_number_of_tiles(tmp_path: Path, checkpointing: bool) -> None:
    # what grows with the width of MLPs
    parts = {}
    for tile in (None, TOKENS // 2, TOKENS // 4, TOKENS // 8):
        narrow, wide = (
            peak(tmp_path, tile, width) for width in (WIDTH, 2 * WIDTH)
        )
        parts[tile] = wide - narrow
    print(parts)
