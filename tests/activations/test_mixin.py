"""The mixin: a trainer's steps offload, and nothing else of it changes: not one bit, not its
evaluation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lema.activations import ActivationOffloadingMixin
from lema.activations import hooks as scope
from lema.backend.torchstreams import TorchCarrier
from lema.errors import ConfigError

VOCABULARY = 64
TOKENS = 16
LAYERS = 3
STEPS = 3
MODES = (True, "legacy", "hidden_states", "disk")
CHECKPOINTED = {"plain": None, "reentrant": True, "not reentrant": False}
RENAMED = any(field.name == "activation_checkpointing" for field in fields(TrainingArguments))
PREFIX = "activation" if RENAMED else "gradient"  # of the settings of checkpoints


class Offloading(ActivationOffloadingMixin, Trainer):
    """Keeps the loss of every micro-batch, to the last bit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.losses.append(super().training_step(*args, **kwargs))
        return self.losses[-1]


def tiny_model() -> PeftModel:
    """A model whose adapters drop out, so that the generator's state counts too."""
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
    }
    base = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, lora)


def rows(count: int = 12) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(
    directory: Path,
    *,
    kind: type[TrainingArguments] = TrainingArguments,
    reentrant: bool | None = None,
    **changes: Any,
) -> TrainingArguments:
    checkpoints = {}
    if reentrant is not None:
        checkpoints = {
            f"{PREFIX}_checkpointing": True,
            f"{PREFIX}_checkpointing_kwargs": {"use_reentrant": reentrant},
        }
    settings = {
        "output_dir": str(directory),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return kind(**{**settings, **checkpoints, **changes})


def trainer_of(
    directory: Path,
    mode: Any = None,
    *,
    kind: type[Offloading] = Offloading,
    model: Any = None,
    **changes: Any,
) -> Any:
    options = {"activation_offloading_options": changes.pop("options", None)}
    model = tiny_model() if model is None else model
    if changes.get("reentrant"):
        model.enable_input_require_grads()
    made = arguments(directory, **changes)
    return kind(
        model,
        made,
        train_dataset=rows(),
        eval_dataset=rows(4),
        activation_offloading=mode,
        **options,
    )


@dataclass
class Run:
    losses: list[Tensor]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, trainer: Any) -> Run:
        trained = {
            name: weight.detach()
            for name, weight in trainer.model.named_parameters()
            if weight.requires_grad
        }
        return cls(trainer.losses, trained)

    def assert_same(self, other: Run) -> None:
        assert len(self.losses) == len(other.losses)
        assert all(torch.equal(*pair) for pair in zip(self.losses, other.losses, strict=True))
        assert self.weights.keys() == other.weights.keys()
        assert all(
            torch.equal(weight, other.weights[name]) for name, weight in self.weights.items()
        )


