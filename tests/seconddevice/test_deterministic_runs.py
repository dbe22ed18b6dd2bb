"""With `deterministic: true` runs on a device are bitwise equal, also if operations add in an
order of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from phaseruns import SOURCES, two
from smallrun import adapter_of, same, settings, token_rows, write_model
from torch import Tensor, nn

from lema import LemaModel
from lema.errors import Stopped
from lema.train.phases.run import run_phases

ORDERS = Random(5)
ROWS = token_rows(22)


class Gathered(torch.autograd.Function):
    """Three terms of a hidden state, added in the order in which they arrive, unless torch asks
    for one order.
    """

    @staticmethod
    def forward(_: Any, state: Tensor) -> Tensor:
        return _added(state)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return _added(gradient)


def _added(state: Tensor) -> Tensor:
    terms = [state * share for share in (0.1, 0.7, 0.2)]
    first = 0 if torch.are_deterministic_algorithms_enabled() else ORDERS.randrange(3)
    return terms[first] + terms[(first + 1) % 3] + terms[(first + 2) % 3]


@contextmanager
def gathered(model: LemaModel) -> Iterator[None]:
    """Have a module of each layer use such an operation."""

    def change(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        changed: Tensor = Gathered.apply(output)  # type: ignore[no-untyped-call]
        return changed

    hooks = [
        layer.get_submodule("mlp").register_forward_hook(change) for layer in model.split.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def trained(
    directory: Path, out: Path, *, deterministic: bool, stop_after: int | None = None
) -> dict[str, Tensor]:
    """Return the adapter after three steps; with `stop_after`, of a run that was stopped and
    resumed.
    """
    way: dict[str, Any] = {
        "device": "second",
        "max_steps": 3,
        "lora_dropout": 0.1,
        "micro_batch_size": 2,
    }
    config = settings(directory, out, **way, deterministic=deterministic)
    for resumed in (False, True)[stop_after is None :]:
        model = LemaModel(config)
        model.initialize_lora()
        trainer = model.get_trainer()

        def why(trainer: Any = trainer, resumed: bool = resumed) -> str | None:
            return "a test" if not resumed and trainer.global_step == stop_after else None

        with gathered(model):
            try:
                trainer.fit(ROWS, stop=why, resume=resumed and stop_after is not None)
            except Stopped:
                assert not resumed
        found = adapter_of(model.skeleton)
        model.close()
    return {name: one.cpu() for name, one in found.items()}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_two_runs_are_equal_and_a_resumed_one_is_too(llama: Path, tmp_path: Path) -> None:
    first, second = (
        trained(llama, tmp_path / name, deterministic=True) for name in ("first", "second")
    )
    assert same(first, second)
    assert same(first, trained(llama, tmp_path / "resumed", deterministic=True, stop_after=1))


def test_without_it_they_are_equal_to_rounding_only(llama: Path, tmp_path: Path) -> None:
    first, second = (
        trained(llama, tmp_path / name, deterministic=False) for name in ("first", "second")
    )
    assert not same(first, second), "the operation is deterministic, and proves nothing"
    for name, one in first.items():
        torch.testing.assert_close(one, second[name], rtol=1e-2, atol=1e-3)


def test_phases_keep_it_too(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each phase opens a model of its own."""
    seen: list[bool] = []
    forward = nn.Linear.forward

    def noting(module: nn.Linear, state: Tensor) -> Tensor:
        if not state.is_meta:
            seen.append(torch.are_deterministic_algorithms_enabled())
        return forward(module, state)

    monkeypatch.setattr(nn.Linear, "forward", noting)
    config = settings(llama, tmp_path / "out", device="second", deterministic=True)
    run_phases(config, two(2, seed=3), SOURCES)
    assert seen == [True] * len(seen) != []
    assert not torch.are_deterministic_algorithms_enabled()
