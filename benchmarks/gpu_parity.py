"""Loss and gradients of a small deep model on a device, beside those of the `cpu` backend and of
PEFT on both.

The adapters' two matrices are drawn, since a gradient of A is zero while B is. Compared are the
loss, and the gradients of all adapters together, as the norm of the difference by the norm of what
it is compared with; the worst single tensor stands beside it.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from common import Shape, write_model
from plainloop import ALPHA, RANK, SEED, peft_model, plain_step
from torch import Tensor

from lema import LemaConfig, LemaModel
from lema.engine.head.loss import split_batch

__all__ = ["parity"]

MICRO_BATCHES = 4
Found = tuple[float, dict[str, Tensor]]


def parity(device: str, layers: int, hidden: int, tokens: int) -> dict[str, Any]:
    """Return differences by dtype.

    `device` is LEMA there against LEMA on the `cpu` backend, `peft` the spread that PEFT shows
    between the same two, and `here` LEMA against PEFT, both on the device.
    """
    found = {}
    for dtype in ("float32", "bfloat16"):
        shape = Shape(hidden, hidden * 11 // 4, layers, 2048, 8, dtype, kv_heads=4)
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name) / "model"
            write_model(directory, shape)
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(0, shape.vocabulary, (MICRO_BATCHES, tokens), generator=generator)
            lema = {where: _lema(directory, where, ids, name) for where in {device, "cpu"}}
            peft = {where: _peft(directory, where, ids, dtype) for where in {device, "cpu"}}
        found[dtype] = {
            "device": _apart(lema[device], lema["cpu"]),
            "peft": _apart(peft[device], peft["cpu"]),
            "here": _apart(lema[device], peft[device]),
        }
    return found | {"layers": layers, "micro_batches": MICRO_BATCHES, "tokens": tokens}


def _lema(directory: Path, device: str, ids: Tensor, scratch: str) -> Found:
    config = LemaConfig(
        str(directory),
        device=device,
        gradient_checkpointing=True,
        device_memory=None,  # so that every layer streams
        micro_batch_size=1,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lora_init=False,
        seed=SEED,
        save_steps=0,
        output_dir=scratch,
    )
    with closing(LemaModel(config)) as model:
        model.initialize_lora()
        kept: dict[str, Tensor] = {}

        def keep(event: str) -> None:
            if event == "on_pre_optimizer_step":
                kept.update(_gradients(model.lora_manager))

        batches = split_batch({"input_ids": ids, "labels": ids}, 1)
        loss = float(model.get_trainer().accumulate(batches, on_event=keep).loss)
        return loss, kept


def _peft(directory: Path, device: str, ids: Tensor, dtype: str) -> Found:
    model = peft_model(directory, device=device, initial=False)
    kept: dict[str, Tensor] = {}

    class Keep:
        """Stands where an optimizer would."""

        def step(self) -> None:
            kept.update(_gradients(model))

        def zero_grad(self, set_to_none: bool) -> None:
            """The model goes next."""

    loss = plain_step(model, ids.to(device), getattr(torch, dtype), Keep())()
    return loss, kept


def _gradients(model: Any) -> dict[str, Tensor]:
    return {
        name: one.grad.detach().cpu().double()
        for name, one in model.named_parameters()
        if one.grad is not None
    }


def _apart(one: Found, other: Found) -> dict[str, float]:
    (loss, gradients), (reference, others) = one, other
    assert gradients.keys() == others.keys(), sorted(gradients.keys() ^ others.keys())[:4]
    norms = {
        name: (float((gradients[name] - others[name]).norm()), float(others[name].norm()))
        for name in others
    }
    whole, size = (sum(pair[place] ** 2 for pair in norms.values()) ** 0.5 for place in (0, 1))
    return {
        "loss": abs(loss - reference) / abs(reference),
        "gradients": whole / size,
        "worst_tensor": max(apart / max(norm, 1e-30) for apart, norm in norms.values()),
    }
