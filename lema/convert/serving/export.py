"""Writes an adapter in the layout that a server reads.

What changes is names and the order of numbers, and never a number. Modules have the names of
published files, which servers know. Experts that `transformers` keeps in one parameter get an
adapter each (`lema.lora.serving.experts`), but where a server has them in one tensor, too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from lema.convert.adapted import SavedAdapter, open_adapter
from lema.errors import ConfigError
from lema.lora.files import CONFIG, WEIGHTS, saved_tensors
from lema.lora.merge import ADAPTER, wrapped
from lema.lora.serving.checks import (
    PublishedNames,
    check_served,
    first_of,
    published_names,
    stacks,
)
from lema.lora.serving.experts import Factors, factors_of, parameter_wrappers
from lema.lora.serving.servers import SERVERS, Server
from lema.lora.shards import PREFIX
from lema.storage.atomic import appearing, free_directory
from lema.storage.regular import check_separate
from lema.storage.rendering import carry_rendering

__all__ = ["LAYOUTS", "Exported", "Layout", "export_adapter"]

Layout: TypeAlias = Literal["vllm", "sglang", "peft", "per-expert"]
LAYOUTS: tuple[Layout, ...] = ("vllm", "sglang", "peft", "per-expert")
"""Whose layout: of a server; PEFT's own, as LEMA writes it; one adapter for each published
expert."""
GATE_UP = re.compile(r"gate_up|input_linear|w13")


@dataclass(frozen=True)
class Exported:
    """What was written."""

    directory: Path
    experts: int  # adapters of single experts
    line: str  # that starts the server; empty: no server was named


@dataclass(frozen=True)
class _Adapter:
    """An adapter by the published names of its modules."""

    factors: dict[str, Factors] = field(default_factory=dict)
    experts: int = 0  # how many of these are of single experts


def export_adapter(
    adapter_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    layout: Layout,
    *,
    base_dir: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    note: Callable[[str], object] = lambda _: None,
) -> Exported:
    """Write an adapter in a layout, as a directory that appears when it is complete.

    Args:
        adapter_dir: a saved adapter; it names its base model, of which no weight is read.
        out_dir: a new or empty directory.
        layout: one of `LAYOUTS`.
        base_dir: where the base is by now; None: where the adapter says.
        trust_remote_code: whether code beside the base may run.
        note: takes a sentence on what was found.

    Returns:
        What was written.

    Raises:
        ConfigError: there is no such layout, `out_dir` is not empty, or the server does not take
            the adapter; all that it does not take is named.
        AdapterError: there is no adapter, or it does not fit the model.
        DiskError: a file could not be written; nothing is left behind.
    """
    if layout not in LAYOUTS:
        what = f"there is no layout {layout!r}"
        raise ConfigError(what, where="--for", how=f"choose {', '.join(LAYOUTS)}")
    out = free_directory(out_dir, 1)
    opened = open_adapter(adapter_dir, base_dir, trust_remote_code=trust_remote_code, note=note)
    check_separate(out, [opened.directory, opened.base.directory])
    names = published_names(opened.base.skeleton, opened.lora)
    if layout == "vllm" or layout == "sglang":
        check_served(layout, opened.base.skeleton, opened.lora, names, where=f"--for {layout}")
    elif layout == "per-expert" and names.missing:
        what = f"these experts have no published matrices of their own: {first_of(names.missing)}"
        how = "--for peft writes them in one tensor; `lema merge` writes them into the model"
        raise ConfigError(what, where="--for per-expert", how=how)
    server = SERVERS[layout] if layout == "vllm" or layout == "sglang" else None
    stacked = layout == "peft" or (server is not None and stacks(server, opened.base.skeleton))
    model = opened.attach()
    adapter = _Adapter() if stacked else _split(opened.base.skeleton, names)
    tensors = _stacked_tensors(model, layout) if stacked else _tensors(adapter)
    config = _stacked_config(model) if stacked else _config(opened.lora, adapter)
    line = "" if server is None else _server_line(server, opened, out, config, stacked=stacked)
    with appearing(out) as partial, torch.no_grad():
        save_file(tensors, partial / WEIGHTS, {"format": "pt"})
        _write(partial / CONFIG, json.dumps(config, indent=2, sort_keys=True))
        carry_rendering(opened.directory, partial)
        if line:
            _write(partial / "SERVE.md", f"```bash\n{line}\n```")
    return Exported(out, adapter.experts, line)


def _write(file: Path, text: str) -> None:
    file.write_text(text + "\n", encoding="utf-8", newline="\n")


def _split(model: PreTrainedModel, names: PublishedNames) -> _Adapter:
    """Return the factors of each published matrix that is adapted."""
    factors = dict[str, Factors]()
    experts = 0
    for name, module in wrapped(model):
        if isinstance(module, ParamWrapper):
            for wrapper in parameter_wrappers(module):
                pieces = names.experts[f"{name}.{wrapper.parameter_name}"] or ()
                for piece in pieces:
                    factors[piece.module] = piece.factors(*factors_of(wrapper, piece.expert))
                experts += len(pieces)
        elif isinstance(module, LoraLayer) and ADAPTER in module.lora_A:
            layer: Any = module
            a = layer.lora_A[ADAPTER].weight.detach()
            b = layer.lora_B[ADAPTER].weight.detach()
            factors[names.modules[name]] = Factors(a, b, layer.scaling[ADAPTER])
    return _Adapter(factors, experts)


def _tensors(adapter: _Adapter) -> dict[str, Tensor]:
    """Return the tensors of the file. Experts of one layer share factors in memory, which
    safetensors does not write, so each is a tensor of its own."""
    tensors = dict[str, Tensor]()
    for name, factors in adapter.factors.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = factors.a.contiguous().clone()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = factors.b.contiguous().clone()
    return tensors


def _stacked_tensors(model: PeftModel, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors under PEFT's names. Of two adapted parameters of one module, a server
    takes the inner one (`base_layer`) for the first product's."""
    tensors = saved_tensors(model, None)
    if layout == "peft":
        return {name: tensor.contiguous() for name, tensor in tensors.items()}
    swapped = {
        name
        for name, module in wrapped(model.get_base_model())
        if isinstance(module, ParamWrapper) and GATE_UP.search(module.parameter_name)
    }
    renamed = dict[str, Tensor]()
    for name, tensor in tensors.items():
        module, dot, leaf = name.removeprefix(PREFIX).rpartition(".lora_")
        bare = module.removesuffix(".base_layer")
        if bare in swapped:
            module = bare if module != bare else f"{bare}.base_layer"
        renamed[f"{PREFIX}{module}{dot}{leaf}"] = tensor.contiguous()
    return renamed


