"""Seconds of a step of a model in half precision on a processor that may have no instructions for
it.

    python benchmarks/half_precision.py
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/half_precision.py   # as on a laptop

Arms: PEFT with the model as `from_pretrained` loads it; LEMA in the type of the weights; LEMA as it
is by default; PEFT with `dtype=torch.float32`. They take turns in one process, and the first round
is dropped. `loss` is that of the first step; where LEMA computes in float32 it is that of the last
arm, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from common import Shape, hush, report, write_model
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel

RATE = 1e-4
Step = Callable[[], float]


def main() -> None:
    given = _arguments()
    shape = Shape(
        given.hidden, 11 * given.hidden // 4, given.layers, given.vocabulary, dtype=given.dtype
    )
    ids = torch.randint(
        3, given.vocabulary, (1, given.tokens), generator=torch.Generator().manual_seed(0)
    )
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(directory / "model", shape)
        arms = {
            "PEFT, as loaded": lambda: _peft(directory, ids, "auto"),
            "LEMA, compute_dtype: weights": lambda: _lema(stack, directory, ids, "weights"),
            "LEMA": lambda: _lema(stack, directory, ids, "auto"),
            "PEFT, float32": lambda: _peft(directory, ids, torch.float32),
        }
        _lema(stack, directory, ids, "weights", save=True)
        steps = {name: make() for name, make in arms.items()}
        rows = _rounds(steps, given.rounds)
    first = rows[0]["seconds"]
    for row in rows:
        print(
            f"{row['arm']:30} {row['seconds']:8.3f} s a step, "
            f"{first / row['seconds']:6.1f} x, loss {row['loss']!r}"
        )
    report("half_precision", rows, shape)


def _rounds(steps: dict[str, Step], rounds: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = dict[str, float]()
    for _ in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            loss = step()
            losses.setdefault(name, loss)
            seconds[name].append(time.perf_counter() - began)
    return [
        {"arm": name, "seconds": statistics.median(found[1:]), "loss": losses[name]}
        for name, found in seconds.items()
    ]


def _lema(
    stack: ExitStack, directory: Path, ids: torch.Tensor, computed: str, *, save: bool = False
) -> Step:
    """Return a step of LEMA; `save`: leave the adapter for the other arms."""
    options: dict[str, Any] = {"compute_dtype": computed, "learning_rate": RATE, "save_steps": 0}
    options["gradient_checkpointing"] = True
    # All arms begin with one adapter, because PEFT rounds what it draws to the type of the weights.
    options |= (
        {"lora_init": False} if save else {"adapter_name_or_path": str(directory / "adapter")}
    )
    config = LemaConfig(
        str(directory / "model"), device="cpu", output_dir=str(directory / "run"), **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it computes in float32 is what is measured
        model = stack.enter_context(closing(LemaModel(config)))
    model.initialize_lora()
    if save:
        model.save_pretrained(directory / "adapter")
    trainer = model.get_trainer()
    return lambda: trainer.train_step({"input_ids": ids, "labels": ids})[1]


def _peft(directory: Path, ids: torch.Tensor, dtype: Any) -> Step:
    """Return a step of PEFT with gradient checkpointing, as its users take it: autocast to the
    weights' half.
    """
    base: Any = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=dtype)
    base.config.use_cache = False
    model = PeftModel.from_pretrained(base, str(directory / "adapter"), is_trainable=True).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)

    def step() -> float:
        with torch.autocast("cpu", dtype=base.dtype, enabled=base.dtype != torch.float32):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"hidden": 1024, "layers": 4, "vocabulary": 8192, "tokens": 128, "rounds": 3}
    for option, value in sizes.items():
        parser.add_argument(f"--{option}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    return parser.parse_args()


if __name__ == "__main__":
    hush()
    main()
