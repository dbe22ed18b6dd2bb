"""Seconds of a step of each preference objective, against supervised training on the same rows,
step about.

    OMP_NUM_THREADS=1 python benchmarks/objectives.py
    OMP_NUM_THREADS=1 python benchmarks/objectives.py --hidden 256 --length 64 --rounds 3

Every objective has a model of its own over the same files, all in one process, and they take their
steps by turns, so that whatever else the machine does falls on all; the first round is dropped.
What is compared is the processor's time of the process in user mode, which other processes touch
little. All of them train the same pairs, every token of them; the ratio is to the step of `sft` in
the same round: 1 is as fast. DPO, IPO and KTO have a reference, which is one forward more; KTO's
rows are compared with mismatched ones, which no other objective computes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from common import Shape, hush, print_machine, write_model
from peft import LoraConfig

from lema import LemaConfig, LemaModel
from lema.data.dataset import Columns, TokenDataset
from lema.data.files import Row
from lema.data.preference import PreferenceDataset

OBJECTIVES = ("sft", "dpo", "ipo", "orpo", "simpo", "kto")


def main() -> None:
    arguments = _arguments()
    print_machine()
    shape = Shape(
        arguments.hidden,
        11 * arguments.hidden // 4,
        arguments.layers,
        arguments.vocabulary,
        dtype="float32",
    )
    adapter = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        write_model(Path(directory), shape)
        trainers = {}
        for objective in OBJECTIVES:
            config = LemaConfig(
                directory,
                device="cpu",
                objective=objective,
                micro_batch_size=arguments.micro_batch_size,
                gradient_checkpointing=True,
                learning_rate=1e-4,
                output_dir=f"{directory}/{objective}",
            )
            model = stack.enter_context(closing(LemaModel(config)))
            model.attach_lora(adapter, seed=42)
            trainers[objective] = model.get_trainer()
        seconds: dict[str, list[float]] = {objective: [] for objective in OBJECTIVES}
        for number in range(arguments.rounds + 1):
            first = number % len(OBJECTIVES)
            for objective in OBJECTIVES[first:] + OBJECTIVES[:first]:
                batch = _batch(arguments, objective)
                began = os.times().user
                trainers[objective].train_step(batch)
                seconds[objective].append(os.times().user - began)
    for objective, found in seconds.items():
        ratios = [one / other for one, other in zip(found, seconds["sft"], strict=True)][1:]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{objective:6} {statistics.median(found[1:]):6.2f} s of the processor's user "
            "time per step, "
            f"{middle:.3f} of sft ({low:.3f} to {high:.3f}), {len(ratios)} rounds"
        )


def _batch(arguments: argparse.Namespace, objective: str) -> Any:
    """Pairs side by side, or rows of which every other is desirable: the same tokens for every
    objective.
    """
    draw = torch.Generator().manual_seed(0)
    columns = Columns()
    for number in range(arguments.rows):
        ids = torch.randint(3, arguments.vocabulary, (arguments.length,), generator=draw).tolist()
        columns.append(Row({}, "made", number), ids, list(ids), cut=[])
    data = TokenDataset(columns.table())
    labels = (
        torch.arange(arguments.rows).remainder(2).eq(0).long().numpy()
        if objective == "kto"
        else None
    )
    pairs = PreferenceDataset(data, labels, arguments.length)
    batch = {**pairs.batch_of(range(len(pairs)), range(len(pairs)))}
    return {name: batch[name] for name in ("input_ids", "labels")} if objective == "sft" else batch


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for option, value in {
        "hidden": 512,
        "layers": 8,
        "vocabulary": 4096,
        "rows": 16,
        "length": 128,
        "micro-batch-size": 2,
        "rounds": 6,
    }.items():
        parser.add_argument(f"--{option}", type=int, default=value)
    return parser.parse_args()


if __name__ == "__main__":
    hush()
    main()
