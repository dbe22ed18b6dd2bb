"""What goes from layer to layer: the hidden state, and whatever else later layers or the head make
use of.

A model's forward runs with recorders instead of its layers. `Tape` follows the tensors that they
return, and what the model's own code makes of them on the way (`Step`); each layer does the steps
after it when it runs. A chapter of docs/internals/engine.md says why no bit changes by that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from lema.model.capture import Between, Shared, Tree, changed, depends_on, tensors_in
from lema.model.shared_inputs import tried
from lema.model.state.hooks import HookSnapshot
from lema.model.state.snapshot import Snapshot

__all__ = ["CannotCut", "LayerCall", "Prelude", "Suspended", "Tape", "find_cut"]

# between the numbers of one layer and those of the next, which do not depend on earlier tensors
LEAP = 1 << 20


@dataclass(frozen=True)
class Placeholder:
    """Stands for a tensor that comes out of the layers: the one of this number, counted as the
    model's forward goes.
    """

    number: int


@dataclass(frozen=True)
class Step:
    """One operation of the model's own between two layers, with `Placeholder` for the outputs of
    layers.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: Any
    differentiable: (
        bool  # whether autograd follows it, which it does not within a `torch.autograd.Function`
    )
    # whether it is done under autocast where its layer is, which the model's own code may switch
    # off
    autocast: bool

    @property
    def uses(self) -> set[int]:
        """The numbers of its inputs."""
        return _numbers((self.args, self.kwargs))

    def run(self, values: dict[int, Any]) -> None:
        """Run it with `values`, and add its results to them."""
        args, kwargs = _filled((self.args, self.kwargs), values)
        device = next(tensors_in((args, kwargs))).device.type
        with nullcontext() if self.autocast else torch.autocast(device, enabled=False):
            outputs = self.function(*args, **kwargs)
        if outputs is not None:  # as of one that writes into its first argument
            pairs = zip(tree_leaves(self.makes), tree_leaves(outputs), strict=True)
            values.update(
                (placeholder.number, value)
                for placeholder, value in pairs
                if isinstance(placeholder, Placeholder)
            )


