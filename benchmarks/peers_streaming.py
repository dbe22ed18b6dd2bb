"""The peers of 2026 that stream a frozen model, as arms of `peers.py`: Soup (`soup-cli`) and AirLLM
(`airllm`).

- `soup`: the streamed model that `soup train` builds with `stream_source: disk`: two buffers for
  layers, one for embeddings and head, filled from the disk by a thread, past the page cache.
  `soup-ram` is the same with `stream_source: ram`, which Soup chooses itself where the weights fit
  in memory. Around both is the loop of the other arms, because Soup's own is TRL's. Soup calls its
  CPU mode a convenience for tests, and its command takes fp32 there; here it has the type of the
  other arms.
- `airllm`: `AirLLMLoRA`, for models of Qwen3.5's type alone; its weights come through the page
  cache, a layer ahead. It steps its optimizer after every batch and cannot accumulate, so the
  micro-batches of a step are one batch here. Its adapters have the type of the weights; those of
  the other arms are fp32.

Each makes a copy of the checkpoint first, a file for each layer, and reads every layer twice for
every micro-batch, or batch. Both start from PEFT's own draw of the adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from plainloop import ALPHA, RANK, RATE, peft_model
from torch import Tensor

__all__ = ["airllm_step", "soup_model"]


def soup_model(directory: str, scratch: str, dtype: str, source: str) -> Any:
    """Return Soup's streamed model of a directory, in training mode.

    Args:
        directory: of the model.
        scratch: where Soup's copy of the checkpoint is written.
        dtype: of its weights.
        source: `disk` or `ram`.
    """
    names = ("layer_stream", "layer_shard", "layer_stream_runtime")
    stream, shards, runtime = (import_module(f"soup_cli.utils.{name}") for name in names)
    whole = peft_model(directory)
    settings = whole.peft_config["default"]
    drawn = _adapters(whole)
    architecture = stream.stream_arch_of(whole.get_base_model().config)
    del whole
    copy = str(Path(scratch) / f"soup-{source}")
    index = shards.shard_checkpoint(directory, copy, dtype=dtype, arch=architecture)
    model, _ = runtime.build_streamed_model(
        model_id=directory,
        shard_dir=copy,
        index=index,
        lora_config=settings,
        device="cpu",
        dtype=dtype,
        pin=False,
        tier=source,
    )
    _start_from(model, drawn)
    model.enable_input_require_grads()
    return model.train()


def airllm_step(directory: str, scratch: str, ids: Tensor) -> Callable[[], float]:
    """Return what takes one optimizer step of AirLLM's LoRA over rows of tokens, `[rows,
    tokens]`, as one batch.
    """
    drawn = _adapters(peft_model(directory))
    copy = Path(scratch) / "airllm"
    copy.mkdir(exist_ok=True)
    model = import_module("airllm.airllm_lora").AirLLMLoRA(
        directory,
        device="cpu",
        max_seq_len=ids.shape[1],
        layer_shards_saving_path=str(copy),
        lora_r=RANK,
        lora_alpha=ALPHA,
        lr=RATE,
        weight_decay=0.0,
    )
    _start_from(model.model, drawn)
    return lambda: float(model.train_step(ids))


def _adapters(model: Any) -> dict[str, Tensor]:
    return {
        _short(name): one.data.clone()
        for name, one in model.named_parameters()
        if one.requires_grad
    }


def _start_from(model: Any, drawn: dict[str, Tensor]) -> None:
    trained = {_short(name): one for name, one in model.named_parameters() if one.requires_grad}
    if trained.keys() != drawn.keys():
        raise SystemExit(
            f"other adapters than PEFT's are trained: {sorted(trained.keys() ^ drawn.keys())[:3]}"
        )
    with torch.no_grad():
        for name, one in trained.items():
            one.copy_(drawn[name])


def _short(name: str) -> str:
    """Return a name from its layer's number on, which is all that the arms' names have in
    common.
    """
    return name.split(".layers.")[-1].removesuffix(".default.weight")