@pytest.fixture(scope="module")
def run_without(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """A run in which nothing is moved, once for each way to accumulate and to checkpoint."""

    @cache
    def run(accumulated: int = 1, reentrant: bool | None = None) -> Run:
        directory = tmp_path_factory.mktemp("without")
        options = {"gradient_accumulation_steps": accumulated, "reentrant": reentrant}
        trainer = trainer_of(directory, False, **options)
        before = Run.of(trainer).weights
        before = {name: weight.clone() for name, weight in before.items()}
        trainer.train()
        done = Run.of(trainer)
        assert not all(torch.equal(weight, before[name]) for name, weight in done.weights.items())
        return done

    return run


def hooks_on(model: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


# Numbers


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpointed", CHECKPOINTED)
@pytest.mark.parametrize("mode", MODES)
def test_a2_a_run_is_the_same_to_the_last_bit(
    mode: Any, checkpointed: str, run_without: Callable[..., Run], tmp_path: Path
) -> None:
    reentrant = CHECKPOINTED[checkpointed]
    trainer = trainer_of(tmp_path, mode, reentrant=reentrant)
    trainer.train()
    Run.of(trainer).assert_same(run_without(reentrant=reentrant))
    counters = trainer.activation_offload_context.counters
    assert counters.bytes_out > 0, "nothing was moved: nothing was shown"
    assert trainer.activation_offload_context.live_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", ["plain", "not reentrant"])
def test_gradients_accumulate_as_ever(
    checkpointed: str, run_without: Callable[..., Run], tmp_path: Path
) -> None:
    changes = {"gradient_accumulation_steps": 2}
    trainer = trainer_of(tmp_path, True, reentrant=CHECKPOINTED[checkpointed], **changes)
    trainer.train()
    assert len(trainer.losses) == 2 * STEPS
    Run.of(trainer).assert_same(run_without(2, CHECKPOINTED[checkpointed]))


@pytest.mark.slow
def test_layer_inputs_are_what_hidden_states_moves(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "hidden_states", reentrant=False)
    trainer.train()
    one = 2 * TOKENS * 32 * 4  # bytes of a hidden state
    assert trainer.activation_offload_context.counters.bytes_out == STEPS * LAYERS * one


# What is inside the context, and what is not


class Watching(Offloading):
    """Notes whether a context is open: in the loss and the backward of a step, and in
    evaluation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.open_in: dict[str, set[bool]] = {"loss": set(), "evaluation": set()}

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.open_in["loss" if self.model.training else "evaluation"].add(
            scope.current() is not None
        )
        return super().compute_loss(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        with torch.enable_grad():  # autograd saves what it saves in training
            model(**self._prepare_inputs(dict(inputs))).loss.backward()
        return super().prediction_step(model, inputs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        gradients = [
            None if one.grad is None else one.grad.clone() for one in self.model.parameters()
        ]
        found = super().evaluate(*args, **kwargs)
        for one, gradient in zip(self.model.parameters(), gradients, strict=True):
            one.grad = gradient
        return found


@pytest.mark.slow
def test_a2_evaluation_moves_nothing_and_allocates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = []
    allocate = TorchCarrier.host_buffer
    monkeypatch.setattr(
        TorchCarrier,
        "host_buffer",
        lambda self, nbytes: buffers.append(nbytes) or allocate(self, nbytes),
    )

    seen = []

    class Evaluating(Watching):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            before = (self.activation_offload_context.counters.seen, len(buffers))
            found = super().evaluate(*args, **kwargs)
            assert (self.activation_offload_context.counters.seen, len(buffers)) == before
            seen.append(before)
            return found

    trainer = trainer_of(tmp_path, True, kind=Evaluating, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert len(seen) == STEPS
    assert all(count > 0 and allocated > 0 for count, allocated in seen)
    assert trainer.open_in["loss"] == {True}
    assert trainer.open_in["evaluation"] == {False}
    trainer.predict(rows(2))
    assert trainer.open_in["evaluation"] == {False}


def test_buffers_are_used_again_from_step_to_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = []
    after_step = []
    allocate = TorchCarrier.host_buffer
    monkeypatch.setattr(
        TorchCarrier,
        "host_buffer",
        lambda self, nbytes: buffers.append(nbytes) or allocate(self, nbytes),
    )

    class Noting(Offloading):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            after_step.append(len(buffers))
            return loss

    trainer_of(tmp_path, True, kind=Noting).train()
    assert after_step == [after_step[0]] * STEPS
    assert after_step[0] > 0


@pytest.mark.slow
def test_a2_off_is_a_null_context_and_no_hooks(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, False, kind=Watching)
    before = hooks_on(trainer.model)
    trainer.train()
    assert isinstance(trainer.activation_offload_context, nullcontext)
    assert trainer.open_in["loss"] == {False}
    assert hooks_on(trainer.model) == before


# What is left


@pytest.mark.slow
def test_after_training_the_model_has_the_hooks_it_had(tmp_path: Path) -> None:
    class Looking(Offloading):
        most = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.most = max(self.most, hooks_on(self.model))
            return super().compute_loss(*args, **kwargs)

    trainer = trainer_of(tmp_path, "hidden_states", kind=Looking)
    before = hooks_on(trainer.model)
    trainer.train()
    assert trainer.most > before
    assert hooks_on(trainer.model) == before
    assert scope.current() is None


class Failed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_fails_leaves_nothing(
    mode: Any, run_without: Callable[..., Run], tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, mode)
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    before = hooks_on(trainer.model)

    def fail(*_: Any) -> None:
        if len(trainer.losses) == 1:
            raise Failed

    handle = trainer.model.get_base_model().model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(Failed):
        trainer.train()
    handle.remove()
    context = trainer.activation_offload_context
    gc.collect()  # the graph, which the error's traceback held
    assert context.counters.moved > 0
    assert context.live_bytes == 0
    assert scope.current() is None
    assert hooks_on(trainer.model) == before
    assert list(tmp_path.glob("**/.lema*")) == []

    trainer.model.load_state_dict(start)
    again = trainer_of(tmp_path, mode, model=trainer.model)
    again.model.zero_grad(set_to_none=True)
    again.train()
    Run.of(again).assert_same(run_without())


def test_a_step_outside_of_training_offloads_too(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, True)
    batch = {key: torch.stack([row[key] for row in rows(2)]) for key in ("input_ids", "labels")}
    before = hooks_on(trainer.model)
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    trainer.training_step(trainer.model, batch)
    assert trainer.activation_offload_context.counters.moved > 0
    assert hooks_on(trainer.model) > before
    trainer.close_activation_offloading()
    trainer.close_activation_offloading()
    assert hooks_on(trainer.model) == before


# Several trainers, several models


@pytest.mark.slow
def test_two_trainers_in_one_process(run_without: Callable[..., Run], tmp_path: Path) -> None:
    """The second takes a whole run between two steps of the first."""
    second = trainer_of(tmp_path / "second", "disk")

    class First(Offloading):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if len(self.losses) == 1:
                state = torch.get_rng_state()
                second.train()
                torch.set_rng_state(state)
            return super().training_step(*args, **kwargs)

    first = trainer_of(tmp_path / "first", True, kind=First)
    first.train()
    Run.of(first).assert_same(run_without())
    assert len(second.losses) == STEPS
    assert hooks_on(first.model) == hooks_on(second.model) == hooks_on(tiny_model())


@pytest.mark.slow
def test_a_new_model_gets_a_new_context(tmp_path: Path) -> None:
    """A search over hyperparameters makes a model for each trial."""
    contexts = []

    class Searching(Offloading):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            contexts.append(self.activation_offload_context)
            return loss

    made = arguments(tmp_path)
    trainer = Searching(
        None, made, train_dataset=rows(), model_init=tiny_model, activation_offloading=True
    )
    trainer.train()
    old = trainer.model
    trainer.train()
    assert trainer.model is not old
    assert len(contexts) == 2 * STEPS
    assert len(set(map(id, contexts))) == 2
    assert all(context.counters.moved > 0 for context in contexts)
    assert hooks_on(old) == hooks_on(trainer.model) == hooks_on(tiny_model())


@pytest.mark.slow
def test_a_model_exchanged_between_steps_is_the_one_that_is_hooked(tmp_path: Path) -> None:
    class Exchanging(Offloading):
        def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            self.model = models[len(self.losses) % 2]
            return super().training_step(self.model, *args, **kwargs)

    models = [tiny_model(), tiny_model()]
    before = hooks_on(models[0])
    trainer = trainer_of(tmp_path, True, kind=Exchanging, model=models[0])
    trainer.train()
    assert [hooks_on(model) for model in models] == [before, before]


# The setting


@pytest.mark.slow
def test_the_keyword_says_it_then_the_arguments_then_the_class(tmp_path: Path) -> None:
    @dataclass
    class Theirs(TrainingArguments):
        activation_offloading: Any = False

    def mode(kind: type[TrainingArguments], asked: Any = None, **changes: Any) -> Any:
        made = kind(output_dir=str(tmp_path), use_cpu=True, report_to=[], **changes)
        trainer: Any = Offloading(
            tiny_model(), args=made, train_dataset=rows(), activation_offloading=asked
        )
        assert getattr(trainer.args, "activation_offloading", None) == changes.get(
            "activation_offloading", False if kind is Theirs else None
        )
        return trainer.activation_offloading

    assert mode(TrainingArguments) is True, (
        "there is no other way to ask for it, and no other reason for the mixin"
    )
    assert mode(TrainingArguments, False) is False
    assert mode(Theirs) is False
    assert mode(Theirs, activation_offloading=None) is False
    assert mode(Theirs, activation_offloading="disk") == "disk"
    assert mode(Theirs, "legacy", activation_offloading="disk") == "legacy"
    assert mode(Theirs, False, activation_offloading=True) is False
    assert Offloading(tiny_model(), train_dataset=rows()).activation_offloading is True


def test_a_mode_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"activation_offloading must be one of .*'disk'.*, not 'disc'"
    ):
        trainer_of(tmp_path, "disc")


@pytest.mark.slow
def test_options_reach_the_context(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, True, options={"min_offload_size": 1 << 30})
    with pytest.warns(
        UserWarning,
        match=r"activation_offloading=True moved nothing: .*smaller than min_offload_size",
    ):
        trainer.train()
    assert trainer.activation_offload_context.counters.bytes_out == 0


@pytest.mark.slow
def test_the_file_is_where_the_run_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    import lema.activations.context as manager

    class Noted(manager.OffloadFile):
        def __init__(self, directory: Path, *args: Any) -> None:
            made.append(directory)
            super().__init__(directory, *args)

    monkeypatch.setattr(manager, "OffloadFile", Noted)
    trainer_of(tmp_path / "run", "disk").train()
    trainer_of(tmp_path / "run", "disk", options={"offload_dir": tmp_path / "own"}).train()
    trainer_of(tmp_path / "run", True).train()
    assert made == [tmp_path / "run", tmp_path / "own"]
    assert list((tmp_path / "own").iterdir()) == []


# Trainers with offloading of their own


@pytest.mark.slow
def test_a_trainer_below_prepares_none_of_its_own(
    run_without: Callable[..., Run], tmp_path: Path
) -> None:
    @dataclass
    class Theirs(TrainingArguments):
        activation_offloading: Any = False

    class Below(Trainer):
        """As TRL's trainers: it offloads on its own, and cannot where there is no accelerator."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            assert not self.args.activation_offloading, "there is no accelerator"
            self.maybe_activation_offload_context = torch.autograd.graph.save_on_cpu()

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            with self.maybe_activation_offload_context:
                return super().training_step(*args, **kwargs)

    class Both(Offloading, Below):
        pass

    made = arguments(tmp_path, kind=Theirs, activation_offloading=True)
    trainer: Any = Both(tiny_model(), made, train_dataset=rows())
    assert made.activation_offloading is True
    trainer.train()
    Run.of(trainer).assert_same(run_without())
    assert trainer.activation_offload_context.counters.moved > 0


@pytest.mark.skipif(not RENAMED, reason="this version of transformers has none")
def test_checkpoints_that_offload_too_are_refused(tmp_path: Path) -> None:
    options = {"use_reentrant": False, "offload": True}
    with pytest.raises(ConfigError, match="the checkpoints offload activations"):
        trainer_of(
            tmp_path, True, activation_checkpointing=True, activation_checkpointing_kwargs=options
        )
    trainer_of(
        tmp_path, False, activation_checkpointing=True, activation_checkpointing_kwargs=options
    )


def test_a_model_in_several_threads_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, True)
    with pytest.raises(ConfigError, match="other threads"):
        trainer.training_step(nn.DataParallel(trainer.model), {})


def test_the_trainer_before_the_mixin_is_refused() -> None:
    with pytest.raises(TypeError, match="ActivationOffloadingMixin must stand before Trainer"):
        type("Wrong", (Trainer, ActivationOffloadingMixin), {})

    class Part(ActivationOffloadingMixin):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().training_step(*args, **kwargs)

    class Same(Part):
        pass

    assert issubclass(type("Right", (Same, Trainer), {}), Trainer)
