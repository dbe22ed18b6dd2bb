"""Writes what a run of one common shape is made of: a model of random weights, rows of random
tokens, and `run.yaml`.

python benchmarks/shaped_run.py DIRECTORY --layers 6
lema profile DIRECTORY/run.yaml

`--8b` writes the shape of Llama 3 8B, 16 GB of zeros that take no room, for what a start costs
(start.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from common import Shape, write_model, write_zeros

NUM_ROWS = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="on a disk, not in memory")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=16000)
    parser.add_argument("--micro-batches", type=int, default=4, help="of one row each")
    parser.add_argument("--tokens", type=int, default=256, help="of one row")
    parser.add_argument(
        "--8b", dest="large", action="store_true", help="the shape of Llama 3 8B, of zeros"
    )
    parser.add_argument("--device-memory", help="of the run")
    arguments = parser.parse_args()
    shape = Shape(arguments.hidden, arguments.intermediate, arguments.layers, arguments.vocabulary)
    model = arguments.directory / "model"
    rows = arguments.directory / "rows.jsonl"
    if arguments.large:
        shape = Shape(4096, 14336, 32, 128256, heads=32, kv_heads=8)
        write_zeros(model, shape)
    else:
        write_model(model, shape)
    ids = torch.randint(
        0,
        shape.vocabulary,
        (NUM_ROWS, arguments.tokens),
        generator=torch.Generator().manual_seed(0),
    )
    rows.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids.tolist()))
    settings = {
        "model_name_or_path": str(model),
        "train_data": str(rows),
        "output_dir": str(arguments.directory / "output"),
        "device": "cpu",
        "gradient_checkpointing": True,
        "max_length": arguments.tokens,
        "batch_size": arguments.micro_batches,
        "micro_batch_size": 1,
        "max_steps": 10,
        "save_steps": 0,
        "overwrite_output_dir": True,
    }
    if arguments.device_memory is not None:
        settings["device_memory"] = arguments.device_memory
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in settings.items()]
    (arguments.directory / "run.yaml").write_text("".join(lines))


if __name__ == "__main__":
    main()
