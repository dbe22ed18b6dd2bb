"""Kernels of `liger-kernel` under `arithmetic: fast`, with a stand-in for the package that computes
as torch does.

`tests/peers_kernels` has the package itself.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import everytype
import pytest
import torch
from everytype import compare, micro_batches, opened, write_model
from parity import draw_b
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, MixtralConfig
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from lema.model.flow import Tape
from lema.model.shared_inputs import SharedInputs
from lema.train.run import _about
from lema_cpu import CpuBackend
from lema_cuda import CudaBackend, liger

LAYERS = 8
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAST = {"arithmetic": "fast", "attn_implementation": "sdpa"}
ROTATE = modeling_llama.apply_rotary_pos_emb


class Fusing(CpuBackend):
    """The CPU, with the kernels of the CUDA backend."""

    fuse = CudaBackend.fuse


class StandIn:
    """The functions of the package that are used, which note what they are given and what their
    kernels compute.
    """

    def __init__(self) -> None:
        self.options: list[dict[str, bool]] = []
        self.calls = Counter[str]()

    def bound(self, module: nn.Module, name: str) -> None:
        own = type(module).forward

        def forward(given: nn.Module, *args: Any, **kwargs: Any) -> Any:
            assert not any(one.is_meta for one in args if isinstance(one, Tensor)), (
                "a kernel reads values"
            )
            self.calls[name] += 1
            return own(given, *args, **kwargs)

        vars(module)["forward"] = forward.__get__(module)
        vars(module)["in_place"] = True

    def rotate(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["rope"] += 1
        return ROTATE(*args, **kwargs)

    def apply(self, code: ModuleType) -> Callable[..., None]:
        """Return a function as the package has one for each type of model."""

        def apply(
            rope: bool = True,
            cross_entropy: bool = False,
            fused_linear_cross_entropy: bool = True,
            rms_norm: bool = True,
            swiglu: bool = True,
            model: Any = None,
        ) -> None:
            self.options.append(
                {"loss": cross_entropy or fused_linear_cross_entropy, "swiglu": swiglu}
            )
            code.apply_rotary_pos_emb = lambda *args, **kwargs: self.rotate(*args, **kwargs)
            self.bound(model.model.norm, "outside")
            for layer in model.model.layers:
                self.bound(layer.input_layernorm, "norm")
                self.bound(layer.mlp.experts if hasattr(layer.mlp, "experts") else layer.mlp, "mlp")

        return apply


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Have the package be installed, as far as this project can tell."""
    stand_in = StandIn()
    module = ModuleType("liger_kernel.transformers.monkey_patch")
    known = {"llama": stand_in.apply(modeling_llama), "mixtral": stand_in.apply(modeling_mixtral)}
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = known  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        liger, "installed_version", lambda name: "0.8.5" if name == liger.PACKAGE else None
    )
    monkeypatch.setattr(everytype, "CpuBackend", Fusing)
    yield stand_in
    assert modeling_llama.apply_rotary_pos_emb is ROTATE, "a name of transformers was not put back"


def test_fast_computes_by_the_kernels_and_exact_never_does(
    tmp_path: Path, package: StandIn
) -> None:
    found = compare(LlamaConfig(**SIZES), tmp_path / "fast", **FAST)
    assert max(found.logits, found.loss) <= 1e-6 and found.worst <= 5e-6
    assert package.options == [{"loss": False, "swiglu": True}]
    assert package.calls["norm"] == package.calls["mlp"] == package.calls["rope"] > 2 * LAYERS
    assert not package.calls["outside"], "the head is LEMA's own"
    package.calls.clear()
    assert compare(LlamaConfig(**SIZES), tmp_path / "exact").worst == 0
    assert not package.calls and len(package.options) == 1


def test_a_layer_without_values_runs_its_own_code_so_that_inputs_are_shared_still(
    tmp_path: Path, package: StandIn
) -> None:
    with opened(write_model(LlamaConfig(**SIZES), tmp_path), **FAST) as model:
        model.adapter.loss(micro_batches()).backward()
        sharing: list[SharedInputs] = list(model.split.attached.sharing.values())
        groups = [{len(group) for group in (one._groups or {}).values()} for one in sharing]
        norm = model.split.layers[0].input_layernorm
        assert not norm.in_place
        with torch.device("cpu"):  # a mode of torch's that looks at no operation
            package.calls.clear()
            norm.to_empty(device="cpu")(torch.ones(1, 2, 32))
            assert package.calls["norm"] == 1
        with Tape():  # which follows what is made of experts that are leased in groups
            norm(torch.ones(1, 2, 32))
            assert package.calls["norm"] == 1
    assert groups == [{1, 2, 3}] * LAYERS  # o and down; gate and up; q, k and v


def test_a_run_says_what_is_fused(tmp_path: Path, package: StandIn) -> None:
    with opened(write_model(LlamaConfig(**SIZES), tmp_path), **FAST) as model:
        lines = list(_about(model))
    said = "liger-kernel 0.8.5 fuses 8 LlamaAttention, 8 LlamaMLP, 8 LlamaRMSNorm"
    assert f"arithmetic: fast: {said}" in lines


def test_an_activation_that_a_kernel_does_not_have_turns_it_off(
    tmp_path: Path, package: StandIn
) -> None:
    with opened(write_model(LlamaConfig(**SIZES, hidden_act="gelu"), tmp_path), **FAST):
        assert package.options == [{"loss": False, "swiglu": False}]


def test_experts_stay_lemas_own(tmp_path: Path, package: StandIn) -> None:
    sizes = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
    with opened(write_model(MixtralConfig(**sizes), tmp_path), **FAST) as model:
        draw_b(model.lora_manager)
        model.adapter.loss(micro_batches()).backward()
    assert package.calls["norm"] == package.calls["rope"] > 0 == package.calls["mlp"]


def fails(**_: Any) -> None:
    modeling_llama.apply_rotary_pos_emb = None
    raise ImportError("cannot import name 'LlamaMLP'")


@pytest.mark.parametrize(
    ("known", "version", "why"),
    [
        (
            {},
            "0.8.5",
            "liger-kernel 0.8.5 fuses nothing, because it does not know the type 'llama'",
        ),
        ({}, None, "liger-kernel fuses nothing, because it is not installed"),
        (
            {"llama": fails},
            "0.8.5",
            "liger-kernel 0.8.5 fuses nothing, because it does not fit this transformers: "
            "ImportError: cannot import name 'LlamaMLP'",
        ),
    ],
    ids=["another type", "not installed", "another transformers"],
)
def test_where_it_cannot_fuse_it_says_why(
    known: dict[str, Any],
    version: str | None,
    why: str,
    tmp_path: Path,
    package: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules["liger_kernel.transformers.monkey_patch"]
    monkeypatch.setattr(module, "MODEL_TYPE_TO_APPLY_LIGER_FN", known)
    monkeypatch.setattr(liger, "installed_version", lambda name: version)
    with opened(write_model(LlamaConfig(**SIZES), tmp_path), **FAST) as model:
        assert model.fused == why
        assert not any(
            isinstance(vars(one).get("forward"), liger.Fused) for one in model.skeleton.modules()
        )


def test_a_backend_that_fuses_nothing_says_nothing(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96}
    with opened(write_model(GPT2Config(**sizes), tmp_path), **FAST) as model:
        assert model.fused is None
        assert not any(line.startswith("arithmetic") for line in _about(model))
