"""Runs whose MLPs run in tiles: broken off and resumed, they end bit for bit where they would have,
and a model of `lema.streamed` in tiles gives any caller the numbers of all tokens at once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import relative_difference
from peft import LoraConfig
from smallrun import logged, run_fit, same, settings, token_rows
from tiny import Checkpoint, micro_batches

import lema
from lema import LemaConfig
from lema.model.layers.tiled_call import TiledCall
from lema.train.checkpoint.resume import as_begun, settings_then

CheckpointOf = Callable[..., Checkpoint]

pytestmark = pytest.mark.usefixtures("fast_disk")

TILE = 5


def test_a_run_that_is_killed_between_checkpoints_resumes_bitwise(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies within a tile of the fourth step, and the last checkpoint is of the second."""

    def config(name: str) -> LemaConfig:
        changes: dict[str, Any] = {"save_steps": 2, "max_steps": 4, "mlp_tile_tokens": TILE}
        changes |= {"lora_dropout": 0.1, "micro_batch_size": 2}
        return settings(
            llama, tmp_path / name, lora_target_modules=["up_proj", "down_proj"], **changes
        )

    rows = token_rows(16)
    count = 0
    last = None
    gradients = TiledCall.gradients

    def counted(call: TiledCall, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count == last:
            raise KeyboardInterrupt
        return gradients(call, *args)

    monkeypatch.setattr(TiledCall, "gradients", counted)
    _, straight = run_fit(config("straight"), rows)
    last = count * 7 // 8
    count = 0
    with pytest.raises(KeyboardInterrupt):
        run_fit(config("broken"), rows)
    assert [path.name for path in (tmp_path / "broken").glob("checkpoint-*")] == ["checkpoint-2"]
    last = None
    _, resumed = run_fit(config("broken"), rows, resume=True)
    assert same(resumed, straight)
    assert logged(config("broken"), "loss") == logged(config("straight"), "loss")
    checkpoint = tmp_path / "straight" / "checkpoint-2"
    assert settings_then(checkpoint)["mlp_tile_tokens"] == TILE
    left_open = config("straight").model_copy(update={"mlp_tile_tokens": "auto"})
    assert as_begun(left_open, checkpoint).mlp_tile_tokens == TILE


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_streamed_model_in_tiles(checkpoint_of: CheckpointOf, checkpointing: bool) -> None:
    (batch,) = micro_batches(1, padding=True)
    found = []
    for tile in (None, TILE):
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = lema.streamed(
            checkpoint_of("llama").streamed,
            config,
            device="cpu",
            seed=1,
            mlp_tile_tokens=tile,
            gradient_checkpointing=checkpointing,
            micro_batch_size=1,
        )
        torch.manual_seed(3)
        outputs = model.train()(**batch)
        outputs.loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append([outputs.loss.detach(), outputs.logits.detach(), torch.cat(gradients)])
        with torch.no_grad():
            found[-1].append(model.eval()(**batch).logits)
            found[-1].append(
                model.generate(batch["input_ids"][:, :9], max_new_tokens=3, min_new_tokens=3)
            )
        model.close()
    for expected, in_tiles in zip(*found, strict=True):
        assert relative_difference(in_tiles.float(), expected.float()) < 1e-6
