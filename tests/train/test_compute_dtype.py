"""A device that is slow in half precision: layers stay as they are stored until they are leased,
and compute in fp32.

The device is this one, with what is measured of it replaced by a number.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity import streamed_step
from smallrun import adapter_of, batch, opened, settings, token_rows, write_model
from whole import whole_of

import lema
from lema import LemaConfig, LemaModel
from lema.errors import ConfigError
from lema.model.computing import Computing, computing_of
from lema.model.files import ModelFiles
from lema.plan.planner import planner_of
from lema.storage import GlobalBinaryIndex
from lema.train.checkpoint.format import checkpoints, read_state
from lema.train.phases.plan import PhasePlan
from lema.train.phases.stage import settings_of_phase
from lema.train.run import train
from lema_cpu import products
from lema_tools.doctor.device import devices

SAID = "ignore:compute_dtype:UserWarning"
Slow = Callable[..., None]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Return what sets how many times slower this device is in half precision."""

    def set_to(times: float) -> None:
        monkeypatch.setattr(products, "has_instructions", lambda _: False)
        monkeypatch.setattr(products, "slowness", lambda _: times)

    return set_to


@pytest.mark.filterwarnings(SAID)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_slow_device_the_numbers_are_those_of_the_whole_model_in_fp32(
    name: str, dtype: torch.dtype, tmp_path: Path, measured: Slow
) -> None:
    base = write_model(tmp_path / "model", name, dtype=dtype)
    measured(30.0)
    parts = [batch(seed) for seed in (1, 2)]
    for changes in (
        {},
        {"strategy": "resident"},
        {"gradient_checkpointing": False, "prefetch_depth": 1},
    ):
        with opened(settings(base, tmp_path / "run", **changes)) as model:
            model.save_pretrained(tmp_path / "adapter")
            outcome = streamed_step(model, parts)
            assert {one.dtype for one in model.skeleton.parameters()} == {torch.float32}
        whole = whole_of(base, tmp_path / "adapter", parts, dtype=torch.float32)
        assert outcome.loss == whole.loss
        assert len(whole.gradients) == len(outcome.gradients)
        for key, gradient in whole.gradients.items():
            assert torch.equal(outcome.gradients[f"base_model.model.{key}"], gradient), key


