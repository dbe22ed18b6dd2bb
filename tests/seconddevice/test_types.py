"""Models of every type take the step on a device with memory of its own that they take on the CPU.

A run of all tests tries one type for each trait; `tox -e seconddevice` tries all, and its table is
a column of docs/models.md.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from everytype import STREAMED, micro_batches, write_model
from seconddevice.steps import DISTANCE, WITHIN, on_both
from tinyconfig import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of types that are announced as old

# One for each trait that has to do with where tensors are.
TRAITS = {
    "llama": "rotary tables that follow the hidden state",
    "phi3": "fused projections",
    "gpt2": "learnt positions, a mask that is a buffer",
    "bert": "position ids that are a buffer",
    "codegen": "sines and cosines that are a buffer of each layer",
    "gptj": "the same, and no way for them to move by themselves",
    "gpt_neo": "a mask by layer",
    "bloom": "a bias of attention by distance",
    "falcon_h1": "multipliers that are buffers, state space",
    "mixtral": "experts",
    "gpt_oss": "experts that are stored fused, with biases and sinks",
    "aria": "experts in a model that reads images",
    "qwen3_vl_moe": "fused experts of a vision model",
    "deepseek_v3": "a router with a correction that is a buffer",
    "deepseek_v32": "attention over chosen tokens",
    "mamba": "convolutions and states",
    "jamba": "kinds of layers that alternate",
    "qwen3_5_text": "linear attention",
    "rwkv": "a recurrence of the CPU's own",
    "zamba2": "weights that layers share",
    "bart": "an encoder and a decoder",
    "llava": "a vision model before the text",
    "gemma3": "two rotary tables, an image model",
    "gemma3n_text": "embeddings by layer, predictions and corrections",
    "gemma2": "caps, windows and a tied head",
    "opt": "positions with an offset",
    "xlnet": "relative positions made in the forward",
    "qwen3_next": "gated attention and experts",
    "longcat_flash": "experts of which some do nothing",
    "minimax": "lightning attention with a buffer of decays",
    "phi": "a part of each head turned",
    "bamba": "hybrid layers",
}
CHOSEN = [kind for kind in TRAITS if kind in STREAMED]
OTHERS = [kind for kind in STREAMED if kind not in TRAITS]


Record = Callable[[str, object], None]


def assert_near(model_type: str, directory: Path, record: Record) -> None:
    """Compare the steps; their distance is for the table that `tox -e seconddevice` writes."""
    published = write_model(tiny_config(model_type), directory / "published")
    second, cpu = on_both(published, micro_batches(), lora_target_parameters=[])
    distance = second.distance(cpu)
    record(DISTANCE, (model_type, distance))
    assert distance < WITHIN


@pytest.mark.parametrize("model_type", CHOSEN)
def test_a_step_is_the_cpus(model_type: str, tmp_path: Path, record_property: Record) -> None:
    assert_near(model_type, tmp_path, record_property)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", OTHERS)
def test_a_step_of_every_other_type_is_the_cpus(
    model_type: str, tmp_path: Path, record_property: Record
) -> None:
    assert_near(model_type, tmp_path, record_property)


def test_thirty_traits_are_tried() -> None:
    assert len(CHOSEN) >= 30
