"""Inputs of decoder layers: marked while they matter, they alone, under both kinds of
checkpoint; freed where moved.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import ARCHITECTURES, micro_batches
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lema.activations.hooks import ModelHooks, Scope, entered
from lema.activations.layers import LayerInputs, decoder_layers, only_layer_inputs
from lema.activations.protocols import StayReason

NAMES = ["llama", "gpt2", "mixtral"]
WIDTH = 8


def adapted(name: str, *, use_reentrant: bool | None = None) -> nn.Module:
    """A model with adapters, checkpointed in one way or the other, or not at all."""
    torch.manual_seed(1)
    architecture = ARCHITECTURES[name]
    bare: PreTrainedModel = AutoModelForCausalLM.from_config(architecture.config())
    bare.config.use_cache = False
    settings = LoraConfig(
        target_modules=sorted(architecture.targets), fan_in_fan_out=architecture.transposed
    )
    model = get_peft_model(bare, settings)
    if use_reentrant is not None:
        bare.enable_input_require_grads()
        turn_on(bare, use_reentrant=use_reentrant)
    return model.train()


def turn_on(bare: PreTrainedModel, *, use_reentrant: bool) -> None:
    enable = (
        getattr(bare, "activation_checkpointing_enable", None) or bare.gradient_checkpointing_enable
    )
    enable({"use_reentrant": use_reentrant})


def turn_off(bare: PreTrainedModel) -> None:
    (
        getattr(bare, "activation_checkpointing_disable", None)
        or bare.gradient_checkpointing_disable
    )()


def layers_of(name: str, model: nn.Module) -> nn.ModuleList:
    layers = model.get_base_model().get_submodule(ARCHITECTURES[name].layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


class Moving:
    """What a forward saves, moved away where the choice says so: copies take its place, as from
    another memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self.scope = Scope()
        self.inputs = LayerInputs(model)
        self.choice = only_layer_inputs
        self.moved: list[Tensor] = []
        self.storages: list[StorageWeakRef] = []
        self.stayed = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with entered(self.scope), self.inputs.opened(), hooks:
            yield
        assert self.scope.layer_inputs == {}

    def _pack(self, tensor: Tensor) -> tuple[bool, Tensor]:
        if torch._C._current_graph_task_id() != -1 or self.choice(tensor) is StayReason.UNCHOSEN:
            self.stayed += 1
            return False, tensor
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        self.moved.append(tensor.detach().clone())
        return True, self.moved[-1]

    def _unpack(self, packed: tuple[bool, Tensor]) -> Tensor:
        return packed[1].clone() if packed[0] else packed[1]

    @property
    def freed(self) -> int:
        gc.collect()
        return sum(storage.expired() for storage in self.storages)


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(5)  # of dropout
    loss = model(**batch).loss
    assert isinstance(loss, Tensor)
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    assert len(found) > 4
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_under_a_checkpoint_each_layers_input_moves_and_its_memory_is_free(
    name: str, use_reentrant: bool
) -> None:
    model, (batch,) = adapted(name, use_reentrant=use_reentrant), micro_batches(1)
    step(model, batch).backward()
    expected = gradients(model)
    given: list[Tensor] = []
    leaves: list[bool] = []

    def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        given.append(args[0].detach().clone())
        leaves.append(args[0].is_leaf)

    for layer in layers_of(name, model):
        layer.register_forward_pre_hook(note)
    moving = Moving(model)
    for _ in range(2):
        given.clear()
        leaves.clear()
        moving.moved.clear()
        moving.storages.clear()
        with moving.opened():
            loss = step(model, batch)
        assert [tuple(one.shape) for one in moving.moved] == [tuple(one.shape) for one in given]
        assert all(map(torch.equal, moving.moved, given))
        # The first may be a leaf, where embeddings were made to require gradients: autograd itself
        # holds that.
        assert not any(leaves[1:])
        assert moving.freed == len(given) - leaves[0], (
            "something holds the input of a layer on the device"
        )
        loss.backward()
        assert same(gradients(model), expected)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_checkpoint_only_what_shares_memory_with_an_input_moves(name: str) -> None:
    model, (batch,) = adapted(name), micro_batches(1)
    step(model, batch).backward()
    expected = gradients(model)
    keys: set[int] = set()
    held: list[Tensor] = []

    def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        held.append(args[0])  # so that no address is used again
        keys.add(args[0].untyped_storage()._cdata)

    layers = layers_of(name, model)
    for layer in layers:
        layer.register_forward_pre_hook(note)
    moving = Moving(model)
    with moving.opened():
        loss = step(model, batch)
    assert {storage.cdata for storage in moving.storages} <= keys
    # nothing is saved of an embedding
    assert len({storage.cdata for storage in moving.storages}) >= len(layers) - 1
    assert moving.stayed > len(moving.moved)
    loss.backward()
    assert same(gradients(model), expected)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> Tensor:
        return hidden_states + scale * self.down(torch.relu(self.up(hidden_states)))


