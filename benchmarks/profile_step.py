"""Where the time of one streamed step goes, by operation.

python benchmarks/profile_step.py --arithmetic fast
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Shape, write_model

from lema import LemaConfig, LemaModel
from lema.engine.head.loss import split_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--arithmetic", default="exact", help="exact or fast")
    parser.add_argument("--directory", type=Path, help="where to write the model (a disk, not memory)")
    arguments = parser.parse_args()
    shape = Shape(1024, 2816, arguments.layers, 16000)
    ids = torch.randint(0, shape.vocabulary, (4, 256))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        write_model(Path(name), shape)
        how: dict[str, Any] = {"arithmetic": arguments.arithmetic}
        model = LemaModel(LemaConfig(name, device="cpu", gradient_checkpointing=True, save_steps=0, **how))
        model.initialize_lora()
        trainer, micro_batches = model.get_trainer(), split_batch({"input_ids": ids, "labels": ids}, 1)
        trainer.accumulate(micro_batches)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            trainer.accumulate(micro_batches)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=16))
        model.close()


if __name__ == "__main__":
    main()
