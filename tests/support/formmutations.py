"""Mutations of rows and of the forms in which weights are stored: packs, padding, attention, and
what is quantised.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import blockfp8
import compressedforms
import packedforms
import torch
from asloaded import edit_config, store, tensors
from mutation import Mutation, Tensors, sharded
from tinyconfig import tiny_config
from transformers import (
    AutoConfig,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
)

from lema.model.skeleton import auto_class

__all__ = ["BITSANDBYTES", "by_bitsandbytes", "forms_of"]

PACKS = ((5, 3, 4), (7, 2))
PADDED = tuple(
    Mutation(f"padded at the {side}", padded=side, generates=False) for side in ("left", "right")
)
INPUTS = (
    Mutation("packs", packs=PACKS),
    Mutation("packs, rows longer than a window", packs=((2, 9, 1), (6, 6))),
    Mutation("packs of one row", packs=((9,), (4,))),
    *PADDED,
    *(
        Mutation(f"packs, opened with {name}", packs=PACKS, opened={"attn_implementation": name})
        for name in ("eager", "sdpa")
    ),
    *(
        replace(one, name=f"{one.name}, opened with eager", opened={"attn_implementation": "eager"})
        for one in PADDED
    ),
)

SKIPPED = ["lm_head", "model.vision_tower"]
BITSANDBYTES: Mapping[str, Mapping[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, stored as bf16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "bfloat16",
    },
    "fp4, scales quantised": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
}
FLEX = ("llama", "gemma3")  # no more, because attention is compiled for each
# So that no block of 64 goes on in the next row, which bitsandbytes expands wrongly on a CPU.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "ffn_dim": 128}
WIDE |= {"word_embed_proj_dim": 64, "head_dim": 16}
GROUP = 8  # inputs, of which every tiny linear module has some multiple
FP8: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(blockfp8.BLOCK),
}
IN_SHARDS = (
    "fp8, blocks",
    "compressed-tensors, int4, groups",
    "gptq, groups of 8, desc_act",
    "bitsandbytes, nf4",
)
# Types whose layers are of linear modules that are named as those of Llama are.
CODED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "gemma2",
    "gemma3",
    "granite",
    "olmo2",
)
CODED += ("cohere", "glm4", "starcoder2", "opt", "gpt_neox")


def forms_of(model_type: str) -> Iterator[Mutation]:
    """Yield forms of rows and of attention that every type has, and what it is published
    quantised as.
    """
    yield from INPUTS
    if model_type in FLEX:
        yield Mutation(
            "opened with flex_attention", opened={"attn_implementation": "flex_attention"}
        )
    for mutation in _quantised(model_type) if model_type in CODED else ():
        yield mutation
        if mutation.name in IN_SHARDS:
            yield replace(
                mutation, name=f"{mutation.name}, in shards", files=_divided(mutation.files)
            )


def _divided(first: Callable[[Path], None] | None) -> Callable[[Path], None]:
    """Lay the tensors that make a weight in several files."""

    def divide(directory: Path) -> None:
        if first is not None:
            first(directory)
        sharded({"total_size": 1})(directory)

    return divide


def _quantised(model_type: str) -> Iterator[Mutation]:
    fields = tiny_config(model_type).get_text_config(decoder=True).to_dict()
    experts = {"num_experts", "num_local_experts"} & fields.keys()
    yield replace(
        _stored(
            "fp8, blocks",
            _each(_fp8),
            FP8,
            _loaded(FineGrainedFP8Config, weight_block_size=blockfp8.BLOCK),
        ),
        # So that no block is smaller, which transformers expands wrongly in merged experts.
        built={"moe_intermediate_size": 2 * blockfp8.BLOCK[0]}
        if "moe_intermediate_size" in fields
        else {},
    )
    for name in (
        "int4, groups",
        "int4, channels, symmetric",
        "int8, channels, not packed",
        "int4, numbered groups",
    ):
        form = compressedforms.FORMS[name]
        form = form if form.group_size is None else replace(form, group_size=GROUP)
        load = _loaded(CompressedTensorsConfig)
        # what transformers cannot expand
        if form.ordered or (experts and form.packed and not form.symmetric):
            load = _plain(partial(compressedforms.expanded, form=form))
        settings = form.quantization_config
        yield _stored(f"compressed-tensors, {name}", _each(_compressed(form)), settings, load)
    for name in (
        "gptq, groups of 32",
        "gptq, groups of 32, desc_act",
        "gptq, one group",
        "awq, groups of 32",
    ):
        packing = packedforms.FORMS[name]
        packing = packing if packing.group_size == -1 else replace(packing, group_size=GROUP)
        name = name.replace("32", str(GROUP))
        yield _stored(
            name,
            _each(_packed(packing)),
            packing.quantization_config,
            _plain(partial(packedforms.expanded, form=packing)),
        )
    built = {field: size for field, size in WIDE.items() if field in fields}
    for name, settings in BITSANDBYTES.items():
        yield Mutation(
            f"bitsandbytes, {name}",
            built=built,
            files=by_bitsandbytes(settings),
            whole=_dequantized,
        )


def _stored(
    name: str, change: Callable[[Tensors], Tensors], settings: Any, whole: Callable[[Path], Any]
) -> Mutation:
    return Mutation(name, stored=change, top={"quantization_config": settings}, whole=whole)


def _each(change: Callable[[str, torch.Tensor], Tensors]) -> Callable[[Tensors], Tensors]:
    """Quantise the weights of the linear modules in layers."""

    def quantise(held: Tensors) -> Tensors:
        made: Tensors = {}
        for name, one in held.items():
            made |= change(name, one) if blockfp8.is_quantised(name, one) else {name: one}
        return made

    return quantise


def _fp8(name: str, weight: torch.Tensor) -> Tensors:
    codes, scales = blockfp8.quantize(weight)
    return {name: codes, f"{name}_scale_inv": scales}


def _compressed(form: compressedforms.Form) -> Callable[[str, torch.Tensor], Tensors]:
    return lambda name, weight: compressedforms.compressed(name, weight, form)[0]


def _packed(form: packedforms.PackedForm) -> Callable[[str, torch.Tensor], Tensors]:
    return lambda name, weight: packedforms.packed(name, weight, form)


def _loaded(settings: Any, **options: Any) -> Callable[[Path], Any]:
    """Have `from_pretrained` expand what it loads."""

    def load(directory: Path) -> Any:
        how = settings(dequantize=True, **options)
        kind = auto_class(AutoConfig.from_pretrained(directory))
        # Widened, because merged experts of compressed-tensors stay in the type of their scales.
        return kind.from_pretrained(directory, dtype=torch.float32, quantization_config=how).float()

    return load


def _plain(expand: Callable[[Tensors], Tensors]) -> Callable[[Path], Any]:
    """Load what the codes stand for, read one by one, where no library that is here reads them
    on a CPU.
    """

    def load(directory: Path) -> Any:
        plain = directory.with_name("plain")
        shutil.copytree(directory, plain)
        store(plain, {name: one.float() for name, one in expand(tensors(directory)).items()})
        edit_config(plain, "quantization_config")
        return auto_class(AutoConfig.from_pretrained(plain)).from_pretrained(
            plain, dtype=torch.float32
        )

    return load


def _dequantized(directory: Path) -> Any:
    kind = auto_class(AutoConfig.from_pretrained(directory))
    return kind.from_pretrained(directory, dtype=torch.float32).dequantize()


def by_bitsandbytes(settings: Mapping[str, Any]) -> Callable[[Path], None]:
    """Have bitsandbytes quantise a model in its place."""

    def quantise(directory: Path) -> None:
        kind = auto_class(AutoConfig.from_pretrained(directory))
        how = BitsAndBytesConfig(**settings, llm_int8_skip_modules=SKIPPED)
        model = kind.from_pretrained(directory, dtype=torch.float32, quantization_config=how)
        for file in directory.glob("*.safetensors"):
            file.unlink()
        model.save_pretrained(directory)

    return quantise
