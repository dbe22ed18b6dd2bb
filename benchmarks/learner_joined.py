"""Processor time of sixteen adapters in one pass, by the sum of what each computes alone.

    OMP_NUM_THREADS=1 python benchmarks/learner_joined.py

A random Llama of 8 layers, fp32, on the CPU; adapters of rank 8 to 64, each with rows of its own.
Three arms take turns in one process: all requests in one pass over layers that stream; each request
alone over layers that stream; and each alone over layers that all stay in memory, which is what
computing takes by itself. Times are seconds of the processor in user mode, of the whole process, so
that other programs on the machine count for little; the medians over rounds are compared. Weight
bytes are those that each arm was handed as leases.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Shape, machine, print_machine, write_model

from lema.train.learner.adapter import AdapterSpec
from lema.train.learner.learner import Learner
from lema.train.learner.rows import AdapterRows, Datum


def user_seconds() -> float:
    """Return the processor time in user mode that this process has taken."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def requests_of(clients: int, rows: int, length: int, vocabulary: int) -> list[AdapterRows]:
    """Return one request of each client."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for client in range(clients):
        data = []
        for _ in range(rows):
            ids = torch.randint(3, vocabulary, (length + 1,), generator=generator)
            data.append(Datum(ids[:-1], ids[1:]))
        requests.append(AdapterRows(f"c{client}", data, "cross_entropy"))
    return requests


def opened(model: Path, clients: int, tokens: int, *, resident: bool) -> Learner:
    """Return a learner with an adapter for each client."""
    learner = Learner.open(
        model,
        device="cpu",
        micro_batch_tokens=tokens,
        longest=tokens,
        reserve=(clients, 64),
        strategy="resident" if resident else "streaming",
    )
    for client in range(clients):
        rank = 8 + (56 * client) // max(1, clients - 1)
        learner.add(f"c{client}", AdapterSpec(rank, seed=client, train_unembed=False))
    return learner


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    hidden = arguments.hidden
    shape = Shape(hidden, 3 * hidden, 8, 2048, heads=4, dtype="float32", kv_heads=2)
    tokens = arguments.rows * arguments.length
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", shape)
        learners = {
            kind: opened(
                Path(folder) / "model", arguments.clients, tokens, resident=kind == "resident"
            )
            for kind in ("streaming", "resident")
        }
        seen = compared(learners, arguments)
    print_machine()
    for name, value in seen.items():
        print(f"{name}: {value:.3f}")
    RESULTS.mkdir(exist_ok=True)
    record = {"benchmark": "learner_joined", "machine": machine(), **vars(arguments), "seen": seen}
    (RESULTS / "learner_joined.json").write_text(json.dumps(record, indent=1) + "\n")


def compared(learners: dict[str, Learner], arguments: argparse.Namespace) -> dict[str, float]:
    """Return the ratios of the arms."""
    requests = requests_of(arguments.clients, arguments.rows, arguments.length, 2048)
    arms = {
        "joined": (learners["streaming"], [requests]),
        "alone": (learners["streaming"], [[request] for request in requests]),
        "computing": (learners["resident"], [[request] for request in requests]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    nbytes: dict[str, list[int]] = {name: [] for name in arms}
    for number in range(arguments.rounds + 1):
        for name, (learner, passes) in arms.items():
            before: Any = learner.counters.bytes_uploaded
            began = user_seconds()
            for of_pass in passes:
                learner.run(of_pass)
            taken = user_seconds() - began
            if number:
                seconds[name].append(taken)
                nbytes[name].append(learner.counters.bytes_uploaded - before)
        print(f"round {number}", time.strftime("%H:%M:%S"), flush=True)
    medians = {name: statistics.median(of_arm) for name, of_arm in seconds.items()}
    return {
        "time of one pass by the sum of computing": medians["joined"] / medians["computing"],
        "time of one pass by the sum of passes alone": medians["joined"] / medians["alone"],
        "weight bytes of one pass by those of passes alone": nbytes["joined"][-1]
        / max(1, nbytes["alone"][-1]),
        "seconds of one pass": medians["joined"],
    }


if __name__ == "__main__":
    main()