@dataclass
class LayerCall:
    """The arguments of one layer, except the hidden state, and the operations on its results."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_is_keyword: bool
    hidden: int = 0  # the number of the hidden state
    returns: tuple[int, ...] = ()  # the numbers of what the layer returns
    # what the model does with that before the next layer is called
    after: list[Step] = field(default_factory=list)
    received: Between | None = None  # of the layer below; None: the hidden state alone
    # for the layer above; None: what the layer returns first, untouched
    left: Between | None = None
    # the dtype that products had where the model was called; None: the layer's own
    autocast: torch.dtype | None = None
    # the outputs of the layer's routers in its last run; None: not requested
    routers: list[Tensor] | None = None
    # of each token `[tokens, experts of each]` in host memory, which experts its routers choose;
    # None: they choose themselves
    choices: Tensor | None = None
    # the adapter that the layer computes with; None: those that are active
    adapter: str | None = None
    # what the layer kept before its first run; None: it has not run
    snapshot: Snapshot | None = None
    # of the modules inside the layer when the model was called; None: those of now
    hooks: HookSnapshot | None = None

    def begin(self, snapshot: Snapshot) -> None:
        """Note that the first run is over, and what the layer kept before it."""
        self.snapshot = snapshot

    def ask_routers(self, asked: bool) -> None:
        """Ask for what the layer's routers make in its next run, or do no more."""
        self.routers = [] if asked else None

    def choose(self, choices: Tensor) -> None:
        """Have the layer's routers choose these experts, `[tokens, experts of each]`."""
        self.choices = choices

    def compute_with(self, adapter: str) -> None:
        """Have the layer compute with this adapter, whichever is active."""
        self.adapter = adapter

    def drop_routers(self) -> None:
        """Let go of what routers made, also in copies of this call, and ask for no more."""
        if self.routers is not None:
            self.routers.clear()
        self.routers = None

    def call_as(self, autocast: torch.dtype | None, hooks: HookSnapshot | None) -> None:
        """Note how the model was called: the dtype of its products, and the hooks of modules inside
        the layer.
        """
        self.autocast = autocast
        self.hooks = hooks

    def take_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], after: list[Step]
    ) -> None:
        """Take other arguments, and other operations on what the layer returns."""
        self.args = args
        self.kwargs = kwargs
        self.after = after

    def note_returns(self, numbers: tuple[int, ...]) -> None:
        """Note the numbers of what the layer returns."""
        self.returns = numbers

    def do_after(self, steps: list[Step]) -> None:
        """Do these operations on what the layer returns."""
        self.after = steps

    def leave(self, between: Between) -> None:
        """Leave this for the layer above."""
        self.left = between

    def receive(self, between: Between | None) -> None:
        """Receive what the layer below leaves; None: the hidden state alone."""
        self.received = between

    @property
    def bare(self) -> bool:
        """Whether the layer is handed the hidden state alone, and hands on that alone."""
        return self.received is None and self.left is None

    def alone(self) -> LayerCall | None:
        """Return the same call for a layer that runs without those below and above it, of which
        nothing is kept; None: they hand each other more than the hidden state."""
        handed_on = (self.received, self.left)
        if any(between is not None and not between.is_hidden for between in handed_on):
            return None
        return replace(self, received=None)

    def with_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        """Return the same call with other arguments."""
        return replace(self, args=args, kwargs=kwargs)

    @property
    def captured_values(self) -> tuple[Any, ...]:
        """All that it holds in addition to the result of the layer below."""
        return self.args, self.kwargs, [(step.args, step.kwargs) for step in self.after]

    def mapped(self, change: Callable[[Any], Any]) -> LayerCall:
        """Return the same call with every value of its own changed."""
        after = [
            replace(step, args=change(step.args), kwargs=change(step.kwargs)) for step in self.after
        ]
        received = None if self.received is None else self.received.mapped(change)
        return replace(
            self, args=change(self.args), kwargs=change(self.kwargs), after=after, received=received
        )

    def run(
        self, hidden: Tensor, layer: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    ) -> Tensor:
        """Call `layer` with its arguments, `hidden` being what the layer below left; return what is
        left for the next. It is taken apart once, because two parts' gradients would be added in
        another order."""
        values: dict[int, Any] = {self.hidden: hidden}
        written: dict[int, dict[Any, Any]] = {}
        if self.received is not None:
            values, written = self.received.unpacked(hidden)
        shared = (
            {}
            if self.received is None
            else {id(mapping): mapping for mapping in self.received.shared}
        )
        shared |= (
            {} if self.left is None else {id(mapping): mapping for mapping in self.left.shared}
        )
        copies = {key: copy.copy(mapping) for key, mapping in shared.items()}
        for key, mapping in copies.items():
            mapping.update(written.get(key, {}))
        args = _filled(self.args, values, copies)
        kwargs = _filled(self.kwargs, values, copies)
        if self.hidden_is_keyword:
            kwargs = {"hidden_states": values[self.hidden], **kwargs}
        else:
            args = (values[self.hidden], *args)
        out = layer(args, kwargs)
        items = (out,) if isinstance(out, Tensor) else tuple(out)
        if self.left is None:
            first: Tensor = items[0]
            return first
        values.update(zip(self.returns, items, strict=False))
        for step in self.after:
            step.run(values)
        # What has been written into the copies of the mappings.
        new = {
            key: {
                name: value
                for name, value in copies[key].items()
                if name not in mapping or mapping[name] is not value
            }
            for key, mapping in shared.items()
        }
        return self.left.packed(values, new)


@dataclass(frozen=True)
class Prelude:
    """One micro-batch before its first layer: the hidden state, and the call of every layer."""

    hidden: Tensor
    calls: tuple[LayerCall, ...]


