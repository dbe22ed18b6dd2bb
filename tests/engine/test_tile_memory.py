"""What MLPs in tiles of tokens take on the device: the tensors between their products are those of
one tile, so their bytes fall by the number of tiles.
"""

from pathlib import Path

import pytest
import torch
from meteredstep import second_step
from smallrun import settings, write_model
from torch import Tensor

from lema import LemaModel
from lema.plan.work.workload import MicroBatch

HIDDEN, WIDTH, LAYERS, TOKENS = 32, 512, 3, 256


def row() -> dict[str, Tensor]:
    ids = torch.randint(1, 290, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def peaks(
    tmp_path: Path, width: int, tiles: list[int | None], *, recompute: bool
) -> dict[int | None, int]:
    """Return the most bytes of a step's tensors with tiles of some sizes. A recomputed layer takes
    as much less than without as the plan says."""
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": width}
    directory = write_model(
        tmp_path / str(width), dtype=torch.float32, max_position_embeddings=512, **sizes
    )
    options = {"gradient_checkpointing": recompute, "device_memory": None, "loss_chunk_tokens": 16}
    model = LemaModel(settings(directory, tmp_path, lora_target_modules=["q_proj"], **options))
    model.initialize_lora()
    model.skeleton.train()
    found = {}
    planned = {}
    for tile in tiles:
        with model.split.tiles.sized(tile):
            found[tile] = second_step(model, [row()]).peak
        planned[tile] = model.planner.work(MicroBatch(1, TOKENS, tile=tile)).of(0).working_bytes
    model.close()
    if recompute:
        less = [found[None] - found[tile] for tile in tiles]
        assert less == [planned[None] - planned[tile] for tile in tiles]
    return found


@pytest.mark.parametrize("recompute", [True, False])
def test_the_part_of_mlps_falls_by_the_number_of_tiles(tmp_path: Path, recompute: bool) -> None:
    tiles = [None, TOKENS // 2, TOKENS // 4, TOKENS // 8]
    narrow, wide = (
        peaks(tmp_path, width, tiles, recompute=recompute) for width in (WIDTH, 2 * WIDTH)
    )
    at_once, *in_tiles = (wide[tile] - narrow[tile] for tile in tiles)
    tensor = 4 * WIDTH * TOKENS
    # Three tensors as wide as the MLP are kept, and the backward of one has as many.
    assert at_once == 3 * tensor * (2 if recompute else 1 + LAYERS)
    assert in_tiles == [6 * tensor // 2, 6 * tensor // 4, 6 * tensor // 8]
