"""A step asks the device for its numbers once, when all of it is queued: until then the host
runs ahead.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smallrun import opened, settings, token_rows, write_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lema import LemaModel
from lema.data import collate
from lema.engine.head.loss import split_batch
from lema.model import flow

# What makes the host wait for a device: numbers, truth values and sizes that depend on values.
WAITING = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
}


class Waits(TorchDispatchMode):
    """Notes where the host asks a tensor for its values."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        # bytes: the generator's state, which is the host's
        if name in WAITING and args[0].dtype != torch.uint8:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        # What the model's own code runs beside its layers is passed through `lema.model.flow`.
        between = {Path(__file__), Path(flow.__file__)}
        frame = [frame for frame in frames if Path(frame.filename) not in between][-1]
        self.places.append(f"{name} in {Path(frame.filename).name}: {frame.line}")


class Copies(TorchFunctionMode):
    """Adds what copies numbers to the host; tokens and labels are there already."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "cpu", "numpy") and args[0].is_floating_point():
            self.waits.note(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    directory = tmp_path_factory.mktemp("models")
    return lambda name, **changes: write_model(directory / name, name, **changes)


def waits_of_a_step(model: LemaModel, rows: list[dict[str, list[int]]]) -> list[str]:
    # Fused, as on every device but the host: the other kind counts its steps in host memory, which
    # waits for nothing.
    trainer = model.get_trainer(torch.optim.AdamW(model.get_trainable_parameters(), fused=True))
    micro_batches = split_batch(collate(rows), 2)
    trainer.accumulate(micro_batches)  # the first step learns how the model is made
    with Waits() as waits, Copies(waits):
        trainer.accumulate(micro_batches)
    return waits.places


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "changes", [{}, {"gradient_checkpointing": False}, {"max_grad_norm": 0.1}], ids=str
)
def test_a_step_asks_for_numbers_once(
    model_of: Callable[..., Path], tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    # of one length: no mask is made
    rows = [{key: ids[:9] for key, ids in row.items()} for row in token_rows(6)]
    with opened(settings(model_of(name), tmp_path, **changes)) as model:
        places = waits_of_a_step(model, rows)
    # transformers looks once, before the layers and at the head, whether rows are packed.
    ours = [place for place in places if "in masking_utils.py" not in place]
    assert len(ours) == 1, ours
    assert "torch.stack(numbers)" in ours[0], ours
