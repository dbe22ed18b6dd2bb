"""`deterministic: true`: torch's deterministic algorithms while a model is open, and the
operations that have none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fulltraining import everything
from peft import LoraConfig
from smallrun import batch, opened, settings, token_rows, write_model
from torch import Tensor, nn

import lema
from lema import LemaModel
from lema.backend import BackendOptions
from lema.engine.numerics import deterministic_only
from lema.errors import ConfigError
from lema.model.partition import open_backend
from lema.train.full.training import FullTraining
from lema_cpu import CpuBackend

NAMED = "the operation put_ has no deterministic form"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def switches() -> tuple[bool, bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns, torch.backends.cudnn.benchmark


@pytest.mark.parametrize("warns", [False, True])
def test_algorithms_are_deterministic_only_while_a_model_is_open(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warns: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(warns, warn_only=warns)
    before = switches()
    with opened(settings(llama, tmp_path, deterministic=True)) as model:
        assert switches() == (True, False, False)
        model.close()
        assert switches() == before
    with opened(settings(llama, tmp_path)):
        assert switches() == before, "a model that does not ask for it changes nothing"


def test_what_somebody_set_while_a_model_was_open_stays(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path, deterministic=True)):
        torch.use_deterministic_algorithms(True, warn_only=True)
    assert switches()[:2] == (True, True)


def test_a_backend_is_asked_before_it_computes_anything(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because a library reads its settings when it is first used."""
    seen: list[bool] = []

    class Noting(CpuBackend):
        def __init__(self, device: str = "cpu", options: BackendOptions | None = None) -> None:
            assert options is not None
            seen.append(options.deterministic)
            super().__init__(device, options)

    monkeypatch.setattr("lema_cpu.CpuBackend", Noting)
    for asked in (True, False):
        open_backend(settings(llama, tmp_path, deterministic=asked)).close()
    assert seen == [True, False]


def _put(state: Tensor) -> Tensor:
    """Compute by an operation that torch has no deterministic form of."""
    return state.clone().put_(torch.tensor([0]), state.new_zeros(1))


class _PutInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, state: Tensor) -> Tensor:
        return state.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return _put(gradient)


@contextmanager
def not_deterministic(model: LemaModel, way: str, module: str = "mlp") -> Iterator[None]:
    """Have a module of layer 3 use such an operation in its forward, or in its backward only."""

    def change(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        if way == "forward":
            return _put(output)
        changed: Tensor = _PutInBackward.apply(output)  # type: ignore[no-untyped-call]
        return changed

    hook = model.split.layers[3].get_submodule(module).register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_operation_without_a_deterministic_form_is_named(
    llama: Path, tmp_path: Path, way: str, kept: bool
) -> None:
    config = settings(llama, tmp_path, deterministic=True, gradient_checkpointing=not kept)
    with opened(config) as model, not_deterministic(model, way):
        with pytest.raises(ConfigError, match=NAMED) as refused:
            model.get_trainer().train_step(batch(1))
        assert f"in the {way} of layer 3" in refused.value.where
        assert "deterministic: false" in refused.value.how
        assert refused.value.exit_code == 2


def test_it_is_named_in_an_evaluation(llama: Path, tmp_path: Path) -> None:
    with (
        opened(settings(llama, tmp_path, deterministic=True)) as model,
        not_deterministic(model, "forward"),
        pytest.raises(ConfigError, match=NAMED),
    ):
        model.get_trainer().evaluate(token_rows(2))


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_it_is_named_where_weights_train(llama: Path, tmp_path: Path, way: str) -> None:
    config = settings(llama, tmp_path, deterministic=True, strategy="resident")
    with opened(config, adapter=False) as model:
        model.skeleton.train()
        training = FullTraining(model.adapter, config, everything)
        with not_deterministic(model, way), pytest.raises(ConfigError, match=NAMED) as refused:
            training.accumulate([batch(1)])
        assert f"in the {way} of layer 3" in refused.value.where
        training.close()


def test_a_streamed_model_takes_the_setting_and_gives_it_back(llama: Path) -> None:
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = lema.streamed(llama, adapters, device="cpu", deterministic=True)
    assert switches()[0]
    with not_deterministic(model.opened, "backward"), pytest.raises(ConfigError, match=NAMED):
        model(**batch(1)).loss.backward()
    model.close()
    assert not switches()[0]


def test_a_library_that_was_used_before_is_told_of_by_torchs_own_words() -> None:
    said = (
        "Deterministic behavior was enabled with `torch.use_deterministic_algorithms(True)`, "
        "but this operation is "
    )
    said += (
        "not deterministic because it uses a library. You must set an environment variable: "
        "WORKSPACE=:4096:8."
    )
    with (
        pytest.raises(ConfigError, match="used in this process before") as refused,
        deterministic_only("there"),
    ):
        raise RuntimeError(said)
    assert "WORKSPACE=:4096:8" in refused.value.how


def test_without_the_setting_it_is_used(llama: Path, tmp_path: Path) -> None:
    with opened(settings(llama, tmp_path)) as model, not_deterministic(model, "backward"):
        model.get_trainer().train_step(batch(1))
