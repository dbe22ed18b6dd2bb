"""A real vLLM on the CPU serves LEMA's adapters on the quantised files that they were trained on:
the log-probabilities of prompts are PEFT's on the weights that the files stand for.

vLLM computes such models in half precision alone, so they are as near as that is. Forms that it
does not serve on a CPU are here with what it says.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressedforms import Form, write_compressed
from packedforms import AWQ, GPTQ, PackedForm, write_packed
from publishedforms import write_published
from servedmodels import (
    ROWS,
    SETTINGS,
    difference,
    log_probabilities,
    measured,
    trained,
)
from smallrun import VOCABULARY, tokenizer
from transformers import LlamaConfig
from vllmserver import MODULES, vllm_server

from lema.convert.serving.export import export_adapter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

LAYERS = 3
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "attention_bias": False,
}
WIDE: Mapping[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
# The model as it is published, and, in fp32, what its weights stand for.
Written = tuple[Path, Path]
# of a log-probability: what rounding of weights, inputs and sums to this type costs
BOUNDS = {"float16": 0.05, "bfloat16": 0.2}


def packed(form: PackedForm, directory: Path) -> Written:
    """Write a Llama of gptq or awq."""
    made = write_packed(form, directory, num_hidden_layers=LAYERS, **SIZES)
    return made.streamed, made.published


def compressed(form: Form, directory: Path) -> Written:
    """Write a Llama of compressed-tensors."""
    made = write_compressed(form, directory, LAYERS, **SIZES | WIDE)
    return made.streamed, made.published


def fp8(form: str, directory: Path) -> Path:
    """Write a Llama of fp8."""
    return write_published(LlamaConfig(**SETTINGS["llama"] | WIDE), form, directory / "model")


SERVED: dict[str, Callable[[Path], Written]] = {
    "gptq": partial(packed, replace(GPTQ, symmetric=True)),
    "awq": partial(packed, AWQ),
    "int4 of compressed-tensors": partial(compressed, Form(symmetric=True)),
    "int4 of compressed-tensors, zero points": partial(compressed, Form()),
}
CASES = [*((form, "float16") for form in SERVED), ("gptq", "bfloat16")]
CHANNELS = Form(bits=8, symmetric=True, group_size=None)
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "gptq, zero points": (
        lambda directory: packed(GPTQ, directory)[0],
        "Unsupported quantization config: bits=4, sym=False",
    ),
    "int8 of compressed-tensors": (
        lambda directory: compressed(CHANNELS, directory)[0],
        "Quant type (uint8b128) not supported by CPUWNA16",
    ),
    "int8 of compressed-tensors, inputs too": (
        lambda directory: compressed(replace(CHANNELS, packed=False, activations=True), directory)[
            0
        ],
        "AttributeError: 'NoneType' object has no attribute 'device'",
    ),
    "fp8 in blocks": (
        partial(fp8, "fp8 in blocks"),
        "CPUFp8BlockScaledMMKernel requires AMX tile support",
    ),
    "fp8 per channel": (
        partial(fp8, "fp8 per channel"),
        "Failed to find a kernel that can implement the ScaledMM linear layer",
    ),
}


def arguments_for(model: Path, dtype: str) -> list[str]:
    """Return the server's, but for the adapters that it begins with."""
    adapters = ["--enable-lora", "--max-lora-rank=8", "--max-loras=2"]
    return [f"--model={model}", f"--dtype={dtype}", *adapters, "--lora-target-modules", *MODULES]


@pytest.mark.parametrize(("form", "dtype"), CASES)
def test_a_quantised_base_with_an_adapter_has_the_log_probabilities_of_peft(
    form: str, dtype: str, tmp_path: Path
) -> None:
    model, whole = SERVED[form](tmp_path)
    tokenizer().save_pretrained(model)
    adapter = trained(model, tmp_path / "adapter")
    export_adapter(adapter, tmp_path / "served", "vllm")
    without = log_probabilities(whole)
    expected = log_probabilities(whole, adapter)
    assert difference(without, expected) > 10 * BOUNDS[dtype]
    modules = ["--lora-modules", f"served={tmp_path / 'served'}"]
    with vllm_server([*arguments_for(model, dtype), *modules], tmp_path / "log") as server:
        base = server.log_probabilities(str(model), ROWS)
        answer = server.log_probabilities("served", ROWS)
    measured(f"{form}, {dtype}, no adapter", difference(base, without), BOUNDS[dtype])
    measured(f"{form}, {dtype}, rank8", difference(answer, expected), BOUNDS[dtype])


@pytest.mark.parametrize("form", REFUSED)
def test_a_form_that_vllm_does_not_serve_on_a_cpu_is_refused(form: str, tmp_path: Path) -> None:
    """What docs/serving.md says of it."""
    if form.startswith("fp8") and torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has AMX, with which vLLM has kernels for fp8: not tried")
    write, message = REFUSED[form]
    model = write(tmp_path)
    tokenizer().save_pretrained(model)
    with (
        pytest.raises(AssertionError, match="vLLM did not start"),
        vllm_server(arguments_for(model, "bfloat16"), tmp_path / "log"),
    ):
        pass
    assert message in (tmp_path / "log").read_text(encoding="utf-8")
