"""What layers hand on beside the hidden state waits, moves, is counted and is differentiated as
the hidden state is.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import compare, micro_batches, write_model
from tinyconfig import tiny_config
from transformers import Gemma4TextConfig

from lema import LemaConfig
from lema.model.capture import Between
from lema.plan.blueprint import draw_up
from lema.plan.work.workload import MicroBatch, measure

pytestmark = pytest.mark.filterwarnings("ignore")

# One that returns more, one whose model stacks what layers return, one that writes keys and values
# into a mapping.
TYPES = ["zaya", "inkling2_text", "gemma3n_text"]
WIDTH = 32
ROUTER = 24
PADDED = 64  # of zaya: its hidden state, what its routers hand on; elements


def zaya_boundaries(tokens: int) -> list[int]:
    """The bytes of what each of zaya's layers is given."""
    both = sum(-(-tokens * width // PADDED) * PADDED for width in (WIDTH, ROUTER))
    return [4 * tokens * WIDTH, *[4 * both] * 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"boundary_activations": "host"},
        {"boundary_activations": "disk"},
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": False, "activation_offloading": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", TYPES)
def test_numbers_are_the_whole_models_wherever_it_waits(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    found = compare(model_type, tmp_path, **settings, offload_dir=str(tmp_path))
    assert found.worst == 0
    assert not found.idle_layers


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_every_byte_of_it_is_counted(tier: str, tmp_path: Path) -> None:
    found = compare("zaya", tmp_path, boundary_activations=tier, offload_dir=str(tmp_path))
    assert found.worst == 0
    batches = [zaya_boundaries(batch["input_ids"].numel()) for batch in micro_batches()]
    # the top layer is not recomputed
    assert found.bytes_offloaded == sum(sum(each[:-1]) for each in batches)


def test_the_plan_knows_its_bytes(tmp_path: Path) -> None:
    directory = write_model(tiny_config("zaya"), tmp_path / "model")
    blueprint = draw_up(LemaConfig(str(directory), device="cpu"))
    work = measure(blueprint.model, blueprint.layers, MicroBatch(2, 64), 64)
    assert work.hidden_bytes == max(zaya_boundaries(128))


def test_keys_that_layers_share_have_the_whole_models_gradients(tmp_path: Path) -> None:
    """Few published models of this type share none; its default config does not."""
    settings = {**tiny_config("gemma4_text").to_dict(), "num_kv_shared_layers": 2}
    found = compare(Gemma4TextConfig(**settings), tmp_path)
    assert found.worst == 0
    assert not found.idle_layers


def test_values_go_on_bit_for_bit_and_their_gradients_as_they_lay() -> None:
    """Of two dtypes, and one that is not contiguous; indices wait. Sums over other strides would
    round otherwise.
    """
    hidden = torch.randn(2, 3, 4)
    keys = torch.randn(2, 5, 3, dtype=torch.bfloat16).transpose(1, 2)
    chosen = torch.tensor([1, 0])
    shared = dict[str, Any]()
    made = [hidden.requires_grad_(), keys.requires_grad_()]
    seen: list[tuple[int, ...]] = []
    hidden.register_hook(lambda gradient: seen.append(gradient.stride()))
    between = Between([7, 9], [shared])
    packed = between.packed({7: hidden, 9: chosen}, {id(shared): {"keys": (keys, "a word")}})
    given = packed.detach().requires_grad_()
    values, written = between.unpacked(given)
    found, word = written[id(shared)]["keys"]
    assert between.more and word == "a word" and values[9] is chosen
    assert torch.equal(values[7], hidden) and torch.equal(found, keys)
    assert found.dtype == keys.dtype and found.stride() == keys.stride()

    strides = (48, 16, 2)  # as of a part of a wider tensor
    gradient = torch.empty(96).as_strided((2, 3, 4), strides).copy_(torch.randn(2, 3, 4))
    torch.autograd.backward([values[7], found], [gradient, torch.ones_like(found)])
    packed.backward(given.grad)
    assert torch.equal(made[0].grad, gradient) and seen == [strides]
    assert torch.equal(made[1].grad, torch.ones_like(keys))
