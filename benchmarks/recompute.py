"""What a step saves where it leaves products out, and sums of weights and adapters.

python benchmarks/recompute.py
python benchmarks/recompute.py --experts 64

Recomputations skip the last frozen product of each layer, beside stopping early. With `--experts`,
a model of so many experts in a layer, which are not adapted, adapted with their weights multiplied
apart, and in PEFT's way, by the sum of all of them. The arms alternate in one process. The
arithmetic is that of all matrix products and attention of a step, as torch counts it; seconds are
of a shared machine, so only their ratio within a round says something.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import print_machine
from peft.tuners.lora.layer import ParamWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from lema import LemaConfig, LemaModel
from lema.engine.head.loss import split_batch

SIZES = {"hidden_size": 512, "num_attention_heads": 8, "vocab_size": 2000, "num_hidden_layers": 6}
SHAPES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, intermediate_size=1408),
    "gpt_neox (parallel blocks)": GPTNeoXConfig(
        **SIZES, intermediate_size=2048, hidden_dropout=0.0
    ),
}


class Flops(TorchDispatchMode):
    """Counts the arithmetic of what runs in its `with` block, and the bytes of what is made
    there and still alive.
    """

    count = live = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            one.untyped_storage()._cdata
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.count += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        for one in tree_leaves(out):
            if (
                isinstance(one, torch.Tensor)
                and (storage := one.untyped_storage())._cdata not in given
            ):
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return out

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes


def arms() -> dict[str, AbstractContextManager[object]]:
    """Return the contexts in which a step is taken."""
    nothing_skipped = patch("lema.engine.visit.AdaptedLinears", lambda _: None)
    return {"early stop alone": nothing_skipped, "last product skipped": nullcontext()}


def measure(directory: Path, config: PreTrainedConfig, rounds: int) -> None:
    """Print the arithmetic of one step of each arm, and the median of the rounds' ratios of
    seconds.
    """
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    ids = torch.randint(0, config.vocab_size, (4, 256))
    model = LemaModel(
        LemaConfig(str(directory), device="cpu", gradient_checkpointing=True, save_steps=0)
    )
    model.initialize_lora()
    trainer = model.get_trainer()
    micro_batches = split_batch({"input_ids": ids, "labels": ids}, 1)
    flops = dict[str, int]()
    seconds = dict[str, list[float]]()
    for number in range(rounds + 1):
        for name, arm in arms().items():
            with arm:
                # unmeasured, so that each arm finds caches as it leaves them
                trainer.accumulate(micro_batches)
                if number == 0:
                    with Flops() as counted:
                        trainer.accumulate(micro_batches)
                    flops[name] = counted.count
                    continue
                start = time.perf_counter()
                trainer.accumulate(micro_batches)
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    model.close()
    (first, base), *_ = flops.items()
    for name, count in flops.items():
        ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds[first], strict=True)]
        low = min(ratios)
        middle = statistics.median(ratios)
        high = max(ratios)
        print(
            f"{name:28} {count / 1e9:8.2f} GFLOP {count / base:7.4f}    seconds x "
            f"{middle:.3f} ({low:.3f}-{high:.3f})"
        )


def compare_experts(directory: Path, number: int, rounds: int) -> None:
    """Print, for each way to adapt experts, what a step makes at most beside weights and
    adapters, and CPU seconds.
    """
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 2000,
    }
    experts = {
        "num_experts": number,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
    }
    config = Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=4)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    ids = torch.randint(0, config.vocab_size, (2, 512))
    models = dict[str, LemaModel]()
    seconds = dict[str, list[float]]()
    for name in ("experts not adapted", "multiplied apart", "PEFT's sum"):
        excluded = {"lora_exclude_modules": ["experts"]} if name == "experts not adapted" else {}
        settings: dict[str, Any] = {
            "gradient_checkpointing": True,
            "save_steps": 0,
            "device_memory": None,
            **excluded,
        }
        models[name] = model = LemaModel(
            LemaConfig(str(directory), device="cpu", lora_rank=8, **settings)
        )
        model.initialize_lora()
        if name == "PEFT's sum":
            for wrapper in [
                part for part in model.skeleton.modules() if isinstance(part, ParamWrapper)
            ]:
                wrapper.__class__ = ParamWrapper
    counted = {name: Flops() for name in models}
    for number_of_round in range(rounds + 1):
        for name, model in models.items():
            trainer = model.get_trainer()
            batches = split_batch({"input_ids": ids, "labels": ids}, 1)
            trainer.accumulate(batches)  # unmeasured, so that gradients and buffers are there
            if number_of_round == 0:
                with counted[name]:
                    trainer.accumulate(batches)
            start = time.process_time()
            trainer.accumulate(batches)
            seconds.setdefault(name, []).append(time.process_time() - start)
    base = counted["experts not adapted"]
    first = seconds["experts not adapted"]
    demand = model.opened.demand()
    slots = model.allocation.slots
    weights = slots * max(layer.slot_bytes for layer in demand.layers) + demand.outside_bytes
    print(f"{slots} slots, embeddings and head: {weights / 1e6:.1f} MB")
    for name, model in models.items():
        ratio = statistics.median(
            mine / theirs for mine, theirs in zip(seconds[name], first, strict=True)
        )
        own = counted[name]
        adapters = 4 * model.num_adapter_parameters
        print(
            f"{name:20} adapters {adapters / 1e6:6.1f} MB   made at most "
            f"{own.peak / 1e6:7.1f} MB, x "
            f"{own.peak / base.peak:.2f}, with those weights x "
            f"{(weights + own.peak) / (weights + base.peak):.2f}   "
            f"CPU seconds x {ratio:.2f}"
        )
        model.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--experts", type=int, help="of a layer; compares ways to adapt them instead"
    )
    arguments = parser.parse_args()
    print_machine()
    if arguments.experts:
        with tempfile.TemporaryDirectory() as directory:
            compare_experts(Path(directory), arguments.experts, arguments.rounds)
        return
    for name, config in SHAPES.items():
        print(name)
        with tempfile.TemporaryDirectory() as directory:
            measure(Path(directory), config, arguments.rounds)


if __name__ == "__main__":
    main()