class CheckpointedLayer(Layer, GradientCheckpointingLayer):
    pass


class Stack(nn.Module):
    """Layers that are given their input by position, or by name."""

    def __init__(self, kind: type[Layer], num_layers: int = 5, *, by_name: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(kind() for _ in range(num_layers))
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(hidden_states=x, scale=0.5) if self.by_name else layer(x, scale=0.5)
        return x.sum()

    def checkpointed(self, *, use_reentrant: bool) -> "Stack":
        """As `gradient_checkpointing_enable` does it."""
        for layer in self.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=use_reentrant)
        return self


def start() -> Tensor:
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(4)).requires_grad_()
    return x + 1  # a leaf would be held by autograd itself


def stack_gradients(model: Stack, moving: Moving | None = None) -> dict[str, Tensor]:
    if moving is None:
        model(start()).backward()
    else:
        x = start()
        with moving.opened():
            loss = model(x)
        del x
        assert len(moving.moved) == len(model.layers)
        assert moving.freed == len(model.layers)
        loss.backward()
    return gradients(model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_input_given_by_name_is_saved_and_not_held(by_name: bool, use_reentrant: bool) -> None:
    expected = stack_gradients(Stack(CheckpointedLayer))
    model = Stack(CheckpointedLayer, by_name=by_name).checkpointed(use_reentrant=use_reentrant)
    assert same(stack_gradients(model, Moving(model)), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", CheckpointImpl)
@pytest.mark.parametrize("by_name", [True, False])
def test_a_wrapper_that_checkpoints_is_a_layer(by_name: bool, kind: CheckpointImpl) -> None:
    expected = stack_gradients(Stack(Layer))
    model = Stack(Layer, by_name=by_name)
    wrap = partial(checkpoint_wrapper, checkpoint_impl=kind)
    apply_activation_checkpointing(model, wrap, check_fn=lambda module: isinstance(module, Layer))
    assert decoder_layers(model) == list(model.layers)
    found = stack_gradients(model, Moving(model))
    assert same(
        {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in found.items()},
        expected,
    )


class HooksInside(Layer):
    """A layer that is checkpointed with its hooks, as in earlier versions of `transformers`."""

    gradient_checkpointing = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_input_is_marked_for_a_checkpoint_that_is_outside_of_the_layers_hooks(
    by_name: bool, use_reentrant: bool
) -> None:
    expected = stack_gradients(Stack(Layer))
    model = Stack(HooksInside, by_name=by_name).checkpointed(use_reentrant=use_reentrant)
    assert same(stack_gradients(model, Moving(model)), expected)


def functions(model: nn.Module) -> list[Any]:
    return [
        vars(module)["_gradient_checkpointing_func"]
        for module in model.modules()
        if is_checkpointed(module)
    ]


def is_checkpointed(module: nn.Module) -> bool:
    return "_gradient_checkpointing_func" in vars(module)


def test_checkpoints_are_wrapped_once_and_only_while_a_context_is_open() -> None:
    model = adapted("llama", use_reentrant=False)
    one = LayerInputs(model)
    other = LayerInputs(model)
    before = functions(model)
    assert len(before) >= len(layers_of("llama", model))
    for _ in range(3):
        with one.opened():
            wrapped = functions(model)
            with one.opened(), other.opened():
                assert functions(model) == wrapped
            assert functions(model) == wrapped
            assert [function.args for function in wrapped] == [(function,) for function in before]
        assert functions(model) == before
    with pytest.raises(ZeroDivisionError), one.opened():
        raise ZeroDivisionError
    assert functions(model) == before


@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing_may_be_turned_on_and_off_between_steps_and_within(inside: bool) -> None:
    model, (batch,) = adapted("llama", use_reentrant=False), micro_batches(1)
    bare = model.get_base_model()
    step(model, batch).backward()
    expected = gradients(model)
    moving = Moving(model)
    num_layers = len(layers_of("llama", model))
    with moving.opened():
        if inside:
            turn_on(bare, use_reentrant=True)
    if not inside:
        turn_on(bare, use_reentrant=True)
    before = functions(model)
    assert all(function.func is checkpoint for function in before)
    with moving.opened():
        step(model, batch).backward()
    assert len(moving.moved) == num_layers and functions(model) == before
    assert same(gradients(model), expected)
    turn_off(bare)
    with moving.opened():
        step(model, batch).backward()
    assert same(gradients(model), expected)


@pytest.mark.slow
def test_a_model_is_copied_and_pickled_while_a_context_is_open() -> None:
    model = Stack(CheckpointedLayer).checkpointed(use_reentrant=False)
    expected = stack_gradients(model)
    with LayerInputs(model).opened():
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in copies:
        assert same(stack_gradients(one, Moving(one)), expected)
        assert all(function.func is checkpoint for function in functions(one))


def test_an_exception_in_a_layer_leaves_no_mark() -> None:
    model = Stack(CheckpointedLayer)
    model.layers[2].down = nn.Linear(1, 1)
    scope = Scope()
    with entered(scope), LayerInputs(model).opened():
        for use_reentrant in (None, True, False):
            if use_reentrant is not None:
                model.checkpointed(use_reentrant=use_reentrant)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(start())
            assert scope.layer_inputs == {}


def test_layers_are_those_of_the_longest_list_that_lies_in_no_other() -> None:
    class Experts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(9))

    model = Stack(Experts)
    model.norms = nn.ModuleList(nn.LayerNorm(1) for _ in range(2))
    assert decoder_layers(model) == list(model.layers)
    assert decoder_layers(nn.Linear(1, 1)) == []


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_a_model_are_its_decoder_layers(name: str) -> None:
    model = adapted(name)
    assert decoder_layers(model) == list(layers_of(name, model))


def test_evaluation_marks_nothing_that_stays_and_a_lost_model_is_no_error() -> None:
    model, (batch,) = adapted("llama", use_reentrant=False), micro_batches(1)
    moving = Moving(model)
    model.eval()
    with moving.opened(), torch.no_grad():
        model(**batch)
    assert moving.moved == [] and moving.stayed == 0
    gone = weakref.ref(model)
    inputs = moving.inputs
    del model, moving
    gc.collect()
    assert gone() is None
    with inputs.opened():
        pass


def hooks_on(model: nn.Module) -> list[tuple[list[int], list[int]]]:
    return [
        (list(module._forward_pre_hooks), list(module._forward_hooks)) for module in model.modules()
    ]


def test_hooks_of_sites_and_layers_leave_nothing_behind() -> None:
    model = adapted("mixtral", use_reentrant=True)
    before = hooks_on(model)
    sites = ModelHooks(model)
    one = LayerInputs(model)
    other = LayerInputs(model)
    with one.opened(), other.opened():
        within = hooks_on(model)
    assert hooks_on(model) == within
    sites.close()
    one.close()
    assert hooks_on(model) != before
    del other
    gc.collect()
    assert hooks_on(model) == before
    with one.opened():
        assert hooks_on(model) != before
    one.close()
    one.close()
    assert hooks_on(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [None, False])
def test_a_compiled_model_is_compiled_once_however_often_a_context_is_opened(
    use_reentrant: bool | None,
) -> None:
    torch._dynamo.reset()
    model = Stack(CheckpointedLayer)
    if use_reentrant is not None:
        model.checkpointed(use_reentrant=use_reentrant)
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    sites = ModelHooks(model, warn_if_no_head=False)
    inputs = LayerInputs(model)
    scope = Scope()
    for _ in range(3):
        with entered(scope), inputs.opened():
            compiled(start().detach())
    assert len(compilations) == 1 and scope == Scope()
    sites.close()
    torch._dynamo.reset()
