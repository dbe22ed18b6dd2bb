"""Full-parameter training, streamed from host memory, against the same model trained whole in
memory: step about.

    python benchmarks/full.py

Both arms train every weight of one model on the same tokens with AdamW and gradient checkpointing,
in fp32, in one process; the arms alternate, and the first step of each is not counted. A ratio is
the in-memory arm's seconds by the streamed arm's in the same round: median and quartiles; more than
1 is faster. Losses have to be alike, to 1e-6: the arms add micro-batches up in other types.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import Shape, report, write_model
from plainloop import RATE, adamw, plain_step
from torch import Tensor
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.engine.head.loss import split_batch
from lema.train.full.training import FullTraining


def main() -> None:
    arguments = _arguments()
    shape = Shape(
        arguments.hidden, 11 * arguments.hidden // 4, arguments.layers, 8000, dtype="float32"
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        write_model(directory, shape)
        ids = torch.randint(
            0,
            shape.vocabulary,
            (arguments.micro_batches, arguments.tokens // arguments.micro_batches),
        )
        whole, (streamed, close) = _whole(directory, ids), _streamed(directory, ids)
        rounds = []
        for number in range(arguments.rounds + 1):
            order = [("streamed", streamed), ("in memory", whole)]
            times = {}
            losses = {}
            for arm, step in order if number % 2 else reversed(order):
                began = time.perf_counter()
                losses[arm] = step()
                times[arm] = time.perf_counter() - began
            assert math.isclose(losses["streamed"], losses["in memory"], rel_tol=1e-6), losses
            rounds.append(times)
        close()
    rounds = rounds[1:]
    ratios = [one["in memory"] / one["streamed"] for one in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4)
    seconds = {arm: statistics.median(one[arm] for one in rounds) for arm in rounds[0]}
    print(f"streamed {seconds['streamed']:.2f} s, in memory {seconds['in memory']:.2f} s")
    print(
        f"speed of streaming, in memory = 1: {middle:.3f} ({low:.3f} - {high:.3f}), "
        f"{len(rounds)} rounds"
    )
    report(
        "full",
        {"seconds": seconds, "ratio": middle, "quartiles": [low, high], "rounds": rounds},
        shape,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1024, help="per optimizer step")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8, help="measured, after one that is not")
    parser.add_argument("--directory", type=Path, help="where to write the model")
    return parser.parse_args()


def _whole(directory: Path, ids: Tensor) -> Callable[[], float]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # memory of its own, not a map of the file
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return plain_step(model.train(), ids, model.dtype, adamw(model))


def _streamed(directory: Path, ids: Tensor) -> tuple[Callable[[], float], Callable[[], None]]:
    config = LemaConfig(
        str(directory),
        device="cpu",
        strategy="resident",
        gradient_checkpointing=True,
        learning_rate=RATE,
        weight_decay=0.0,
        save_steps=0,
    )
    model = LemaModel(config)
    model.skeleton.train()
    training = FullTraining(model.adapter, config)
    batch = {"input_ids": ids, "labels": ids}
    return lambda: training.accumulate(split_batch(batch, 1)).loss, model.close


if __name__ == "__main__":
    main()