class Tape(TorchFunctionMode):
    """Follows what comes out of the layers through a model's forward, in a `with` block. `cut`: the
    number of what enters the head; None: it is not known yet. `at_cut`: called when the forward
    comes to it; returns what is used in its place. `steps`: what was done after each of them.
    `hidden`: what the first layer was given. `values`: with `keep`, by number."""

    def __init__(
        self,
        cut: int | None = None,
        at_cut: Callable[[], Tensor] | None = None,
        *,
        keep: bool = False,
    ) -> None:
        super().__init__()
        self.calls: list[LayerCall] = []
        self.steps: list[list[Step]] = []
        self.values: dict[int, Tensor] = {}
        self.hidden: Tensor
        self._mappings: list[list[Shared]] = []
        self.cut = cut
        self._at_cut = at_cut
        self._keep = keep
        self._numbers: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        self._count = 0

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor; None: it does not come out of the layers."""
        return self._numbers.get(tensor)

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Note a layer's call; return its hidden state, or None where nothing is known of how
        that was made.
        """
        hidden, keyword = (args[0], False) if args else (kwargs["hidden_states"], True)
        if not self.calls:
            self.hidden = hidden
            self._follow(hidden)
        if (number := self.number(hidden)) is None:
            return None
        state: Tensor = hidden
        extra_kwargs = {
            name: value for name, value in kwargs.items() if not keyword or name != "hidden_states"
        }
        self._mappings.append(
            [
                value
                for value in (*args, *extra_kwargs.values())
                if isinstance(value, MutableMapping)
            ]
        )
        self.calls.append(
            LayerCall(self._noted(args[1:]), self._noted(extra_kwargs), keyword, number)
        )
        return state

    def returned(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note what a layer returns; return it as the model is to see it."""
        self._count = len(self.calls) * LEAP
        noted = self._follow(items)
        self.calls[-1].note_returns(
            tuple(getattr(placeholder, "number", -1) for placeholder in noted)
        )
        self.steps.append([])
        return self._seen(noted, items)

    def try_cut(self, number: int) -> None:
        """Take the tensor of this number for what enters the head."""
        self.cut = number

    def tied(self) -> tuple[LayerCall, ...]:
        """Return the calls, each with what its layer receives and leaves."""
        assert self.cut is not None
        ids = [{id(mapping) for mapping in mappings} for mappings in self._mappings]
        several = {
            key
            for at, keys in enumerate(ids)
            for key in keys
            if any(key in later for later in ids[at + 1 :])
        }
        live = {self.cut}
        shared = dict[int, Shared]()
        above = None
        for call, steps, mappings in zip(
            self.calls[::-1], self.steps[::-1], self._mappings[::-1], strict=True
        ):
            between = Between(sorted(live), list(shared.values()))
            needed, live = _needed(steps, live)
            call.do_after(needed)
            if between.shared or call.after or live != {call.returns[0]}:
                call.leave(between)
            if above is not None:
                above.receive(call.left)
            live = (live - set(call.returns)) | {call.hidden} | _numbers((call.args, call.kwargs))
            shared |= {id(mapping): mapping for mapping in mappings if id(mapping) in several}
            above = call
        return tuple(self.calls)

    def cuts(self, logits: Tensor) -> Iterator[int]:
        """Yield the numbers of what the head could be given: all of it that comes out of the
        layers goes through.
        """
        top = self.calls[-1].returns[0]
        steps = self.steps[-1]
        goal = self.number(logits)
        if goal is None:
            yield top
            return
        for number in (
            top,
            *(
                leaf.number
                for step in steps
                for leaf in tree_leaves(step.makes)
                if type(leaf) is Placeholder
            ),
        ):
            if not _needed(steps, {goal}, available=number)[1]:
                yield number

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        written = args[0] if out is None and args else out
        if not self.steps or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(written)):
            return out
        noted = self._noted((args, kwargs))
        if not _numbers(noted):
            return out
        makes = self._follow(written)
        autocast = torch.is_autocast_enabled(next(tensors_in((args, kwargs))).device.type)
        self.steps[-1].append(
            Step(function, noted[0], noted[1], makes, torch.is_grad_enabled(), autocast)
        )
        return out if out is None else self._seen(makes, out)

    def _seen(self, noted: object, values: Tree) -> Tree:
        if self._at_cut is None or self.cut not in _numbers(noted):
            return values
        entered = self._at_cut()
        seen: Tree = tree_map(
            lambda leaf, value: entered if getattr(leaf, "number", None) == self.cut else value,
            noted,
            values,
        )
        return seen

    def _follow(self, value: object) -> Any:
        """Number every tensor in a value that has no number yet; return the value with
        `Placeholder` in their place.
        """

        def follow(tensor: Tensor) -> Placeholder:
            if tensor not in self._numbers:
                self._numbers[tensor] = self._count
                self._count += 1
            if self._keep:
                self.values[self._numbers[tensor]] = tensor
            return Placeholder(self._numbers[tensor])

        return tree_map_only(Tensor, follow, value)

    def _noted(self, value: Tree) -> Tree:
        """Return a value with `Placeholder` for every tensor that has a number; the same object if
        there is none.
        """

        def note(leaf: object) -> object:
            number = self.number(leaf) if isinstance(leaf, Tensor) else None
            return leaf if number is None else Placeholder(number)

        return changed(value, note)


class Suspended:
    """A layer that has run for one micro-batch, but for what it makes of its experts' result: these
    steps are done when that is there. `state`: returns the generator's. `reached` stands in the
    experts' place while the layer runs in a `with` block of `tape`; `expert_inputs` is what they
    were given then, and `drawn` the generator's state."""

    def __init__(self, state: Callable[[], Tensor]) -> None:
        self.tape = Tape()
        self._state = state
        # hidden states, chosen experts, weights of these
        self.expert_inputs: tuple[Tensor, ...] = ()
        self.drawn: Tensor
        self._steps: list[Step] = []
        self._result = self._output = -1

    def reached(self, *args: Tensor, **kwargs: object) -> Tensor:
        """Record the inputs of the experts, and return zeros. `ValueError`: they are unlike
        those of `transformers`.
        """
        if tried():
            return torch.zeros_like(args[0])
        shapes = [
            argument.shape
            for argument in args
            if isinstance(argument, Tensor) and argument.dim() == 2
        ]
        if (
            self.expert_inputs
            or kwargs
            or len(shapes) != 3
            or shapes[1] != shapes[2]
            or shapes[0][0] != shapes[1][0]
        ):
            raise ValueError(
                "a layer must call its experts once, with hidden states, experts and their weights"
            )
        self.expert_inputs = args
        self.drawn = self._state()
        self.tape.steps.append([])
        zeros = torch.zeros_like(args[0], requires_grad=False)
        self._result = self.tape._follow(zeros).number
        return zeros

    def returned(self, output: Tensor | tuple[Any, ...]) -> None:
        """Note what the layer has returned. `ValueError`: it cannot be told how it was made of
        the experts' result.
        """
        self._extra_outputs = None if isinstance(output, Tensor) else output[1:]
        number = self.tape.number(output if isinstance(output, Tensor) else output[0])
        left = set[int]()
        if number is not None:
            self._steps, left = _needed(self.tape.steps[0], {number})
        if number is None or left != {self._result}:
            raise ValueError("the operations on the experts' result cannot be followed")
        self._output = number
        del self.tape

    def detached(self) -> Suspended:
        """Return it without the graph of the part before the experts, which can be freed then."""

        clone = copy.copy(self)
        clone._detach()
        return clone

    def _detach(self) -> None:
        def bare(value: Tree) -> Tree:
            return changed(value, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)

        self._steps = [
            replace(step, args=bare(step.args), kwargs=bare(step.kwargs)) for step in self._steps
        ]
        self.expert_inputs = bare(self.expert_inputs)
        self._extra_outputs = bare(self._extra_outputs)

    def resume(self, result: Tensor) -> Any:
        """Return what the layer returns, given its experts' result `[tokens, hidden]`."""
        values: dict[int, Any] = {self._result: result}
        for step in self._steps:
            step.run(values)
        output: Tensor = values[self._output]
        return output if self._extra_outputs is None else (output, *self._extra_outputs)

    def operands(self) -> list[Tensor]:
        """Return what the steps compute with besides the experts' result, such as what shared
        experts have made.
        """
        return [tensor for step in self._steps for tensor in tensors_in((step.args, step.kwargs))]

    @contextmanager
    def looking(self) -> Iterator[list[Tensor]]:
        """Yield a list of what the graph that is made in the `with` block keeps that is made of
        the experts' result.
        """
        operand_storages = {operand.untyped_storage()._cdata for operand in self.operands()}
        saved = list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in operand_storages:
                saved.append(tensor.detach())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved


class CannotCut(Exception):
    """Says why a model is no prelude, layers one after the other, and a head."""


def find_cut(tape: Tape, logits: Tensor, is_enough: Callable[[int, Tensor], bool]) -> int:
    """Return the number on the `tape` of the tensor that the head is given, of a whole forward that
    made `logits`. `is_enough` tells whether a head that is given the tensor of that number, with
    that value, needs nothing else. `CannotCut`: a layer's output cannot be followed, or there is no
    such tensor."""
    layer_outputs = [
        tape.values[number]
        for call in tape.calls
        for number in call.returns
        if number in tape.values
    ]
    for index, call in enumerate(tape.calls):
        if depends_on(tensors_in((call.args, call.kwargs)), layer_outputs):
            raise CannotCut(f"layer {index} gets more from the layers below than LEMA can follow")
    for cut in tape.cuts(logits):
        tape.try_cut(cut)
        if is_enough(cut, tape.values[cut].detach()):
            steps = [step for call in tape.tied() for step in call.after]
            if not all(step.differentiable for step in steps):
                raise CannotCut(
                    "between its layers it uses operations that autograd does not follow"
                )
            # Of a size that is known only when the layers run.
            extra_numbers = {number for call in tape.calls for number in call.returns[1:]}
            if any(step.uses & extra_numbers for step in steps):
                raise CannotCut("between its layers it uses more than the hidden state")
            return cut
    raise CannotCut("its head needs more than the last layer's output, token by token")


def _needed(
    steps: Sequence[Step], live: Iterable[int], available: int | None = None
) -> tuple[list[Step], set[int]]:
    """Return the steps that make something in `live`, and what they need; `available` is there
    already.
    """
    needed: list[Step] = []
    live = set(live) - {available}
    for step in reversed(steps):
        if produced := live & _numbers(step.makes):
            needed.insert(0, step)
            live = ((live - produced) | step.uses) - {available}
    return needed, live


def _numbers(tree: object) -> set[int]:
    return {leaf.number for leaf in tree_leaves(tree) if isinstance(leaf, Placeholder)}


def _filled(
    value: Tree, values: Mapping[int, Any], copies: Mapping[int, Any] | None = None
) -> Tree:
    """Return a value with its tensor for every `Placeholder` in it, and with `copies` by `id`;
    itself, if it has none.
    """

    def fill(leaf: object) -> object:
        return (
            values[leaf.number]
            if isinstance(leaf, Placeholder)
            else (copies or {}).get(id(leaf), leaf)
        )

    return changed(value, fill)
