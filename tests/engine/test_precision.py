"""How numbers round: TF32 only where it is asked for, and half-precision runs that come back bit
for bit.
"""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from smallrun import adapter_of, batch, opened, settings, write_model
from torch import Tensor, nn

from lema import LemaModel, LemaTrainer
from lema.engine import numerics

TORCH_DEFAULT = ("highest", True)
NEW_SWITCHES = hasattr(torch.backends, "fp32_precision")
LEAVES = ("cuda.matmul", "cudnn.conv", "mkldnn.matmul", "mkldnn.conv")
ABOVE = ("", "cudnn")
# What somebody has set with torch's new switches, before a model is opened or while it is open.
HISTORIES: list[dict[str, str]] = [
    {"": "tf32"},  # as TrainingArguments(tf32=True) and torch_compile do
    {"": "ieee"},
    {"cuda.matmul": "tf32"},
    {"cudnn": "ieee", "cuda.matmul": "tf32"},
    {"cudnn.conv": "ieee"},
    {"": "tf32", "mkldnn.matmul": "bf16"},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    if NEW_SWITCHES:
        for name in (*ABOVE, *LEAVES):
            set_switch(name, "none")
    set_precision(*TORCH_DEFAULT)


def precision() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def set_precision(products: str, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions


def switch(name: str) -> Any:
    return reduce(getattr, filter(None, name.split(".")), torch.backends)


def set_switch(name: str, value: str) -> None:
    switch(name).fp32_precision = value


def switches() -> dict[str, str]:
    """What fp32 products and convolutions round as, by torch's new switches."""
    return {name: switch(name).fp32_precision for name in (*ABOVE, *LEAVES)}


@pytest.mark.parametrize("before", [TORCH_DEFAULT, ("medium", False), ("high", True)])
@pytest.mark.parametrize(
    ("tf32", "expected"), [(False, ("highest", False)), (True, ("high", True))]
)
def test_tf32_is_used_if_asked_for_and_only_while_a_model_is_open(
    llama: Path, tmp_path: Path, before: tuple[str, bool], tf32: bool, expected: tuple[str, bool]
) -> None:
    set_precision(*before)
    with opened(settings(llama, tmp_path, tf32=tf32)) as model:
        assert precision() == expected
        model.close()
        assert precision() == before
        set_precision("medium", True)
    assert precision() == ("medium", True)  # a model is closed once


def test_what_somebody_set_while_a_model_was_open_stays(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path, tf32=True)):
        set_precision("medium", False)
    assert precision() == ("medium", False)


@pytest.mark.skipif(not NEW_SWITCHES, reason="this torch has the old switches only")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_new_switches_of_torch_are_followed_and_put_back(
    llama: Path, tmp_path: Path, history: dict[str, str], tf32: bool
) -> None:
    for name, value in history.items():
        set_switch(name, value)
    before = switches()
    with opened(settings(llama, tmp_path, tf32=tf32)):
        assert precision() == (("high", True) if tf32 else ("highest", False))
        used = {switches()[name] for name in ("cuda.matmul", "mkldnn.matmul")}
        assert used == {"tf32" if tf32 else "ieee"}
        assert (switches()["cudnn.conv"] == "tf32") == tf32
    assert switches() == before


@pytest.mark.skipif(not NEW_SWITCHES, reason="this torch has the old switches only")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_a_new_switch_that_somebody_sets_while_a_model_is_open_stays(
    llama: Path, tmp_path: Path, history: dict[str, str], tf32: bool
) -> None:
    with opened(settings(llama, tmp_path, tf32=tf32)):
        own = switches()
        for name, value in history.items():
            set_switch(name, value)
    changed = {name: value for name, value in history.items() if value != own[name]}
    assert {name: switches()[name] for name in changed} == changed


@pytest.mark.skipif(not NEW_SWITCHES, reason="this torch has the old switches only")
def test_the_old_switches_are_enough_for_a_torch_without_new_ones(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "_libraries", list)
    with opened(settings(llama, tmp_path, tf32=True)):
        assert precision() == ("high", True)
    assert precision() == TORCH_DEFAULT


@pytest.mark.slow
@pytest.mark.parametrize("overflows", [2, 3])
def test_a_float16_run_resumes_bitwise_with_its_scaler(
    llama: Path, tmp_path: Path, overflows: int
) -> None:
    """One step overflows and is skipped before the checkpoint; after it the scale grows, two
    good steps later.
    """
    config = settings(llama, tmp_path / "out", dtype="float16", lora_dropout=0.1, max_grad_norm=0.5)
    with opened(config) as model:
        trainer = half_precision_trainer(model)
        for step in range(1, 4):
            before = adapter_of(model.skeleton)
            take(trainer, step, overflow=step == overflows)
            skipped = all(
                torch.equal(tensor, before[name])
                for name, tensor in adapter_of(model.skeleton).items()
            )
            assert skipped == (step == overflows)
        trainer.save_checkpoint(tmp_path / "saved")
        saved = trainer.scaler.state_dict()
        expected = []
        scales = []
        for step in range(4, 8):
            expected.append(take(trainer, step))
            scales.append(trainer.scaler.get_scale())
        straight = adapter_of(model.skeleton)
    assert len(set(scales)) > 1, (
        "the scale did not grow after the checkpoint, so nothing was resumed"
    )
    with opened(config) as model:
        trainer = model.get_trainer()
        torch.manual_seed(5)
        take(trainer, 99)
        trainer.load_checkpoint(tmp_path / "saved")
        assert trainer.scaler.state_dict() == saved
        found = []
        for step, scale in zip(range(4, 8), scales, strict=True):
            found.append(take(trainer, step))
            assert trainer.scaler.get_scale() == scale
        assert found == expected
        resumed = adapter_of(model.skeleton)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


def half_precision_trainer(model: LemaModel) -> LemaTrainer:
    trainer = model.get_trainer()
    trainer.ready()
    trainer.scaler.set_growth_interval(2)
    torch.manual_seed(4)
    return trainer


def take(trainer: LemaTrainer, seed: int, *, overflow: bool = False) -> float:
    """Take a step; return its loss. With `overflow`, one gradient in the middle of the model is
    infinite.
    """
    spoilt = trainer.model.split.layers[2].get_submodule("mlp.up_proj.lora_A.default")
    hook = spoilt.register_forward_hook(_infinite_gradient) if overflow else None
    try:
        return trainer.train_step(batch(seed))[1]
    finally:
        if hook is not None:
            hook.remove()


def _infinite_gradient(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    output.register_hook(lambda gradient: gradient * torch.inf)
    return output
