"""Nothing of a model stays in host memory on a device with memory of its own, and the host waits
for nothing in a step.

A step of two micro-batches costs the host as many waits as one of six: those that the step itself
needs, for what it reports.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import STREAMED, write_model
from seconddevice import SecondDevice
from seconddevice.backend import SecondBackend
from seconddevice.steps import opened
from tiny import Checkpoint, micro_batches
from tinyconfig import tiny_config

from lema import LemaModel
from lema.engine.likelihood import likelihoods
from lema.model.capture import values_unread
from lema.model.inputs import HostCopies
from lema.model.outer_weights import tensors_elsewhere

pytestmark = pytest.mark.filterwarnings("ignore")  # of types that are announced as old

CheckpointOf = Callable[..., Checkpoint]
CHOSEN = [
    "codegen",
    "gpt_neo",
    "gptj",
    "falcon_h1",
    "gemma3",
    "llama",
    "bart",
    "deepseek_v3",
    "llava",
]


def left_behind(model_type: str, directory: Path) -> set[str]:
    published = write_model(tiny_config(model_type), directory / "published")
    with opened(published, "second", lora_target_parameters=[]) as model:
        return set(tensors_elsewhere(model.lora_manager, model.backend.device))


@pytest.mark.parametrize("model_type", CHOSEN)
def test_no_tensor_of_a_model_stays_in_host_memory(model_type: str, tmp_path: Path) -> None:
    assert not left_behind(model_type, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", [kind for kind in STREAMED if kind not in CHOSEN])
def test_of_no_other_type_either(model_type: str, tmp_path: Path) -> None:
    assert not left_behind(model_type, tmp_path)


def waits_of_a_step(second: SecondDevice, model: LemaModel, number: int) -> dict[str, int]:
    """Return how often the host waits in a step of so many micro-batches, by what for."""
    batches = micro_batches(number, lengths=(12, 9, 14, 7, 12, 9))
    # the first learns the model's parts, the second takes the buffers that are used again
    for _ in range(3):
        second.forget_waits()
        model.adapter.loss(batches).backward()
        model.lora_manager.zero_grad(set_to_none=True)
    return second.waits()


SETTINGS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "boundaries in host memory": {"boundary_activations": "host"},
    "embeddings in host memory": {"embeddings": "host"},
    "embeddings on the disk": {"embeddings": "disk"},
    "layers in host memory": {"strategy": "resident"},
    "activations are kept": {"gradient_checkpointing": False},
}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_waits_of_a_step_do_not_grow_with_its_micro_batches(
    checkpoint_of: CheckpointOf, second: SecondDevice, architecture: str, name: str
) -> None:
    if architecture == "gpt2" and "embeddings" in name:
        pytest.skip("its embeddings are its head's weight")
    with opened(checkpoint_of(architecture).streamed, "second", **SETTINGS[name]) as model:
        few, many = (waits_of_a_step(second, model, number) for number in (2, 6))
    assert sum(many.values()) == sum(few.values()), (few, many)


# Of a kind each: a mask that begins as ones, a question after a token, ids of images that are
# replaced.
@pytest.mark.parametrize("model_type", ["bart", "gpt2", "gemma3"])
def test_nor_do_those_of_models_that_ask_for_values(
    second: SecondDevice, model_type: str, tmp_path: Path
) -> None:
    published = write_model(tiny_config(model_type), tmp_path / "published")
    with opened(published, "second") as model:
        few, many = (waits_of_a_step(second, model, number) for number in (2, 6))
    assert sum(many.values()) == sum(few.values()), (few, many)


@pytest.mark.parametrize("lengths", [(12,) * 8, (5, 9, 14, 7, 12, 13, 6, 11)])
def test_rows_of_embeddings_lock_no_memory_anew(
    checkpoint_of: CheckpointOf, second: SecondDevice, lengths: tuple[int, ...]
) -> None:
    """Whatever the batches' lengths; nor does any thread wait for a copy."""
    settings = {"embeddings": "host", "strategy": "resident", "boundary_activations": "device"}
    with opened(checkpoint_of("llama").streamed, "second", **settings) as model, values_unread():
        batches = micro_batches(8, lengths=lengths)
        buffers: list[int] = []
        allocate = model.backend.host_buffer
        model.backend.host_buffer = lambda nbytes: (buffers.append(nbytes), allocate(nbytes))[1]
        counts = []
        for order in (batches, batches, batches[::-1]):
            model.backend.synchronize()
            before = second.host_synchronizations
            had = len(buffers)
            model.adapter.loss(order).backward()
            counts.append((second.host_synchronizations - before, len(buffers) - had))
    assert [waits for waits, _ in counts[1:]] == [0, 0], counts
    assert counts[1][1] <= 1 and counts[2][1] == 0, counts


def test_hidden_states_come_and_go_in_buffers_of_the_backend(
    checkpoint_of: CheckpointOf, second: SecondDevice
) -> None:
    """They are the same as on the device, and the host waits as often, however many layers there
    are.
    """
    batches = micro_batches(4)
    model = checkpoint_of("llama").streamed
    taken = []
    with opened(model, "second") as streamed, values_unread():
        buffers: list[int] = []
        allocate = streamed.backend.host_buffer
        streamed.backend.host_buffer = lambda nbytes: (buffers.append(nbytes), allocate(nbytes))[1]
        for on_host in (False, False, True, True):
            second.forget_waits()
            found = likelihoods(streamed.adapter, batches, on_host=on_host)
            taken.append((found, second.waits(), len(buffers)))
    assert all(found == taken[0][0] for found, _, _ in taken)
    assert taken[3][1] == taken[1][1]
    assert taken[2][2] > taken[1][2] and taken[3][2] == taken[2][2]


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("model_type", ["gpt_oss", "aria", "qwen3_vl_moe", "llama"])
def test_every_weight_on_lease_begins_at_a_multiple_of_sixteen(
    second: SecondDevice, tmp_path: Path, model_type: str, unified: bool
) -> None:
    """With a memory of its own, and in host memory, where fused experts would be refused by
    their kernel.
    """
    published = write_model(tiny_config(model_type), tmp_path / "published")
    backend = SecondBackend(unified=unified)
    with opened(published, "second", backend, lora_target_parameters=[]) as model:
        model.adapter.loss(micro_batches(2)).backward()
        for layer in range(model.split.num_layers):
            with model.memory.lease(layer) as lease:
                assert all(weight.data_ptr() % 16 == 0 for weight in lease.weights.values())
        outside = [one for name, one in model.skeleton.named_parameters() if not one.is_meta]
        assert all(one.data_ptr() % 16 == 0 for one in outside)


def test_the_host_is_answered_from_what_it_knows(second: SecondDevice) -> None:
    """What forwards make of known tensors is known too; what is changed in place, or was never
    known, is asked for.
    """
    copies = HostCopies()
    mask = torch.ones(2, 5, dtype=torch.long)
    placed = mask.to("second")
    unknown = torch.zeros(3, dtype=torch.bool, device="second")
    copies.note(placed, mask)
    second.forget_waits()
    with copies.answering():
        positions = torch.arange(5, device="second").unsqueeze(0)
        assert bool((placed == 1).all()) and not (torch.diff(positions, dim=-1) != 1).any()
        assert int(placed.sum()) == 10 and positions[:, -1].tolist() == [4]
        assert second.host_waits == 0
        part = placed[:, :2]
        part[0, 0] = 0
        assert int(placed.sum()) == 9 and not bool(part.all())
        assert second.host_waits == 2
        assert not bool(unknown.any())
        assert second.host_waits == 3
