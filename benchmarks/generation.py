"""Tokens per second of texts that are made one, a few, or many at once, where reading the weights
is the limit.

    python benchmarks/generation.py
    python benchmarks/generation.py --layers 16 --batches 1 8 64 128 --rounds 3

No layer stays in memory: each token of a batch reads all of them from the disk, past the page
cache. Arms take turns, and who begins changes every round. The prompts are random tokens, of one
length; no text ends before it has all its tokens. What is compared is tokens per second, prompts
and all, with those of the first batch in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import Meter, Shape, forget_pages, report, write_model
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lema import LemaConfig, LemaModel
from lema.config.units import human_bytes
from lema.engine import complete


@dataclass(frozen=True)
class Run:
    prompts: int
    round: int
    seconds: float
    tokens: int
    leases: int
    bytes_read: int
    others: float  # cores that something else had

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--dtype",
        default="float32",
        help="bfloat16 computes slowly on processors without units for it",
    )
    parser.add_argument("--prompt", type=int, default=8, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens made for each")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8, 64], help="prompts at once"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--directory", type=Path, help="where to write the model (a disk, not memory)"
    )
    arguments = parser.parse_args()
    shape = Shape(
        arguments.hidden, arguments.intermediate, arguments.layers, 1000, dtype=arguments.dtype
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        write_model(directory, shape)
        with closing(LemaModel(LemaConfig(name, device="cpu"))) as model:
            _made(model, 1, -1, arguments.prompt, 1)  # what is done once
            runs = []
            for number in range(arguments.rounds):
                batches = arguments.batches
                for count in batches[number % len(batches) :] + batches[: number % len(batches)]:
                    forget_pages(directory)
                    runs.append(_made(model, count, number, arguments.prompt, arguments.new))
    _show(runs, arguments.batches)
    report("generation", [{**asdict(one), "tokens_per_second": one.rate} for one in runs], shape)


def _made(model: LemaModel, count: int, number: int, prompt: int, new: int) -> Run:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    )
    ids = torch.randint(
        3, 1000, (count, prompt), generator=torch.Generator().manual_seed(count)
    ).tolist()
    before = model.memory.counters
    with Meter() as meter:
        made = complete(
            model.split,
            model.memory,
            model.directory,
            tokenizer,
            ids,
            new,
            {"min_new_tokens": new, "use_cache": True},
        )
    after = model.memory.counters
    tokens = sum(len(one.tokens) for one in made)
    leases = after.leases - before.leases
    read = after.bytes_read - before.bytes_read
    return Run(count, number, meter.seconds, tokens, leases, read, meter.others)


def _show(runs: Sequence[Run], batches: Sequence[int]) -> None:
    table = Table(
        "prompts at once",
        "tok/s",
        f"x {batches[0]}",
        "s per token step",
        "read per step",
        "read/s",
        "others",
    )
    first = {one.round: one.rate for one in runs if one.prompts == batches[0]}
    for count in batches:
        own = [one for one in runs if one.prompts == count]
        seconds = statistics.median(one.seconds for one in own)
        steps = own[0].tokens // count
        table.add_row(
            str(count),
            f"{statistics.median(one.rate for one in own):.2f}",
            f"{statistics.median(one.rate / first[one.round] for one in own):.1f}",
            f"{seconds / steps:.3f}",
            human_bytes(statistics.median(one.bytes_read for one in own) / steps),
            f"{human_bytes(statistics.median(one.bytes_read / one.seconds for one in own))}/s",
            f"{statistics.median(one.others for one in own):.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
