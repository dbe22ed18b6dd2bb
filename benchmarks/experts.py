"""What experts that are leased in groups take, against whole layers.

python benchmarks/experts.py
python benchmarks/experts.py --rounds 5 --tokens 4096 --groups 8 16 --layers 4

A model of twelve layers of the form of DeepSeek-V3, with 256 experts of which each token has 8, a
shared expert and small sizes. With few layers groups look slower than they are in a deep model: the
top layer alone runs its experts once more, and where the step turns whole layers are still in the
two slots. Each arm is a model of its own; they take turns. Slots are two, in both arms, beside
which one layer's activations are there: of one micro-batch, or of all while they wait for experts.
Seconds are the processor's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import print_machine
from transformers import AutoModelForCausalLM, DeepseekV3Config

from lema import LemaConfig, LemaModel
from lema.engine.head.loss import split_batch

EXPERTS = 256
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
CONFIG = DeepseekV3Config(
    **LATENT,
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=8,
    n_shared_experts=1,
    first_k_dense_replace=0,
    max_position_embeddings=1024,
)


def opened(directory: Path, size: int | None) -> LemaModel:
    """Return a model that streams through two slots, with `size` experts in each; None: a layer."""
    settings: dict[str, Any] = {
        "prefetch_depth": 1,
        "device_memory": None,
        "lora_target_parameters": [],
    }
    config = LemaConfig(
        str(directory),
        device="cpu",
        gradient_checkpointing=True,
        save_steps=0,
        experts_per_slot=size,
        **settings,
    )
    model = LemaModel(config)
    model.initialize_lora()
    return model


def measure(directory: Path, tokens: int, groups: list[int], rounds: int, layers: int) -> None:
    """Print slots, seconds and reads of each arm."""
    torch.manual_seed(0)
    CONFIG.num_hidden_layers = layers
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(directory)
    ids = torch.randint(0, CONFIG.vocab_size, (tokens // 512, 512))
    micro_batches = split_batch({"input_ids": ids, "labels": ids}, max(1, len(ids) // 4))
    arms: dict[int, LemaModel] = {
        count: opened(directory, EXPERTS // count if count > 1 else None) for count in groups
    }
    seconds: dict[int, list[float]] = {count: [] for count in groups}
    losses = dict[int, float]()
    for number in range(rounds + 1):
        for count, model in arms.items():
            began = time.process_time()
            trainer = model.adapter
            loss = trainer.loss(micro_batches)
            loss.backward()
            losses[count] = float(loss)
            for parameter in model.get_trainable_parameters():
                parameter.grad = None
            if number:
                seconds[count].append(time.process_time() - began)
    print(
        f"{layers} layers, {tokens} tokens a step, {len(micro_batches)} micro-batches, "
        f"{rounds} rounds"
    )
    print("| groups | two slots MB | of whole layers | CPU seconds | speed | loss |")
    whole = 2 * arms[groups[0]].memory.slot_bytes
    for count, model in arms.items():
        slots = 2 * model.memory.slot_bytes
        speed = [a / b for a, b in zip(seconds[groups[0]], seconds[count], strict=True)]
        row = f"{slots / 1e6:.1f} | {slots / whole:.2f} | {statistics.median(seconds[count]):.2f}"
        print(f"| {count} | {row} | {statistics.median(speed):.2f} | {losses[count]:.6f} |")
        model.close()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--groups", type=int, nargs="+", default=[8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as directory:
        measure(
            Path(directory) / "model", given.tokens, [1, *given.groups], given.rounds, given.layers
        )


if __name__ == "__main__":
    main()
