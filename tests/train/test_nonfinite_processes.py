"""A gradient that is not finite in one of several processes stops the step in all, and the layer
is named.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from forked import run_forked
from smallrun import adapter_of, draw_b, same, settings, token_rows, write_model
from stopped import WAYS
from test_nonfinite_place import spoil
from torch import Tensor

from lema import LemaModel
from lema.data import Batches
from lema.errors import NonFiniteError

ROWS = token_rows(8)


def spoilt_in_turn(place: Path, way: str) -> None:
    """Have NaN flow back through one layer after the other in the last process; then take a step
    as a new run does.
    """
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    model = LemaModel(settings(place / "model", place / way, **WAYS[way]))
    model.initialize_lora()
    draw_b(model.skeleton)
    trainer = model.get_trainer()
    replicas = model.backend.replicas
    batches = Batches(
        ROWS, 8, shuffle=False, rank=replicas.rank, size=replicas.size, micro_batch_size=2
    )
    parts = batches.micro_batches([0])
    before = adapter_of(model.skeleton)
    for layer in (7, 4, 1):
        hook = spoil(model, layer) if last else None
        with pytest.raises(
            NonFiniteError, match="a gradient is not finite; the optimizer made no step"
        ) as caught:
            trainer.accumulate(parts)
        if hook is not None:
            hook.remove()
        # Processes that compute the layer together all see what it hands down; others have layers
        # of their own.
        sees = last or model.backend.parallel.size > 1
        assert caught.value.where.endswith(
            f"model.layers.{layer}" if sees else "in another process"
        ), caught.value
        assert (trainer.global_step, len(trainer.ready().state)) == (0, 0)
        assert same(adapter_of(model.skeleton), before)
    _loss_is_not_finite(model, parts, last)
    trainer.accumulate(parts)
    after: dict[str, Tensor] = adapter_of(model.skeleton)
    anew = LemaModel(model.config)
    anew.initialize_lora()
    draw_b(anew.skeleton)
    anew.get_trainer().accumulate(parts)
    assert same(after, adapter_of(anew.skeleton)) and not same(after, before)
    anew.close()
    model.close()


def _loss_is_not_finite(
    model: LemaModel, parts: Sequence[Mapping[str, Tensor]], last: bool
) -> None:
    """NaN arises in the last process alone, in the norm before the head."""

    def spoilt(module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
        return output * torch.nan

    trainer = model.get_trainer()
    norm = model.skeleton.get_submodule("model.norm")
    hook = norm.register_forward_hook(spoilt) if last else None
    with pytest.raises(NonFiniteError, match="the loss is nan") as caught:
        trainer.accumulate(parts)
    if hook is not None:
        hook.remove()
    sees = last or model.backend.parallel.size > 1
    assert caught.value.where.endswith("the head" if sees else "it comes from another process"), (
        caught.value
    )
    assert trainer.global_step == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_not_finite_in_one_process_is_named_in_all(
    way: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    run_forked(spoilt_in_turn, [tmp_path, way], 2, tmp_path, 120)
