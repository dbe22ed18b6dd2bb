"""NaN and infinity in the loss, in each layer's output, gradient and weights: no step is taken,
the place is named.
"""

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import forked
from faults.outcome import Outcome
from faults.shortrun import ShortRun, checkpoint_steps, last_lines, short_run

__all__ = ["run"]

FAULT = (
    "NaN or infinity in the loss, each layer's output, each layer's gradient, each layer's weights"
)
REQUIRED = "exit 5 before the optimizer's step, the right layer named, nothing non-finite saved"
NUM_LAYERS = 8
NON_FINITE = 5
STEP = 3  # in which a value goes wrong; what is wrong on the disk is so from the first


@dataclass(frozen=True)
class Wrong:
    """What goes wrong.

    Attributes:
        what: `"output"` of a layer, `"gradient"` of its output, gradient `"handed down"` by it,
            `"weights"`, `"loss"`.
        layer: which; for the loss, nothing.
        value: what a number becomes.
    """

    what: str
    layer: int
    value: float


def every() -> list[Wrong]:
    """Return all cases; nothing below the lowest layer asks for the gradient that it would hand
    down.
    """
    layers = [
        Wrong(what, layer, value)
        for what in ("output", "gradient", "handed down", "weights")
        for layer in range(what == "handed down", NUM_LAYERS)
        for value in (float("nan"), float("inf"))
    ]
    return [*layers, Wrong("loss", 0, float("nan")), Wrong("loss", 0, float("inf"))]


def run(count: int = 0, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Try all cases, or `count` of them, evenly spread from the one that the seed names."""
    cases = every()
    count = min(count or len(cases), len(cases))
    chosen = [cases[(seed + number * len(cases) // count) % len(cases)] for number in range(count)]
    began = time.monotonic()
    failures = []
    made = short_run()
    for number, wrong in enumerate(chosen):
        told = (
            f"{wrong.value} in "
            f"{wrong.what}{'' if wrong.what == 'loss' else f' of layer {wrong.layer}'}"
        )
        if fault := _case(made, wrong):
            failures.append(f"{told}: {fault}")
        if report is not None:
            report(f"non-finite {number + 1}/{count}, {told}{': ' + fault if fault else ''}")
    return Outcome(
        FAULT, REQUIRED, count, count - len(failures), tuple(failures), time.monotonic() - began
    )


def _case(made: ShortRun, wrong: Wrong) -> str:
    made.forget("cut")
    ended = forked.run(lambda: _spoilt(made, wrong), made.log("cut"))
    out = made.out("cut")
    if ended.code != NON_FINITE:
        return f"it ended with {ended.code}: {last_lines(ended.said)}"
    done = 0 if wrong.what == "weights" else STEP - 1
    if checkpoint_steps(out) != list(range(1, done + 1)):
        return f"the checkpoints are of {checkpoint_steps(out)}"
    if spoilt := _not_finite(out):
        return f"saved: {spoilt}"
    named = re.findall(r"layers\.(\d+)\b", ended.said)
    if wrong.what == "loss":
        return "" if not named else f"layer {named[0]} is named"
    if not named or int(named[0]) != wrong.layer:
        return f"layer {named[0] if named else None} is named: {last_lines(ended.said)}"
    return ""


def _spoilt(made: ShortRun, wrong: Wrong) -> int:
    """Train with what is wrong in the model's weights or in its third step."""
    import torch

    from lema.engine import StreamedModel
    from lema.model import Split
    from lema.train import LemaTrainer

    if wrong.what == "weights":
        model = made.place / "spoilt"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(made.place / "model", model)
        _spoil_weights(model, wrong)
        return made.train("cut", model_name_or_path=str(model))

    now = [0]
    accumulate = LemaTrainer.accumulate
    run_layer = Split.run_layer
    loss_of = StreamedModel.loss

    def counted(self: LemaTrainer, *arguments: Any, **options: Any) -> Any:
        now[0] = self.global_step + 1
        return accumulate(self, *arguments, **options)

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * wrong.value

    def layer(
        self: Split, index: int, weights: Any, call: Any, hidden: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        if now[0] != STEP or index != wrong.layer:
            return run_layer(self, index, weights, call, hidden, **options)
        if wrong.what == "handed down" and torch.is_grad_enabled():
            hidden = hidden.clone()
            hidden.register_hook(spoil)
        output = run_layer(self, index, weights, call, hidden, **options)
        if wrong.what == "output":
            return spoil(output)
        if wrong.what == "gradient" and output.requires_grad:
            output.register_hook(spoil)
        return output

    def loss(self: StreamedModel, *arguments: Any, **options: Any) -> Any:
        found = loss_of(self, *arguments, **options)
        return found * wrong.value if now[0] == STEP and wrong.what == "loss" else found

    LemaTrainer.accumulate = counted
    Split.run_layer = layer
    StreamedModel.loss = loss  # type: ignore[method-assign]
    return made.train("cut")


def _spoil_weights(model: Path, wrong: Wrong) -> None:
    from safetensors.torch import load_file, save_file

    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        mine = [
            name
            for name in tensors
            if f"layers.{wrong.layer}." in name and name.endswith("down_proj.weight")
        ]
        for name in mine:
            tensors[name][1, 2] = wrong.value
            save_file(tensors, file, {"format": "pt"})
            return
    raise RuntimeError(f"there is no layer {wrong.layer}")


def _not_finite(out: Path) -> str:
    """Name the first tensor on the disk that is not finite."""
    from safetensors.torch import load_file

    for file in out.rglob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return f"{file.relative_to(out)}: {name}"
    return ""
