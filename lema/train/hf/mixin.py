"""A trainer of `transformers` or TRL whose gradient accumulation is one pass over the layers.

    class MyTrainer(StreamingMixin, SFTTrainer): ...

    MyTrainer("directory or hub id", args=arguments, train_dataset=rows,
    peft_config=LoraConfig(...)).train()

A trainer takes the batches of an optimizer step one after the other, and each would stream every
layer up and down. Here the training steps of the other batches go as far as their first call of the
layers, and are given up there. That of the first batch follows, and where it calls the layers they
are run once, for all batches. The other steps are taken again in their turn, with what the layers
made of their batches, and each ends in its own loss and backward. Such a backward ends where the
layers do; after the last one the layers are differentiated, with the gradients of all. A second
call, such as that of a reference without adapters, is made for all batches in the same way.

So what a trainer does with a batch before its last call of the layers is done more than once, but
for preparing it: that comes first, for all batches in their order, because GRPO draws completions
there.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lema.backend.interrupt import autograd_in_this_thread
from lema.engine.stack import LayerStack, StackCall
from lema.errors import ConfigError
from lema.train.hf.peftmodel import SCORES, StreamedPeftModel, streamed
from lema.train.hf.reference import ReferenceMixin

if TYPE_CHECKING:
    from transformers import Trainer as Below
    from transformers import TrainingArguments
else:
    Below = object

__all__ = ["StreamingMixin"]


class StreamingMixin(ReferenceMixin, Below):
    """Lets the layers of all batches of an optimizer step run together, in any trainer of
    transformers.

    Put it before the trainer in the bases of a class. It takes the trainer's arguments and two
    more.

    Args:
        model: a model of `lema.streamed`, or the name of one to open.
        args: arguments of the trainer by position.
        peft_config: for a model given by its name: PEFT's config, or the directory of an adapter.
        streaming: for a model given by its name: further arguments of `lema.streamed`.
        kwargs: arguments of the trainer by name.

    Raises:
        ConfigError: the model does not stream, or `peft_config` is given with an opened model.
        TypeError: the trainer is before the mixin in the bases.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(StreamingMixin)]
        if stepping := [base.__name__ for base in before[1:] if "get_batch_samples" in vars(base)]:
            raise TypeError(
                f"{cls.__name__}: StreamingMixin must stand before {stepping[-1]} in the bases"
            )

    def __init__(
        self,
        model: object = None,
        *args: Any,
        peft_config: Any = None,
        streaming: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, str | PathLike):
            arguments = _training_arguments((*args, *kwargs.values()))
            device = {} if arguments is None else {"device": arguments.device.type}
            if self._scores() and getattr(peft_config, "task_type", SCORES) is None:
                peft_config = deepcopy(peft_config)
                peft_config.task_type = SCORES  # as this trainer opens a model by its name
            model = streamed(model, peft_config, **{**device, **(streaming or {})})
        elif peft_config is not None or streaming is not None:
            what = "peft_config and streaming need the name of a model"
            raise ConfigError(what, where=type(self).__name__, how="give them to lema.streamed")
        if not isinstance(model, StreamedPeftModel):
            what = f"the model is a {type(model).__name__}, and its layers do not stream"
            raise ConfigError(
                what, where=type(self).__name__, how="give its name, or the result of lema.streamed"
            )
        if self._scores() and model.peft_config["default"].task_type != SCORES:
            what = (
                "a RewardTrainer needs a model that scores texts, and this one has a head over "
                "the vocabulary"
            )
            how = f'open it with task_type="{SCORES}" in the LoraConfig'
            raise ConfigError(what, where=type(self).__name__, how=how)
        if model.opened.backend.replicas.size > 1:
            arguments = _training_arguments((*args, *kwargs.values()))
            # The graph that DistributedDataParallel would search for unused parameters ends where
            # the layers do, so all adapters would seem to be unused.
            if arguments is not None and arguments.ddp_find_unused_parameters is None:
                arguments.ddp_find_unused_parameters = False
            _check_untied(model, type(self).__name__)
        self._batches: Sequence[Any] = ()
        self._joint: _JointStep | None = None
        super().__init__(model, *args, **kwargs)

    @classmethod
    def _scores(cls) -> bool:
        """Whether the trainer below is TRL's for rewards, by its name: it may not be installed."""
        return any(base.__name__ == "RewardTrainer" for base in cls.__mro__)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of an optimizer step as the trainer does, and keep them.

        Args:
            args: arguments of the trainer's method by position.
            kwargs: arguments of the trainer's method by name.

        Returns:
            What the trainer returns: the batches and the number of their tokens.
        """
        batch_samples = super().get_batch_samples(*args, **kwargs)
        self._batches = batch_samples[0]
        self._joint = None
        return batch_samples

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the trainer's training step, with its layers together with those of the other
        batches.

        Args:
            model: the model that the trainer trains.
            inputs: one batch of the step.
            args: further arguments of the trainer's method by position.
            kwargs: further arguments of the trainer's method by name.

        Returns:
            The loss of the batch.
        """
        # so that Ctrl-C and a trainer's own handlers of signals wait for one layer only
        with autograd_in_this_thread():
            return self._joint_step(model, inputs, *args, **kwargs)

    def _joint_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        index = next((index for index, batch in enumerate(self._batches) if batch is inputs), None)
        if index is None or len(self._batches) == 1:
            return super().training_step(model, inputs, *args, **kwargs)
        if getattr(model, "find_unused_parameters", False):
            what = (
                "DistributedDataParallel cannot find unused parameters of a model whose layers run "
                "for all batches of a step at once"
            )
            how = "set ddp_find_unused_parameters=False in the trainer's arguments"
            raise ConfigError(what, where=type(self).__name__, how=how)
        if self._joint is None:
            step = super().training_step
            stack = self.accelerator.unwrap_model(model).stack
            model.train()  # because trainers look at it when they prepare a batch
            self._joint = _JointStep(
                stack, self._prepared(), lambda batch: step(model, batch, *args, **kwargs)
            )
        return self._joint.loss(index)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return what the trainer below makes of a batch, or the batch where that is done."""
        if self._joint is not None and self._joint.stepping:
            return inputs
        return super()._prepare_inputs(inputs)

    def _prepared(self) -> list[Any]:
        """Return what the trainer below makes of the batches of the step. The trainers that make
        completions there count batches in `_step`, after each, to know which completions are whose
        and when new ones are due."""
        count = getattr(self, "_step", 0)
        prepared = []
        for number, batch in enumerate(self._batches):
            self._step = count + number
            prepared.append(self._prepare_inputs(batch))
        self._step = count
        return prepared


def _training_arguments(arguments: Sequence[Any]) -> "TrainingArguments | None":
    """Return the `TrainingArguments` among a trainer's arguments; None: there are none."""
    return next(
        (value for value in arguments if hasattr(value, "per_device_train_batch_size")), None
    )