@pytest.mark.parametrize("recompute", [True, False])
def test_products_under_autocast_are_those_of_the_whole_model_under_autocast(
    tmp_path: Path, recompute: bool
) -> None:
    base = write_model(tmp_path / "model", num_hidden_layers=3)
    parts = [batch(seed) for seed in (1, 2)]
    config = settings(base, tmp_path / "run", autocast="bfloat16", gradient_checkpointing=recompute)
    with opened(config) as model:
        model.save_pretrained(tmp_path / "adapter")
        outcome = streamed_step(model, parts)
        assert {one.dtype for one in model.skeleton.parameters()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = whole_of(base, tmp_path / "adapter", parts)
    assert outcome.loss == whole.loss
    for key, gradient in whole.gradients.items():
        assert torch.equal(outcome.gradients[f"base_model.model.{key}"], gradient), key


def test_autocast_of_half_precision_is_refused(tmp_path: Path) -> None:
    base = write_model(tmp_path / "model", num_hidden_layers=1, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="this model is bfloat16"):
        LemaModel(settings(base, tmp_path / "run", autocast="bfloat16"))


@pytest.mark.filterwarnings(SAID)
def test_layers_stay_in_half_precision_until_they_are_leased(
    tmp_path: Path, measured: Slow
) -> None:
    base = write_model(tmp_path / "model", dtype=torch.bfloat16)
    sizes = {}
    for times, compute in ((30.0, "auto"), (1.0, "auto"), (30.0, "weights"), (1.0, "float32")):
        measured(times)
        config = settings(base, tmp_path / "run", compute_dtype=compute, strategy="resident")
        with opened(config) as model:
            layer = model.memory.layers[0]
            stream = model.memory
            with stream.lease(0) as lease:
                types_leased = {weight.dtype for weight in lease.weights.values()}
            sizes[times, compute] = (
                layer.read_bytes,
                layer.nbytes,
                layer.expanded_bytes,
                types_leased,
            )
            assert not layer.casts  # else memory of the host would hold more than is stored
            assert model.planner.blueprint.expanded_bytes == layer.expanded_bytes
    slow = sizes[30.0, "auto"]
    fast = sizes[1.0, "auto"]
    assert slow[:2] == fast[:2] and slow[2] >= 2 * slow[0] and not fast[2]
    assert slow[3] == {torch.float32} and fast[3] == {torch.bfloat16}
    assert sizes[30.0, "weights"] == fast and sizes[1.0, "float32"] == slow


def test_one_line_says_so_and_the_plan_and_the_doctor_say_it_too(
    tmp_path: Path, measured: Slow
) -> None:
    base = write_model(tmp_path / "model", dtype=torch.bfloat16)
    config = settings(base, tmp_path / "run")
    line = (
        "compute_dtype: float32, because products in bfloat16 are slow on this device; weights "
        "stay bfloat16"
    )
    measured(30.0)
    with pytest.warns(UserWarning, match=line), opened(config):
        pass
    planner = planner_of(config)
    assert any(note.startswith(line) for note in planner.blueprint.notes)
    assert planner.demand().expanded_bytes == planner.blueprint.layers[0].expanded_bytes > 0
    (found,) = [one for one in devices() if one.name == "cpu"]
    assert "Products in bfloat16 and float16 are slow here" in found.what
    measured(1.0)
    with opened(config):  # warnings are errors
        pass
    assert not planner_of(config).blueprint.notes
    (found,) = [one for one in devices() if one.name == "cpu"]
    assert "slow" not in found.what


def test_a_device_with_instructions_for_a_type_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(_: torch.dtype) -> float:
        raise AssertionError("it was timed")

    monkeypatch.setattr(products, "slowness", never)
    assert products.fast_dtype(torch.float32) == torch.float32
    monkeypatch.setattr(products, "has_instructions", lambda _: True)
    assert products.fast_dtype(torch.bfloat16) == torch.bfloat16


def test_timing_leaves_threads_and_generators_as_they_were() -> None:
    products.slowness.cache_clear()
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    assert products.slowness(torch.float16) > 0
    assert products.slowness(torch.float16) == products.slowness(torch.float16)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings(SAID)
def test_a_run_keeps_the_type_that_it_began_with(tmp_path: Path, measured: Slow) -> None:
    base = write_model(tmp_path / "model", dtype=torch.bfloat16)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{row}\n".replace("'", '"') for row in token_rows(16)))
    given: dict[str, Any] = {
        "train_data": str(data),
        "max_steps": 4,
        "lr_scheduler_type": "constant",
    }
    measured(30.0)
    train(settings(base, tmp_path / "whole", **given))
    train(settings(base, tmp_path / "run", **{**given, "max_steps": 2}, save_steps=2))
    (first,) = checkpoints(tmp_path / "run")
    assert read_state(first)["compute_dtype"] == "float32"
    measured(1.0)  # the run goes on where half precision is fast
    train(settings(base, tmp_path / "run", **given), resume=True)
    whole, resumed = (
        (tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "run")
    )
    assert whole == resumed


@pytest.mark.filterwarnings(SAID)
def test_another_type_is_told_when_a_run_goes_on(
    tmp_path: Path, measured: Slow, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_model(tmp_path / "model", dtype=torch.bfloat16)
    measured(30.0)
    config = settings(base, tmp_path / "run", max_steps=1, save_steps=1)
    with opened(config) as model:
        model.get_trainer().fit(token_rows(8))
    said: list[str] = []
    for compute in ("auto", "bfloat16"):
        measured(30.0)
        changed = settings(base, tmp_path / "run", max_steps=2, compute_dtype=compute, save_steps=0)
        with opened(changed) as model:
            model.get_trainer().fit(token_rows(8), resume=True, say=said.append)
        told = any("compute_dtype: 'float32' -> 'bfloat16'" in line for line in said)
        assert told == (compute == "bfloat16")


@pytest.mark.filterwarnings(SAID)
def test_an_adapter_that_is_computed_in_another_type_than_it_was_trained_in_says_so(
    tmp_path: Path, measured: Slow, recwarn: pytest.WarningsRecorder
) -> None:
    base = write_model(tmp_path / "model", dtype=torch.bfloat16)
    out = tmp_path / "run"
    measured(30.0)
    with opened(settings(base, out, max_steps=1, save_steps=1)) as model:
        model.get_trainer().fit(token_rows(8))
        model.save_pretrained(out)
    # what a machine chose is nobody's setting
    assert LemaConfig.from_pretrained(out).compute_dtype == "auto"
    (checkpoint,) = checkpoints(out)
    for place in (out, checkpoint):
        measured(30.0)
        LemaModel.from_pretrained(place).close()
        measured(1.0)
        LemaModel.from_pretrained(place, compute_dtype="float32").close()
        with pytest.warns(
            UserWarning, match="trained in float32, and here the model computes in bfloat16, which"
        ):
            LemaModel.from_pretrained(place).close()
    assert not [one for one in recwarn if "trained in" in str(one.message)]


def test_of_several_processes_the_first_decides(tmp_path: Path) -> None:
    base = write_model(tmp_path / "model", dtype=torch.bfloat16)
    config = settings(base, tmp_path / "run")
    index = GlobalBinaryIndex(base)
    files = ModelFiles(config)
    replicas = SimpleNamespace(first=False, everyone=lambda mine: [(None, torch.float32), mine])
    device: Any = SimpleNamespace(replicas=replicas, fast_dtype=lambda dtype: dtype)
    found = computing_of(files.config, index, config, device)
    assert found == Computing(torch.bfloat16, torch.float32, measured=True) and found.narrow


def test_a_plan_for_another_machine_is_not_measured_on_this_one(
    tmp_path: Path, measured: Slow
) -> None:
    base = write_model(tmp_path / "model", dtype=torch.bfloat16)
    measured(30.0)
    config = settings(base, tmp_path / "run")
    files = ModelFiles(config)
    assert computing_of(files.config, GlobalBinaryIndex(base), config, None).dtype == torch.bfloat16


@pytest.mark.filterwarnings(SAID)
def test_streamed_models_and_saved_adapters_follow(tmp_path: Path, measured: Slow) -> None:
    base = write_model(tmp_path / "model", dtype=torch.bfloat16)
    measured(30.0)
    with opened(settings(base, tmp_path / "run")) as model:
        model.save_pretrained(tmp_path / "adapter")
    rows = batch(1)
    whole = whole_of(base, tmp_path / "adapter", [rows], dtype=torch.float32)
    streamed = lema.streamed(str(base), str(tmp_path / "adapter"), device="cpu")
    try:
        assert float(streamed(**rows).loss.detach()) == whole.loss
    finally:
        streamed.close()
    reopened = LemaModel.from_pretrained(tmp_path / "adapter")
    try:
        assert reopened.split.dtype == torch.float32
        assert set(adapter_of(reopened.skeleton)) == set(whole.gradients)
    finally:
        reopened.close()


def test_phases_that_train_weights_compute_in_their_type(tmp_path: Path, measured: Slow) -> None:
    base = write_model(tmp_path / "model", dtype=torch.bfloat16)
    measured(30.0)
    phase = {"trains": "full", "tokens": 144, "mixture": {"rows": 1.0}, "learning_rate": 1e-3}
    plan = PhasePlan(phases=[phase], batch_size=4, max_length=12)
    config = settings_of_phase(settings(base, tmp_path / "run"), plan, plan.phases[0])
    assert config.compute_dtype == "weights"
    wide = config.model_copy(update={"compute_dtype": "float32"})
    with pytest.raises(
        ConfigError, match="weights of the model that train compute in the type that they have"
    ):
        planner_of(wide, chosen=lambda _: lambda _: True)


def test_what_settings_say_is_a_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compute_dtype"):
        LemaConfig(str(tmp_path), compute_dtype="int8")
    assert LemaConfig(str(tmp_path), compute_dtype=torch.float32).compute_dtype == "float32"
