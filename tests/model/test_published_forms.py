"""Weights as they are published train as they are: bitwise PEFT on the weights that transformers
makes of them.
"""

import json
from pathlib import Path

import pytest
import torch
from everytype import difference, micro_batches
from parity import draw_b, trained
from peft import get_peft_model
from publishedforms import FORMS, dequantized, write_published
from tinyconfig import tiny_config
from torch.nn.functional import cross_entropy

from lema import LemaConfig, LemaModel
from lema.convert.tensors import read_tensor
from lema.engine.head.loss import targets_of
from lema.errors import ModelError, WeightsError
from lema.model import meta_model, read_config
from lema.model.weight_names import map_names
from lema.storage import GlobalBinaryIndex
from lema_cpu import CpuBackend

pytestmark = pytest.mark.filterwarnings("ignore")

SEED = 3
RATE = 0.1
STEPS = 2

# A model type for each published form.
TYPES = {
    "bf16": "qwen3_moe",
    "bf16, experts fused": "qwen3_5_moe",
    "fp8 in blocks": "deepseek_v3",
    "fp8 per tensor": "ministral3",
    "fp8 per channel": "qwen3",
    "fp4 experts, fp8": "deepseek_v4",
    "mxfp4": "gpt_oss",
    "int4 experts": "kimi_k25",
    "nvfp4": "qwen3",
    "gptq": "qwen2",
    "awq": "qwen3",
}


@pytest.mark.parametrize("form", FORMS)
def test_two_steps_are_those_of_the_whole_model(form: str, tmp_path: Path) -> None:
    published = write_published(tiny_config(TYPES[form]), form, tmp_path / "published")
    config = LemaConfig(
        str(published),
        device="cpu",
        device_memory=None,
        dtype="float32",
        lora_rank=2,
        lora_alpha=4,
        seed=SEED,
        lora_target_parameters=[],  # products with adapted experts round otherwise
    )
    model = LemaModel(config, backend=CpuBackend(poison=True))
    model.initialize_lora()
    model.lora_manager.train()
    draw_b(model.lora_manager)
    whole = get_peft_model(
        dequantized(published), model.lora_manager.peft_config["default"]
    ).train()
    with torch.no_grad():
        for name, parameter in trained(whole).items():
            parameter.copy_(trained(model.lora_manager)[name])
    for _ in range(STEPS):
        found = model.adapter.loss(micro_batches())
        found.backward()
        expected = torch.zeros(())
        tokens = sum(int((targets_of(batch["labels"]) != -100).sum()) for batch in micro_batches())
        for batch in micro_batches():
            logits = whole(input_ids=batch["input_ids"], use_cache=False).logits.float()
            summed = cross_entropy(
                logits.flatten(0, 1), targets_of(batch["labels"]).flatten(), reduction="sum"
            )
            (summed / tokens).backward()
            expected = expected + summed.detach() / tokens
        assert torch.equal(found.detach(), expected)
        for name, parameter in trained(whole).items():
            ours = trained(model.lora_manager)[name]
            assert difference(ours.grad, parameter.grad) == 0, name
            for one in (ours, parameter):
                if one.grad is not None:
                    one.data.sub_(one.grad, alpha=RATE)
                    one.grad = None
    model.close()


@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("bf16")])
def test_a_scale_that_is_missing_is_named(form: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published = write_published(tiny_config(TYPES[form]), form, tmp_path / "published")
    weights = load_file(published / "model.safetensors")
    ends = ("weight_scale", "scale_inv", "_scales", ".scale", ".scales")
    del weights[next(name for name in sorted(weights) if name.endswith(ends))]
    save_file(weights, published / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match="scale"):
        map_names(meta_model(read_config(published)), GlobalBinaryIndex(published))


def test_how_the_part_that_reads_text_is_quantised_is_found(tmp_path: Path) -> None:
    """Kimi-K2.5 says it inside its text_config."""
    published = write_published(tiny_config("kimi_k25"), "int4 experts", tmp_path / "published")
    file = published / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    file.write_text(json.dumps(config))
    assert map_names(meta_model(read_config(published)), GlobalBinaryIndex(published)).quantized


def test_int8_of_bitsandbytes_is_what_the_library_expands(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    functional = pytest.importorskip("bitsandbytes.functional")
    published = write_published(tiny_config("qwen3"), "bf16", tmp_path)
    weights = load_file(published / "model.safetensors")
    expected = dict[str, torch.Tensor]()
    for name in [one for one in weights if one.endswith("proj.weight")]:
        codes, scales, _ = functional.int8_vectorwise_quant(weights[name].half())
        expected[name] = functional.int8_vectorwise_dequant(codes, scales).to(torch.bfloat16)
        owner = name.removesuffix("weight")
        weights |= {
            name: codes,
            f"{owner}SCB": scales,
            f"{owner}weight_format": torch.tensor(0, dtype=torch.uint8),
        }
    save_file(weights, published / "model.safetensors", {"format": "pt"})
    index = GlobalBinaryIndex(published)
    model = meta_model(read_config(published), torch.bfloat16)
    names = map_names(model, index)
    assert set(names.quantized) == expected.keys() and not names.unused
    assert all(
        torch.equal(read_tensor(names.stored[name], torch.bfloat16), one)
        for name, one in expected.items()
    )
    weights |= {name: one + 1 for name, one in weights.items() if name.endswith("weight_format")}
    save_file(weights, published / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match="the parameter is stored in tiles, as bitsandbytes does for older devices"
    ):
        map_names(model, GlobalBinaryIndex(published))