def _check_untied(model: StreamedPeftModel, where: str) -> None:
    """Refuse, with `ConfigError`, embeddings that train and are the head as well: their gradients
    are formed in two backwards of a step, and DistributedDataParallel takes them from one."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    trained = [
        {id(weight) for weight in module.parameters() if weight.requires_grad}
        for module in modules
        if module is not None
    ]
    if len(trained) == len(modules) and set.intersection(*trained):
        what = (
            "several processes cannot run batches of a step together where embeddings train "
            "that are the head as well"
        )
        how = "use one wide batch instead of the mixin, or start one process"
        raise ConfigError(what, where=where, how=how)


class _Reached(BaseException):
    """Gives a training step up where it calls the layers. No `Exception`, because trainers catch
    those.
    """


@dataclass(eq=False)
class _Batch:
    """One batch of an optimizer step."""

    inputs: Any  # as the trainer has it
    # what its calls of the layers return, without the layers' graph
    states: list[list[Tensor]] = field(default_factory=list)
    at: int = 0  # how many of these its training step has been given this time
    call: StackCall | None = None  # the call for which it waits; None: there is none
    loss: Tensor | None = None  # what its training step has returned; None: it has not ended

    def begin(self) -> None:
        """Take its training step from its beginning."""
        self.at = 0
        self.call = None

    def wait_for(self, call: StackCall) -> None:
        """Let it wait for what the layers return from a call."""
        self.call = call

    def take(self, states: list[Tensor]) -> None:
        """Have what the layers return from the call that it waits for."""
        self.states.append(states)
        self.call = None

    def next_states(self) -> list[Tensor]:
        """Return what its next call of the layers returns, which is there."""
        self.at += 1
        return self.states[self.at - 1]

    def end(self, loss: Tensor) -> None:
        """Have the loss of its training step."""
        self.loss = loss


class _JointStep:
    """The training steps of all batches of an optimizer step through the layers; `step` takes
    that of one.
    """

    def __init__(
        self, stack: LayerStack, batches: Sequence[Any], step: Callable[[Any], Tensor]
    ) -> None:
        self._stack = stack
        self._step = step
        self._batches = [_Batch(inputs) for inputs in batches]
        self._layer_outputs: list[tuple[Tensor, Tensor]] = []  # with the layers' graph, and without
        self.stepping = False  # whether a training step is being taken

    def loss(self, index: int) -> Tensor:
        """Return what the training step of a batch returns; the last has gradients formed in the
        layers.
        """
        batch = self._batches[index]
        if not batch.states:
            self._have_others_wait(index)
        while batch.loss is None:
            self._go_on(batch, leads=batch.call is not None or not batch.states)
            if batch.loss is None:
                self._have_others_wait(index)
        if index == len(self._batches) - 1:
            pairs = [
                (state, leaf.grad) for state, leaf in self._layer_outputs if leaf.grad is not None
            ]
            self._layer_outputs.clear()
            if pairs:
                torch.autograd.backward(
                    [state for state, _ in pairs], [gradient for _, gradient in pairs]
                )
        return batch.loss

    def _have_others_wait(self, index: int) -> None:
        """Take the training steps of the batches after this one as far as their next calls."""
        for later_batch in self._batches[index + 1 :]:
            if later_batch.loss is None and later_batch.call is None:
                self._go_on(later_batch, leads=False)

    def _go_on(self, batch: _Batch, *, leads: bool) -> None:
        """Take a batch's step as far as its next call of the layers; one that `leads` has it run
        for all that wait.
        """
        stack = self._stack
        inputs = batch.inputs
        batch.begin()
        waiting = leads

        def supply(call: StackCall) -> list[Tensor]:
            nonlocal waiting
            if call.routed:
                how = (
                    "set router_aux_loss_coef to 0.0 in the trainer's arguments, or use one "
                    "wide batch"
                )
                raise ConfigError(
                    "the mixin does not support the loss of routers",
                    where="StreamingMixin",
                    how=how,
                )
            if batch.at == len(batch.states):
                batch.wait_for(call)
                if not waiting:
                    raise _Reached
                # Here and not after the step, because the adapters of the call are the active ones
                # only within it.
                waiting = False
                self._run(call)
            return batch.next_states()

        self.stepping = True
        try:
            with stack.supplied_by(supply):
                # Given a copy, because a trainer may write into its batch, and this may not be the
                # last time.
                batch.end(self._step(dict(inputs) if type(inputs) is dict else inputs))
        except _Reached:
            pass
        finally:
            self.stepping = False

    def _run(self, like: StackCall) -> None:
        """Run the calls that batches wait for and that are made as this one is, whose adapters
        are active now.
        """
        waiting = [
            (batch, batch.call)
            for batch in self._batches
            if batch.call is not None and batch.call.joins(like)
        ]
        outputs = self._stack.run([call for _, call in waiting])
        for (batch, _), (output, *of_reference) in zip(waiting, outputs, strict=True):
            leaf = output.detach().requires_grad_(output.requires_grad)
            batch.take([leaf, *of_reference])
            if output.requires_grad:
                self._layer_outputs.append((output, leaf))
