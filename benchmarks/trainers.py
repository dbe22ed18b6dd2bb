"""TRL's SFTTrainer on a model that `lema.streamed` opens, against LemaTrainer: the same rows, step
about.

    OMP_NUM_THREADS=1 python benchmarks/trainers.py        # in an environment with TRL: tox -e trl

Both are in one process, each with a stream of its own over the same files, and take their steps by
turns, so that whatever else the machine does falls on both; the first steps are dropped. What is
compared is the processor's time of the process in user mode, all threads, which other processes
touch little. The ratio is LemaTrainer's time by the other one's, median and quartiles over the
rounds: 1 is as fast. The losses of every step have to be alike, to 1e-4.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import Shape, forget_pages, hush, print_machine, write_model
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import lema
from lema import LemaConfig, LemaModel

RATE = 1e-3


class ByTurns(TrainerCallback):
    """Takes a step of LemaTrainer before each of the trainer's, and times both."""

    def __init__(self, trainer: Any, batch: dict[str, torch.Tensor]) -> None:
        self.trainer = trainer
        self.batch = batch
        self.ours = list[float]()
        self.theirs = list[float]()
        self.losses = list[float]()
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        began = os.times().user
        self.losses.append(self.trainer.train_step(self.batch)[1])
        self.began = os.times().user
        self.ours.append(self.began - began)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.theirs.append(os.times().user - self.began)


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
    torch.manual_seed(0)
    ids = torch.randint(3, shape.vocabulary, (arguments.rows, arguments.length))
    adapter = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, shape)
        if arguments.accumulation:
            _accumulate(arguments, directory, ids, adapter)
            return
        own = LemaModel(
            LemaConfig(
                str(directory),
                device="cpu",
                micro_batch_size=arguments.micro_batch_size,
                gradient_checkpointing=True,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                output_dir=f"{name}/lema",
            )
        )
        own.attach_lora(adapter, seed=42)
        turns = ByTurns(
            own.get_trainer(),
            {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)},
        )
        model = lema.streamed(
            directory, adapter, device="cpu", micro_batch_size=arguments.micro_batch_size
        )
        trainer = SFTTrainer(
            model,
            args=_settings(arguments, name, arguments.rows, arguments.steps + 2),
            train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
            processing_class=_tokenizer(),
            callbacks=[turns],
        )
        trainer.train()
        for one, other in zip(
            turns.losses,
            [one["loss"] for one in trainer.state.log_history if "loss" in one],
            strict=False,
        ):
            assert math.isclose(one, float(other), rel_tol=1e-4), (one, other)
        ratios = [one / other for one, other in zip(turns.ours, turns.theirs, strict=True)][2:]
        first, middle, third = statistics.quantiles(ratios, n=4)
        print(
            (
                f"LemaTrainer {statistics.median(turns.ours[2:]):.2f} s of the processor's "
                "user time per step, "
            ),
            end="",
        )
        print(f"SFTTrainer {statistics.median(turns.theirs[2:]):.2f} s")
        print(
            f"{middle:.3f} of LemaTrainer's tokens per second ({first:.3f} to "
            f"{third:.3f}), {len(ratios)} rounds"
        )
        model.close()
        own.close()


class Seconds(TrainerCallback):
    """Times each optimizer step on the clock."""

    def __init__(self) -> None:
        self.began = 0.0
        self.steps = list[float]()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(perf_counter() - self.began)


def _accumulate(
    arguments: argparse.Namespace, directory: Path, ids: torch.Tensor, adapter: LoraConfig
) -> None:
    ratios = []
    for number in range(arguments.steps):
        seconds = {}
        for wide in (True, False) if number % 2 else (False, True):
            forget_pages(directory)
            model = lema.streamed(
                directory, adapter, device="cpu", micro_batch_size=arguments.micro_batch_size
            )
            watch = Seconds()
            rows = arguments.rows if wide else 1
            data = Dataset.from_dict({"input_ids": ids.tolist()})
            settings = _settings(arguments, f"{directory}/trl", rows, 3)
            SFTTrainer(
                model,
                args=settings,
                train_dataset=data,
                processing_class=_tokenizer(),
                callbacks=[watch],
            ).train()
            model.close()
            seconds[wide] = statistics.mean(watch.steps[1:])
        ratios.append(seconds[False] / seconds[True])
        print(
            (
                f"one batch of {arguments.rows} rows {seconds[True]:.2f} s, accumulated "
                f"{seconds[False]:.2f} s"
            ),
            flush=True,
        )
    first, middle, third = statistics.quantiles(ratios, n=4)
    print(
        f"{middle:.2f} x the tokens per second of accumulation ({first:.2f} to "
        f"{third:.2f}), {len(ratios)} rounds"
    )


def _settings(arguments: argparse.Namespace, name: str, rows: int, steps: int) -> SFTConfig:
    return SFTConfig(
        f"{name}/trl",
        max_steps=steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=arguments.rows // rows,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_length=arguments.length,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        activation_checkpointing=True,
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for option, value in {
        "hidden": 512,
        "layers": 8,
        "vocabulary": 4096,
        "rows": 16,
        "length": 128,
        "micro-batch-size": 2,
        "steps": 7,
    }.items():
        parser.add_argument(f"--{option}", type=int, default=value)
    parser.add_argument(
        "--accumulation",
        action="store_true",
        help="one wide batch against accumulation of its rows",
    )
    return parser.parse_args()


if __name__ == "__main__":
    hush()
    main()
