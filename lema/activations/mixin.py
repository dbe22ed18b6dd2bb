"""A trainer of `transformers` or TRL whose training steps offload the tensors saved for their
backwards.

    class MyTrainer(ActivationOffloadingMixin, Trainer): ...

    MyTrainer(model, arguments, train_dataset=rows, activation_offloading="disk").train()

A step is inside the offloading context as a whole: forward, loss and backward. Evaluation and
prediction are outside.
"""

import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from lema.activations.context import MODES, Mode, get_lora_act_offloading_ctx_manager
from lema.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Trainer as Below
else:
    Below = object

__all__ = ["ActivationOffloadingMixin"]

THEIRS = "maybe_activation_offload_context"  # where TRL's trainers keep a context of their own


class ActivationOffloadingMixin(Below):
    """Offloads activations in every training step of a trainer.

    Put it before the trainer in the bases of a class. It takes the trainer's arguments and two more
    keywords. The model's hooks and the memory for moved tensors exist from the first step to the
    end of `train()`, however it ends. Steps outside of `train()` keep them until the trainer is
    freed, or `close_activation_offloading()`.

    Args:
        args: arguments of the trainer by position.
        activation_offloading: which tensors move, and where to: True, "legacy", "hidden_states",
            "disk"; False: none. None: the value of `args.activation_offloading` (TRL's arguments
            have it), or True if there is none, because the mixin was added on purpose.
        activation_offloading_options: for `get_lora_act_offloading_ctx_manager`. With "disk",
            `offload_dir` is `args.output_dir` if you do not set it.
        kwargs: arguments of the trainer by name.

    Attributes:
        activation_offload_context: that of the last training step; a null context before the first,
            and if nothing is offloaded. Its `counters` say what was moved; those of a run are there
            when `train()` has ended.

    Raises:
        ConfigError: the mode is none of these; or transformers' own offloading of checkpoints is
            asked for as well; or the model is one that runs in several threads
            (`torch.nn.DataParallel`).
        TypeError: the class has the trainer before the mixin, so that no step would come by here.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        index = cls.__mro__.index(ActivationOffloadingMixin)
        before = cls.__mro__[:index]
        after = cls.__mro__[index + 1 :]
        bases = [base for base in before if not issubclass(base, ActivationOffloadingMixin)]
        stepping = [base.__name__ for base in bases if "training_step" in vars(base)]
        if stepping and not any("training_step" in vars(base) for base in after):
            raise TypeError(
                f"{cls.__name__}: ActivationOffloadingMixin must stand before "
                f"{stepping[-1]} in the bases"
            )

    def __init__(
        self,
        *args: Any,
        activation_offloading: Mode | Literal[False] | None = None,
        activation_offloading_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        arguments: Any = next(
            (
                argument
                for argument in (*args, *kwargs.values())
                if hasattr(argument, "activation_offloading")
            ),
            None,
        )
        if activation_offloading is None:
            activation_offloading = getattr(arguments, "activation_offloading", None)
        asked: Any = getattr(arguments, "activation_offloading", False)
        if asked:  # so that the trainer below prepares no offloading of its own
            arguments.activation_offloading = False
        try:
            super().__init__(*args, **kwargs)
        finally:
            if asked:
                arguments.activation_offloading = asked
        if hasattr(self, THEIRS):
            # because a subclass may have made one all the same
            setattr(self, THEIRS, nullcontext())
        if activation_offloading is None:
            asked = getattr(self.args, "activation_offloading", True)
            activation_offloading = False if asked is None else asked
        self.activation_offloading: Mode | Literal[False] = activation_offloading
        self.activation_offload_context: AbstractContextManager[Any] = nullcontext()
        self._offload_options = dict(activation_offloading_options or {})
        self._offloaded: weakref.ref[nn.Module] | None = None  # whose context is open for steps
        self._check_offloading()

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run the trainer's step, and offload the tensors that it saves for its backward.

        Args:
            model: the model that the trainer trains.
            args: further arguments of the trainer's method by position.
            kwargs: further arguments of the trainer's method by name.

        Returns:
            The loss of the batch.

        Raises:
            ConfigError: the model runs in several threads (`torch.nn.DataParallel`).
        """
        if self.activation_offloading and isinstance(model, nn.DataParallel):
            raise ConfigError(
                (
                    "activation_offloading does not work for a model that runs in other "
                    "threads (torch.nn.DataParallel)"
                ),
                how=(
                    "start one process for each device (torchrun, accelerate launch), or show "
                    "only one of them"
                ),
            )
        with self._offloading():
            return super().training_step(model, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, and close the context when the training ends or fails.

        Args:
            args: arguments of the trainer's method by position.
            kwargs: arguments of the trainer's method by name.

        Returns:
            What the trainer returns.
        """
        try:
            result = super().train(*args, **kwargs)
        finally:
            self.close_activation_offloading()
        counters = getattr(self.activation_offload_context, "counters", None)
        if counters is not None and counters.seen and not counters.moved:
            why = ", ".join(
                f"{reason.value} ({count:,})" for reason, count in counters.kept.most_common(3)
            )
            warnings.warn(
                f"activation_offloading={self.activation_offloading!r} moved nothing: {why}",
                stacklevel=2,
            )
        return result

    def close_activation_offloading(self) -> None:
        """Remove the hooks from the model and free the memory. The next training step makes a
        new context.
        """
        if self._offloaded is None:
            return
        self._offloaded = None
        context: Any = self.activation_offload_context
        context.close()

    def _offloading(self) -> AbstractContextManager[Any]:
        """Return the context of a step; a new one where the model is not the one of the last
        step.
        """
        if not self.activation_offloading:
            return nullcontext()
        model: Any = self.model
        if self._offloaded is None or self._offloaded() is not model:
            self.close_activation_offloading()
            options = dict(self._offload_options)
            if self.activation_offloading == "disk":
                options.setdefault("offload_dir", self.args.output_dir)
            self.activation_offload_context = get_lora_act_offloading_ctx_manager(
                model, mode=self.activation_offloading, **options
            )
            self._offloaded = weakref.ref(model)
        return self.activation_offload_context

    def _check_offloading(self) -> None:
        """Raise if the mode is unknown, or if checkpoints move their inputs themselves, which
        our hooks cannot see.
        """
        if self.activation_offloading not in (*MODES, False):
            modes = ", ".join(map(repr, (*MODES, False)))
            raise ConfigError(
                f"activation_offloading must be one of {modes}, not {self.activation_offloading!r}"
            )
        if not self.activation_offloading:
            return
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            options = getattr(self.args, name, None)
            if isinstance(options, Mapping) and options.get("offload"):
                what = "both activation_offloading and the checkpoints offload activations"
                how = 'leave that out; activation_offloading="hidden_states" moves the same tensors'
                raise ConfigError(what, where=f"{name}: offload", how=how)
