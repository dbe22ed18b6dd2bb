"""What releases of the libraries do differently, asked by feature: what is written out here is what
they have, and what an installed one lacks is refused by its name."""

from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from tinyconfig import tiny_config
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.base import HfQuantizer

from lema import compat
from lema.errors import ModelError
from lema.lora.targets import router_modules
from lema.model import meta_model, read_config
from lema.model.quantizers.gptq import GPTQ
from lema.model.quantizers.packed import PackedQuantizer


@pytest.mark.parametrize("is_transposed", [False, True])
def test_factors_of_experts_are_those_of_what_peft_adds(
    monkeypatch: pytest.MonkeyPatch, is_transposed: bool
) -> None:
    monkeypatch.delattr(ParamWrapper, "get_delta_factors", raising=False)
    experts = torch.nn.Module()
    experts.weight = torch.nn.Parameter(torch.randn(3, 4, 5))
    experts.is_transposed = is_transposed
    config = LoraConfig(r=2, lora_alpha=6, target_parameters=["experts.weight"], target_modules=[])
    model = get_peft_model(torch.nn.ModuleDict({"experts": experts}), config)
    (wrapper,) = (one for one in model.modules() if isinstance(one, ParamWrapper))
    torch.nn.init.normal_(wrapper.lora_B["default"].weight)
    left, right = compat.delta_factors(wrapper, "default")
    assert (left.shape, right.shape) == ((3, 4, 2), (3, 2, 5))
    assert torch.allclose(
        left @ right * wrapper.scaling["default"], wrapper.get_delta_weight("default"), atol=1e-6
    )


def test_conversions_of_packed_weights_are_those_that_transformers_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is written out for releases that make none is compared with what later ones make; all
    are read alike.
    """

    class Packed(PackedQuantizer):
        pass

    model = meta_model(tiny_config("mixtral"))
    quantizer = Packed(SimpleNamespace(dequantize=True), GPTQ)
    mapping = get_model_conversion_mapping(model)

    def patterns(conversions: list[Any]) -> list[Any]:
        told = [
            ({*one.source_patterns}, one.target_patterns, one.scope_prefix) for one in conversions
        ]
        ops = [[type(op).__name__ for op in getattr(one, "operations", ())] for one in conversions]
        return [(*one, names) for one, names in zip(told, ops, strict=True)]

    written = patterns(compat._updated_conversions(quantizer, deepcopy(mapping)))
    assert any("qweight" in str(sources) and "experts" in str(sources) for sources, *_ in written)
    assert written[-1][:2] == ({*GPTQ.parts}, ["weight"])
    assert compat.loading_by_operations(Packed) is Packed
    assert patterns(get_model_conversion_mapping(model, hf_quantizer=quantizer)) == written
    if hasattr(HfQuantizer, "get_load_operations"):
        monkeypatch.setattr(compat, "_has_load_operations", lambda: False)
        compat.loading_by_operations(Packed)
        assert Packed.update_weight_conversions is compat._updated_conversions
        assert patterns(get_model_conversion_mapping(model, hf_quantizer=quantizer)) == written


def test_a_method_is_expanded_where_its_config_can_ask_for_it() -> None:
    assert {
        name: compat.expands(name) for name in ("fp8", "mxfp4", "hqq", "bitnet", "no-such-method")
    } == {
        "fp8": True,
        "mxfp4": True,
        "hqq": False,
        "bitnet": False,
        "no-such-method": False,
    }


def test_only_the_linears_of_the_name_that_is_recorded_are_routers() -> None:
    """Some releases record the logits of a router by the class `Linear` and the name of the
    module.
    """
    model = meta_model(tiny_config("jamba"))
    routers = router_modules(model)
    assert routers and all(name.rpartition(".")[2] == "router" for name in routers)


# Releases that no tests ran with


def test_what_was_not_tested_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "transformers": "5.24.3",
        "peft": "0.99.1",
        "accelerate": "1.15.0",
        "torch": "2.99.0+cpu",
    }
    monkeypatch.setattr(compat, "version", known.__getitem__)
    told = compat.untested()
    assert (
        told.startswith("peft 0.99.1 (tests ran with 0.20")
        and "torch 2.99.0+cpu" in told
        and "\n" not in told
    )
    assert "transformers" not in told and "accelerate" not in told


def test_a_type_that_the_installed_transformers_lacks_is_refused_with_the_release_that_was_tested(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "type_of_tomorrow"}')
    with pytest.raises(ModelError) as refused:
        read_config(tmp_path)
    assert "type_of_tomorrow" in str(refused.value)
    assert f"{version('transformers')} is installed, and LEMA is tested up to 5.24" in str(
        refused.value
    )
