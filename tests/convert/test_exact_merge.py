"""A merge is the sum in fp32, rounded once; at random, it keeps in the mean what rounding would
lose.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_merge import trained_adapter
from tiny import NUM_LAYERS, write_checkpoint

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.convert import merge_adapter
from lema.errors import ConfigError
from lema.lora.files import WEIGHTS
from lema.lora.merge import rounded

HALVES = [torch.bfloat16, torch.float16]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def exact_sum(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + scale B A, with the product in fp32 as PEFT has it, and the sum in fp64."""
    return base.double() + ((b.float() @ a.float()) * scale).double()


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def base_and_adapter(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("exact")
    base = write_checkpoint("llama", place, dtype=getattr(torch, request.param)).streamed
    return base, trained_adapter(base, place / "adapter")


def changes(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the weights that merging should give, in fp64."""
    values = load_file(adapter / WEIGHTS)
    weights = tensors(base)
    config = json.loads((adapter / "adapter_config.json").read_text())
    found = {}
    for key in values:
        if key.endswith(".lora_A.weight"):
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a = values[key]
            b = values[key.replace("lora_A", "lora_B")]
            found[f"{module}.weight"] = exact_sum(
                weights[f"{module}.weight"], a, b, config["lora_alpha"] / config["r"]
            )
    assert len(found) == 7 * NUM_LAYERS
    return found


@pytest.mark.slow
def test_a_merged_weight_is_the_exact_sum_rounded_once(
    base_and_adapter: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = base_and_adapter
    before = tensors(base)
    merged = tensors(merge_adapter(adapter, tmp_path / "merged"))
    expected = changes(base, adapter)
    for name, weight in merged.items():
        if name in expected:
            assert torch.equal(weight, expected[name].float().to(weight.dtype)), name
            assert not torch.equal(weight, before[name])
        else:
            assert torch.equal(weight, before[name]), name


@pytest.mark.slow
def test_at_random_each_weight_is_a_neighbour_of_the_sum(
    base_and_adapter: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = base_and_adapter
    nearest = tensors(merge_adapter(adapter, tmp_path / "nearest"))
    merged = tensors(merge_adapter(adapter, tmp_path / "merged", rounding="stochastic"))
    dtype = nearest["lm_head.weight"].dtype
    if dtype == torch.float32:
        # nothing is left to round
        assert all(torch.equal(merged[name], nearest[name]) for name in nearest)
        return
    expected = {name: weight.float() for name, weight in changes(base, adapter).items()}
    assert any(not torch.equal(merged[name], nearest[name]) for name in expected)
    for name, weight in merged.items():
        if name not in expected:
            assert torch.equal(weight, nearest[name]), name
            continue
        missed = (weight.double() - expected[name].double()).abs()
        gap = (
            expected[name].double().abs().clamp_min(torch.finfo(dtype).smallest_normal)
            * torch.finfo(dtype).eps
        )
        assert bool((missed <= gap).all()), name


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_however_the_files_are_cut(tmp_path: Path) -> None:
    base = write_checkpoint("llama", tmp_path, dtype=torch.bfloat16).streamed
    adapter = trained_adapter(base, tmp_path / "adapter")

    def merge(name: str, size: int, seed: int) -> dict[str, torch.Tensor]:
        return tensors(
            merge_adapter(adapter, tmp_path / name, size, rounding="stochastic", seed=seed)
        )

    one = merge("one", 5_000_000, 1)
    same = merge("same", 20_000, 1)
    other = merge("other", 5_000_000, 2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    first, second = (one[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("delta", [1e-6, 1e-5, -1e-6])
def test_a_small_change_is_kept_in_the_mean_and_lost_by_the_nearest(
    dtype: torch.dtype, delta: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(1_000_000, generator=generator) * 0.02).to(dtype)
    exact = weight.float() + delta
    applied = rounded(exact, dtype, "stochastic", 0, "weight").double() - weight.double()
    error = float(applied.std()) / len(weight) ** 0.5
    assert abs(float(applied.mean()) - delta) < 4 * error < abs(delta)
    nearest = rounded(exact, dtype, "nearest", 0, "weight").double() - weight.double()
    if dtype == torch.bfloat16:
        # As it was measured of a trainer that merges at every step: of 1e-6, 98 % of weights see
        # nothing.
        unchanged = float((nearest == 0).double().mean())
        kept = float(nearest.mean()) / delta
        assert (
            (unchanged > 0.97 and kept < 0.04)
            if abs(delta) == 1e-6
            else (0.8 < unchanged < 0.9 and kept < 0.3)
        )


@pytest.mark.parametrize("dtype", HALVES)
def test_each_neighbour_is_as_likely_as_it_is_near(dtype: torch.dtype) -> None:
    gap = 2 ** -(7 if dtype == torch.bfloat16 else 10)
    for sign in (1.0, -1.0):
        for share in (0.0, 0.25, 0.5, 0.9):
            exact = torch.full((40_000,), sign * (1 + share * gap))
            found = rounded(exact, dtype, "stochastic", 7, "weight").float()
            assert set(found.tolist()) <= {sign, sign * (1 + gap)}
            assert (
                abs(float((found != sign).float().mean()) - share)
                < 4 * (share * (1 - share) / 40_000) ** 0.5 + 1e-9
            )


@pytest.mark.parametrize("dtype", HALVES)
def test_the_ends_of_the_numbers_are_kept(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    tiny = torch.finfo(dtype).smallest_normal
    whole = torch.tensor(
        [0.0, -0.0, 1.0, -2.0, top, -top, tiny, tiny / 4, float("inf"), float("-inf"), float("nan")]
    )
    found = rounded(whole, dtype, "stochastic", 0, "weight")
    assert torch.equal(found.view(torch.int16), whole.to(dtype).view(torch.int16))
    below = torch.full((40_000,), tiny / 3)  # among numbers with fewer digits
    mean = float(rounded(below, dtype, "stochastic", 0, "weight").double().mean())
    error = tiny * 1e-3 / 2
    assert abs(mean - tiny / 3) < 4 * error
    assert set(rounded(-below, dtype, "stochastic", 0, "weight").sign().tolist()) == {-1.0}


@pytest.mark.slow
def test_merging_an_adapter_of_small_changes(tmp_path: Path) -> None:
    base = write_checkpoint("llama", tmp_path, dtype=torch.bfloat16).streamed
    adapter = trained_adapter(base, tmp_path / "adapter")
    values = load_file(adapter / WEIGHTS)
    with safe_open(adapter / WEIGHTS, "pt") as file:
        metadata = file.metadata()
    rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
    alpha = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"]
    for name, value in values.items():  # B A is 1e-6 everywhere, once it is scaled
        value.fill_(1.0 if "lora_A" in name else 1e-6 / alpha)
    assert rank * (1e-6 / alpha) * (alpha / rank) == pytest.approx(1e-6)
    save_file(values, adapter / WEIGHTS, metadata)
    before = tensors(base)
    nearest = tensors(merge_adapter(adapter, tmp_path / "nearest"))
    random = tensors(merge_adapter(adapter, tmp_path / "random", rounding="stochastic"))
    names = [name for name in before if "proj" in name]
    applied = {
        kind: torch.cat(
            [(found[name].double() - before[name].double()).flatten() for name in names]
        )
        for kind, found in (("nearest", nearest), ("random", random))
    }
    count = len(applied["random"])
    error = float(applied["random"].std()) / count**0.5
    assert abs(float(applied["random"].mean()) - 1e-6) < 4 * error
    assert float((applied["nearest"] == 0).double().mean()) > 0.98


@pytest.mark.slow
def test_the_command_rounds_as_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_checkpoint("llama", tmp_path, dtype=torch.bfloat16).streamed
    adapter = trained_adapter(base, tmp_path / "adapter")
    options = ["--rounding", "stochastic", "--seed", "3"]
    assert run(app, ["merge", str(adapter), str(tmp_path / "out"), *options]) == 0
    expected = tensors(merge_adapter(adapter, tmp_path / "expected", rounding="stochastic", seed=3))
    found = tensors(tmp_path / "out")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (
        run(app, ["merge", str(adapter), str(tmp_path / "new"), "--rounding", "up"])
        == ConfigError.exit_code
    )
    assert (
        "there is no rounding 'up'" in capsys.readouterr().err and not (tmp_path / "new").exists()
    )
