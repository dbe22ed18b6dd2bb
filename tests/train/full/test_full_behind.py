"""Behind the backward of the next layer the one before is stepped: what is held meanwhile,
waited for, and refused.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fulltraining import Weights, assert_same, config_of, everything, opened, streamed, whole
from latedevice import LateDevice
from parity import accumulate
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import get_total_norm
from transformers import AutoModelForCausalLM

from lema.errors import NonFiniteError
from lema_cpu import CpuBackend

# seconds that a thread waits for another before the test fails; nothing waits so long that works
PATIENCE = 20


def layer_of(name: str) -> int:
    return int(name.split(".")[2])


def test_a_layer_is_stepped_while_the_next_one_goes_back(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    """Each step but the lowest layer's waits until the backward below it has begun: in one
    thread, for ever.
    """
    checkpoint = checkpoint_of("llama")
    with opened(checkpoint) as (model, training):
        begun = [threading.Event() for _ in range(NUM_LAYERS)]
        engine = model.adapter.engine
        step = training._step_layer
        order = []
        leased = engine.leased

        def note(layer: int, way: Any) -> Any:
            if way == "backward":
                begun[layer].set()
            return leased(layer, way)

        def wait(layer: int, gradients: Weights) -> None:
            assert threading.current_thread() is not threading.main_thread()
            assert layer == 0 or begun[layer - 1].wait(PATIENCE), f"layer {layer} was stepped alone"
            order.append(layer)
            step(layer, gradients)

        engine.leased = note
        training._step_layer = wait
        training.accumulate(micro_batches(2))
        assert order == list(reversed(range(NUM_LAYERS)))
        found = {name: master.detach().clone() for name, master in training.masters.items()}
    config = config_of(checkpoint)
    expected = whole(checkpoint, config, everything, 2, steps=1)[1]
    assert not [name for name, weight in expected.items() if not torch.equal(found[name], weight)]


def test_gradients_of_two_layers_exist_at_a_time_without_clipping(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    with opened(checkpoint_of("llama"), lambda name: ".layers." in name, CpuBackend()) as (
        model,
        training,
    ):
        formed: dict[int, list[StorageWeakRef]] = {}
        most: list[int] = []
        done = training._done

        def counted(layer: int, gradients: Weights) -> None:
            formed[layer] = [StorageWeakRef(one.untyped_storage()) for one in gradients.values()]
            done(layer, gradients)
            most.append(sum(not all(one.expired() for one in refs) for refs in formed.values()))

        model.adapter.engine.trained._done = counted
        training.accumulate(micro_batches(2))
        assert len(most) == NUM_LAYERS and max(most) <= 2
        assert all(one.expired() for refs in formed.values() for one in refs)


def test_a_lease_of_a_layer_that_is_being_stepped_waits_until_it_has_been(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    for backend in (CpuBackend(), CpuBackend(poison=True), LateDevice(None)):
        with opened(checkpoint_of("llama"), backend=backend) as (model, training):
            stream = model.memory
            top = NUM_LAYERS - 1
            stored = next(iter(stream.stored(top).values()))
            with stream.lease(top):
                pass
            leased = threading.Event()

            def write(stored: Tensor = stored, leased: threading.Event = leased) -> None:
                leased.wait(0.2)  # long enough for a lease that does not wait
                stored.fill_(7.0)

            training._behind.begin(write)
            stream.rewrite(top, training._behind.wait)
            stream.announce([top])
            with stream.lease(top) as lease:
                leased.set()
                assert bool((next(iter(lease.weights.values())) == 7.0).all())


def test_what_fails_in_the_thread_is_raised_by_the_step(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    with opened(checkpoint_of("llama")) as (_, training):
        step = training._step_layer
        failing = [0, 5]

        def fail(layer: int, gradients: Weights) -> None:
            if layer in failing:
                raise OSError(f"layer {layer} cannot be stepped")
            step(layer, gradients)

        training._step_layer = fail
        with pytest.raises(OSError, match="layer 5"):
            training.accumulate(micro_batches(2))
        failing.remove(5)
        with pytest.raises(OSError, match="layer 0"):  # the last of all: nothing is begun after it
            training.accumulate(micro_batches(2))
        assert training.global_step == 0 and training.grad_norm is None
        failing.clear()
        training.accumulate(micro_batches(2))
        assert training.global_step == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("clipped", [None, 0.5])
def test_the_norm_of_a_step_is_known(
    clipped: float | None, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of("llama")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.published).train()
    model.config.use_cache = False
    accumulate(model, micro_batches(4))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with opened(checkpoint, max_grad_norm=clipped) as (_, training):
        assert training.grad_norm is None
        training.accumulate(micro_batches(4))
        assert training.grad_norm == float(get_total_norm(gradients))


@pytest.mark.parametrize("clipped", [None, 0.5])
def test_a_gradient_that_is_not_finite_is_refused_before_its_layer_is_stepped(
    clipped: float | None, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    bad = 5
    with opened(checkpoint_of("llama"), max_grad_norm=clipped) as (model, training):
        before = {name: master.detach().clone() for name, master in training.masters.items()}
        trained = model.adapter.engine.trained
        done = trained._done

        def spoilt(layer: int, gradients: Weights) -> None:
            if layer == bad:
                next(iter(gradients.values()))[0] = float("nan")
            done(layer, gradients)

        trained._done = spoilt
        with pytest.raises(NonFiniteError, match=rf"gradient of model\.layers\.{bad}\.") as raised:
            training.accumulate(micro_batches(2))
        changed = {
            name
            for name, master in training.masters.items()
            if not torch.equal(master, before[name])
        }
        layers = {layer_of(name) for name in changed}
        if clipped is None:
            assert "the layers above it are already updated" in raised.value.where
            assert "resume from the last checkpoint" in raised.value.how
            assert layers == set(range(bad + 1, NUM_LAYERS)) and all(
                ".layers." in name for name in changed
            )
        else:
            assert "no weight was updated" in raised.value.where
            assert not changed
        assert all(master.grad is None for master in training.masters.values())
        trained._done = done
        training.accumulate(micro_batches(2))  # what is left of the step that failed disturbs none
        assert training.global_step == 1


def test_a_gradient_outside_the_layers_that_is_not_finite_is_refused(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    with opened(checkpoint_of("llama")) as (model, training):
        norm = model.skeleton.get_parameter("model.norm.weight")
        before = {name: master.detach().clone() for name, master in training.masters.items()}
        norm.register_hook(lambda gradient: gradient * float("inf"))
        with pytest.raises(NonFiniteError, match=r"gradient of model\.norm\.weight") as raised:
            training.accumulate(micro_batches(2))
        assert "the layers are already updated" in raised.value.where
        outside = [name for name in before if ".layers." not in name]
        assert outside and all(
            torch.equal(training.masters[name], before[name]) for name in outside
        )


def test_ends_alone_may_train(checkpoint_of: Callable[..., Checkpoint]) -> None:
    checkpoint = checkpoint_of("llama", False)
    config = config_of(checkpoint)

    def ends(name: str) -> bool:
        return ".layers." not in name

    assert_same(streamed(config, ends, 2, steps=3), whole(checkpoint, config, ends, 2, steps=3))