def _stacked_config(model: PeftModel) -> dict[str, Any]:
    return _plain(model.peft_config[ADAPTER].to_dict())


def _config(lora: LoraConfig, adapter: _Adapter) -> dict[str, Any]:
    """Return PEFT's config of the modules by their published names: ranks and scales that are not
    those of most modules stand under the whole name."""
    config = _plain(lora.to_dict())
    ranks = dict[str, int]()
    alphas = dict[str, float]()
    for name, factors in adapter.factors.items():
        rank = factors.a.shape[0]
        alpha = factors.scale * (rank**0.5 if lora.use_rslora else rank)
        if rank != lora.r:
            ranks[re.escape(name)] = rank
        if abs(alpha - lora.lora_alpha) > 1e-9 * abs(lora.lora_alpha):
            alphas[re.escape(name)] = alpha
    return config | {
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.factors}),
        "target_parameters": None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as JSON has them."""
    return {
        key: sorted(value) if isinstance(value, set) else value for key, value in values.items()
    } | {"inference_mode": True}


def _server_line(
    server: Server, opened: SavedAdapter, out: Path, config: Mapping[str, Any], *, stacked: bool
) -> str:
    """Return the line that starts a server with this adapter."""
    base = shlex.quote(str(opened.settings.model_name_or_path))
    named = shlex.quote(f"{out.name}={out}")
    rank = max([config["r"], *config["rank_pattern"].values()])
    if server is SERVERS["sglang"]:
        return (
            f"python -m sglang.launch_server --model-path {base} --enable-lora "
            f"--max-lora-rank {rank} --lora-paths {named}"
        )
    largest = next(allowed for allowed in server.ranks if allowed >= rank)
    start = f"vllm serve {base} --enable-lora --max-lora-rank {largest} --lora-modules "
    if not stacked or not opened.lora.target_parameters:
        return f"{start}{named}"
    # Only a server with --enable-mixed-moe-lora-format reads the declaration.
    declared = {"name": out.name, "path": str(out), "is_3d_lora_weight": True}
    return start + shlex.quote(json.dumps(declared))
