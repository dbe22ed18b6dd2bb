"""What one process does on the CPU device of torch_xla: `xlawork.py WORK ROOT SETTINGS`; prints a
JSON object.

A process for each: what one has compiled is not compiled for the next.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch
import torch_xla.debug.metrics as metrics
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from lema import LemaConfig, LemaModel
from lema_neuron.runtimes import lazydevice

STEPS = 4
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4}
ROWS = [{"input_ids": list(range(5, 17)), "labels": list(range(5, 17))}] * 4


def compiled() -> int:
    """How many graphs have been compiled."""
    return int(metrics.counter_value("UncachedCompile") or 0)


class Counted:
    """Graphs compiled, and of these those that were cut where a lease ends: they alone have
    weights of a layer.
    """

    def __init__(self) -> None:
        self.of_layers = 0
        release = lazydevice._LazyUpload.release

        def counted(upload: lazydevice._LazyUpload) -> None:
            before = compiled()
            release(upload)
            self.of_layers += compiled() - before

        lazydevice._LazyUpload.release = counted  # type: ignore[method-assign]

    def during(self, work: Callable[[], Any]) -> tuple[Any, tuple[int, int]]:
        """Return what `work` returns, and how many graphs it compiled, in all and of layers."""
        before = compiled(), self.of_layers
        done = work()
        return done, (compiled() - before[0], self.of_layers - before[1])


def opened(root: str, device: str, **settings: Any) -> LemaModel:
    """Open the model in `root`, with an adapter."""
    fixed: dict[str, Any] = {
        "gradient_checkpointing": True,
        "prefetch_depth": 1,
        "lora_rank": 4,
        "batch_size": 2,
    }
    runtime = {"neuron_runtime": "xla"} if device == "neuron" else {}
    config = LemaConfig(
        root, device=device, output_dir=f"{root}/out", save_steps=0, **fixed | settings | runtime
    )
    model = LemaModel(config)
    model.initialize_lora()
    return model


def batches(step: int, padded: str) -> list[dict[str, Tensor]]:
    """Two micro-batches of one shape; some rows are padded never, or in every other step."""
    return tiny.micro_batches(2, padding=padded == "sometimes" and step % 2 == 1, lengths=(12, 12))


def train(root: str, *, padded: str = "never", **settings: Any) -> dict[str, Any]:
    """Train on the lazy device and on the CPU, and evaluate."""
    counted = Counted()
    (lazy, weights), (plain, others) = (
        _trained(root, one, counted, padded, settings) for one in ("neuron", "cpu")
    )
    apart = max(
        float((one - other).abs().max()) for one, other in zip(weights, others, strict=True)
    )
    return {"lazy": lazy, "plain": plain, "apart": apart}


def _trained(
    root: str, device: str, counted: Counted, padded: str, settings: dict[str, Any]
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return what training and two evaluations on one device were like, and the adapter."""
    model = opened(root, device, learning_rate=1e-2, **settings)
    trainer = model.get_trainer()
    steps = [
        counted.during(partial(trainer.accumulate, batches(step, padded))) for step in range(STEPS)
    ]
    falls = [name for name in metrics.counter_names() if name.startswith("aten::")]
    evaluations = [counted.during(partial(trainer.evaluate, ROWS)) for _ in range(2)]
    weights = [one.detach().cpu() for one in model.get_trainable_parameters()]
    model.close()
    losses = [done.loss for done, _ in steps]
    graphs = [compiles for _, compiles in steps]
    evaluated = [(done["eval_loss"], compiles) for done, compiles in evaluations]
    return {"losses": losses, "graphs": graphs, "evaluations": evaluated, "falls": falls}, weights


def gradients(root: str, *, padded: str = "never", **settings: Any) -> dict[str, Any]:
    """Compare the gradients of each step with those on the CPU: how far apart they are, as a
    fraction of their norm.
    """
    found = [_gradients(root, device, padded, settings) for device in ("neuron", "cpu")]
    return {
        "apart": [
            float((one - other).norm() / other.norm()) for one, other in zip(*found, strict=True)
        ]
    }


def _gradients(root: str, device: str, padded: str, settings: dict[str, Any]) -> list[Tensor]:
    """Return what each step steps with; weights do not move, so that no step differs for what
    one before has made.
    """
    model = opened(root, device, learning_rate=1e-30, **settings)
    trained = model.get_trainable_parameters()
    taken = list[Tensor]()
    torch.manual_seed(11)
    with torch.no_grad():
        for one in trained:
            # not zeros, behind which half of all gradients are zeros
            one.copy_(torch.randn(one.shape) * 0.1)

    def take(event: str) -> None:
        if event == "on_pre_optimizer_step":
            taken.append(
                torch.cat([one.grad.cpu().flatten() for one in trained if one.grad is not None])
            )

    trainer = model.get_trainer()
    for step in range(STEPS):
        trainer.accumulate(batches(step, padded), on_event=take)
    model.close()
    return taken


def slope(root: str, **settings: Any) -> dict[str, Any]:
    """Compare gradients, for which layers are computed again, with differences of the loss, for
    which they are not.
    """
    model = opened(root, "neuron", lora_dropout=0.4, lora_alpha=8, **settings)
    trained = model.get_trainable_parameters()
    top = model.split.num_layers - 1
    below = [parameter for layer in model.split.layers[:top] for parameter in layer.parameters()]
    model.get_trainer().ready()  # in training mode
    torch.manual_seed(11)
    # not zeros, in which nothing dropped would show
    starts = [torch.randn(one.shape) * 0.1 for one in trained]
    ways = [torch.zeros(one.shape) for one in trained]
    state = model.backend.rng_state()

    def loss(moved: float) -> Tensor:
        with torch.no_grad():
            for one, start, way in zip(trained, starts, ways, strict=True):
                one.copy_(start + moved * way)
        model.backend.set_rng_state(state)
        return model.adapter.loss(batches(0, "never"))

    loss(0.0).backward()
    formed = 0.0
    for way, one in zip(ways, trained, strict=True):
        assert one.grad is not None
        if any(one is other for other in below):
            gradient = one.grad.cpu()
            way.copy_(gradient / gradient.norm() * 0.001)
            formed += float((gradient * way).sum())
    values = [float(loss(moved)) for moved in (-1.0, 1.0, 0.0, 0.0)]
    torch.manual_seed(12)
    model.backend.rng_state()
    other = float(model.adapter.loss(batches(0, "never")))
    model.close()
    return {
        "formed": formed,
        "seen": (values[1] - values[0]) / 2,
        "same": values[2:],
        "other": other,
    }


def main() -> None:
    """Make the model, and do one work."""
    work = sys.argv[1]
    root = sys.argv[2]
    settings = json.loads(sys.argv[3])
    depth = settings.pop("depth", 8)
    torch.manual_seed(1)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=depth)
    AutoModelForCausalLM.from_config(config).save_pretrained(Path(root))
    print(  # noqa: T201 - what it is run for
        json.dumps({"train": train, "gradients": gradients, "slope": slope}[work](root, **settings))
    )


if __name__ == "__main__":
    main()
