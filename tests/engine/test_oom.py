"""A device whose memory runs out: the step is taken all the same, with the same numbers, or it is
said what would help.

Memory runs out here where a test says so: while there are more slots than some number, or more rows
in a micro-batch.
"""

import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import config_writer, lema
from parity import DRAWS, streamed_model, trained
from smallrun import token_rows, write_model
from tiny import NUM_LAYERS, Checkpoint, micro_batches, wide_batch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lema import LemaModel, LemaTrainer
from lema.errors import MemoryLimitError, is_out_of_memory
from lema.model import Split

CheckpointOf = Callable[..., Checkpoint]

TOP = NUM_LAYERS - 1
SLOTS = 4
FULL = (
    "Tried to allocate 2.00 GiB. Device 0 has a total capacity of 4.00 GiB\nof which nothing "
    "is left"
)

# Where memory runs out: in the layer, on the way.
POINTS = {
    "forward": (4, "forward"),
    "first layer": (0, "forward"),
    "recomputation": (5, "recomputation"),
    "backward": (3, "backward"),
    "last backward": (1, "backward"),
    "turn, up": (TOP, "forward"),
    "turn, down": (TOP, "backward"),
    "head": (TOP, "head"),
}


@dataclass
class Device:
    """A device without memory for some work.

    Attributes:
        short: whether memory runs out there, given the layer, the way and the rows.
        failures: how often it did, and where: layer, way, rows, slots.
        made: what was computed in the pass under way.
    """

    model: LemaModel
    short: Callable[[int, str, int], bool]
    failures: list[tuple[int, str, int, int]] = field(default_factory=list)
    made: list[weakref.ref[Tensor]] = field(default_factory=list)

    def ask(self, layer: int, way: str, rows: int) -> None:
        if self.short(layer, way, rows):
            self.failures.append((layer, way, rows, self.model.memory.num_slots))
            error = torch.OutOfMemoryError(FULL)
            # which holds this function, which holds it: such cycles are in many a library
            raise error


class _Trap(torch.autograd.Function):
    """The input of a layer, at whose gradient the layer's own have been added already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ask: Callable[[], None]) -> Tensor:
        ctx.ask = ask
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.ask()
        return gradient, None


@contextmanager
def device(model: LemaModel, short: Callable[[int, str, int], bool]) -> Iterator[Device]:
    """Let memory run out, for the length of a `with` block, after a layer or a head has been
    computed.
    """
    found = Device(model, short)
    split = model.split
    run_layer = split.run_layer
    head = split.head

    def run(
        index: int, weights: Mapping[str, Tensor], call: Any, hidden: Tensor, **options: Any
    ) -> Tensor:
        rows = len(hidden)
        again = torch._C._current_graph_task_id() != -1
        if again:
            found.ask(index, "recomputation", rows)
        if torch.is_grad_enabled():
            hidden = _Trap.apply(hidden, lambda: found.ask(index, "backward", rows))
        if again:  # what it makes is differentiated at once
            return run_layer(index, weights, call, hidden, **options)
        made = run_layer(index, weights, call, hidden, **options)
        found.made.append(weakref.ref(made))
        found.ask(index, "forward", rows)
        return made

    def to_logits(hidden: Tensor, *rest: Any, **options: Any) -> Tensor:
        made = head(hidden, *rest, **options)
        if (
            split.model.training in split.learned.cuts
        ):  # else it is a few tokens, by which the split learns
            found.made.append(weakref.ref(made))
            found.ask(TOP, "head", len(hidden))
        return made

    split.run_layer = run
    split.head = to_logits
    try:
        yield found
    finally:
        del split.run_layer, split.head


def nothing(layer: int, way: str, rows: int) -> bool:
    return False


def at(
    point: str, model: LemaModel, *, slots: int = SLOTS, rows: int = 99
) -> Callable[[int, str, int], bool]:
    """Say that memory runs out at `point` while there are more slots than `slots`, or more rows
    than `rows`.
    """

    def short(layer: int, way: str, found: int) -> bool:
        return (layer, way) == POINTS[point] and (model.memory.num_slots > slots or found > rows)

    return short


@contextmanager
def opened(checkpoint: Checkpoint, tmp_path: Path, **settings: Any) -> Iterator[LemaModel]:
    base = {
        "lora_dropout": 0.1,
        "gradient_checkpointing": True,
        "prefetch_depth": SLOTS - 1,
        "learning_rate": 1e-2,
    }
    with streamed_model(checkpoint, output_dir=tmp_path, **base | settings) as model:
        yield model


@dataclass
class Seen:
    """What a run of steps leaves: losses, gradients, adapters, the optimizer's state, the
    generator's.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    moments: list[Tensor] = field(default_factory=list)
    generator: Tensor | None = None

    def step(
        self, trainer: LemaTrainer, given: list[dict[str, Tensor]], *, more: bool = False
    ) -> None:
        def keep(event: str) -> None:
            if event == "on_pre_optimizer_step":
                named = trained(trainer.peft_model).items()
                self.gradients.append(
                    {name: one.grad.clone() for name, one in named if one.grad is not None}
                )

        logits: list[Tensor] = []
        self.losses.append(trainer.accumulate(given, more=more, logits=logits, on_event=keep).loss)
        self.logits.append(torch.cat([part.flatten(0, 1) for part in logits]))

    def end(self, trainer: LemaTrainer) -> "Seen":
        self.adapters = {
            name: one.detach().clone() for name, one in trained(trainer.peft_model).items()
        }
        states = trainer.optimizer.state_dict()["state"]
        self.moments = [value for _, one in sorted(states.items()) for value in one.values()]
        self.generator = torch.get_rng_state()
        return self


def assert_same(one: Seen, other: Seen) -> None:
    assert one.losses == other.losses
    for found, expected in zip(one.gradients, other.gradients, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert any(gradient.any() for gradient in found.values())
    assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))
    assert all(torch.equal(one.adapters[name], other.adapters[name]) for name in other.adapters)
    assert all(torch.equal(a, b) for a, b in zip(one.moments, other.moments, strict=True))
    assert one.generator is not None
    assert other.generator is not None
    assert torch.equal(one.generator, other.generator)


def two_steps(
    trainer: LemaTrainer, parts: Callable[[dict[str, Tensor]], list[dict[str, Tensor]]]
) -> Seen:
    """Take two steps on six rows each, announcing each from the one before."""
    seen = Seen()
    torch.manual_seed(DRAWS)
    for step in range(2):
        seen.step(trainer, parts(wide_batch()), more=step < 1)
    return seen.end(trainer)


def in_rows(count: int) -> Callable[[dict[str, Tensor]], list[dict[str, Tensor]]]:
    def cut(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return [
            {name: tensor[at : at + count] for name, tensor in batch.items()}
            for at in range(0, 6, count)
        ]

    return cut


with_and_without_recomputation = pytest.mark.parametrize(
    ("point", "recompute"),
    [*((point, True) for point in POINTS), ("forward", False), ("backward", False)],
)


@pytest.fixture(scope="module")
def undisturbed(
    checkpoint_of: CheckpointOf, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool, int], Seen]:
    """Take (once) the steps with memory for everything: `(recompute, rows)`."""

    @cache
    def take(recompute: bool, rows: int) -> Seen:
        place = tmp_path_factory.mktemp("undisturbed")
        with (
            opened(checkpoint_of("llama"), place, gradient_checkpointing=recompute) as model,
            device(model, nothing),
        ):
            return two_steps(model.get_trainer(), in_rows(rows))

    return take


@pytest.mark.slow
@with_and_without_recomputation
def test_with_fewer_slots_every_number_is_as_if_nothing_had_happened(
    checkpoint_of: CheckpointOf,
    undisturbed: Callable[..., Seen],
    tmp_path: Path,
    point: str,
    recompute: bool,
) -> None:
    checkpoint = checkpoint_of("llama")
    settings = {"gradient_checkpointing": recompute}
    expected = undisturbed(recompute, 3)
    with (
        opened(checkpoint, tmp_path, **settings) as model,
        device(model, at(point, model, slots=1)) as failing,
    ):
        with pytest.warns(UserWarning, match="ran out") as said:
            found = two_steps(model.get_trainer(), in_rows(3))
        assert_same(found, expected)
        assert failing.failures, "memory never ran out"
        assert model.memory.num_slots == 1
        assert model.memory.announced == 0
        layer, way = POINTS[point]
        place = {"head": "in the head and the loss", "forward": f"in the forward of layer {layer}"}
        assert len(said) == 1
        text = str(said[0].message)
        assert f"ran out {place.get(way, f'in the backward of layer {layer}')};" in text
        assert "1 layer slot instead of 4" in text
        assert "prefetch_depth: 1" in text
        assert "micro" not in text
        assert ("gradient_checkpointing: true" in text) is not recompute


@pytest.mark.slow
@pytest.mark.parametrize("point", ["forward", "first layer", "turn, up", "turn, down", "head"])
def test_a_forward_that_ran_out_of_memory_goes_on_in_the_same_layer(
    checkpoint_of: CheckpointOf, tmp_path: Path, point: str
) -> None:
    with opened(checkpoint_of("llama"), tmp_path) as model, device(model, nothing) as failing:
        trainer = model.get_trainer()
        Seen().step(trainer, in_rows(3)(wide_batch()))
        undisturbed = len(failing.made)
        failing.made.clear()
        leases = model.memory.counters.leases
        Seen().step(trainer, in_rows(3)(wide_batch()))
        leases = model.memory.counters.leases - leases
        failing.short = at(point, model, slots=1)
        before = model.memory.counters.leases
        failing.made.clear()
        with pytest.warns(UserWarning, match="ran out"):
            Seen().step(trainer, in_rows(3)(wide_batch()))
        assert model.memory.counters.leases - before == leases, "a layer was leased once more"
        assert [slots for *_, slots in failing.failures] == [4, 3, 2]
        # Each failure costs the micro-batch in one layer once more (and its head), not the pass.
        assert undisturbed < len(failing.made) + 8
        assert len(failing.made) <= undisturbed + 6


@pytest.mark.slow
@with_and_without_recomputation
def test_with_smaller_micro_batches_every_number_is_as_if_they_had_been_so_from_the_start(
    checkpoint_of: CheckpointOf,
    undisturbed: Callable[..., Seen],
    tmp_path: Path,
    point: str,
    recompute: bool,
) -> None:
    checkpoint = checkpoint_of("llama")
    settings = {"gradient_checkpointing": recompute}
    expected = undisturbed(recompute, 2)
    with (
        opened(checkpoint, tmp_path, **settings) as model,
        device(model, at(point, model, rows=2)) as failing,
    ):
        with pytest.warns(UserWarning, match="ran out") as said:
            found = two_steps(model.get_trainer(), in_rows(6))
        assert_same(found, expected)
        # All slots but one are given up, then rows: six, three, two; and never again.
        assert failing.failures[-1][2:] == (3, 1)
        assert [rows for _, _, rows, slots in failing.failures if slots == 1] == [6, 3]
        assert len(said) == 1
        text = str(said[0].message)
        assert "1 layer slot instead of 4 and micro-batches of at most 2 rows instead of 6" in text
        assert "prefetch_depth: 1, micro_batch_size: 2" in text
        assert "device_memory" in text


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("limit", [{"slots": 1}, {"rows": 2}], ids=["slots", "rows"])
def test_inputs_of_layers_that_wait_elsewhere_are_those_of_the_pass_begun_again(
    checkpoint_of: CheckpointOf,
    undisturbed: Callable[..., Seen],
    tmp_path: Path,
    tier: str,
    limit: dict[str, int],
) -> None:
    given, expected = (3, 3) if "slots" in limit else (6, 2)
    with opened(checkpoint_of("llama"), tmp_path, boundary_activations=tier) as model:
        with (
            device(model, at("backward", model, **limit)),
            pytest.warns(UserWarning, match="ran out"),
        ):
            found = two_steps(model.get_trainer(), in_rows(given))
        assert_same(found, undisturbed(True, expected))
        if tier == "host":
            ids = wide_batch()["input_ids"]
            hidden_bytes = 32 * 4
            assert (
                model.adapter.activations.arena.memory_bytes == ids.numel() * hidden_bytes * TOP
            ), "a pass kept its own beside"


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "prefix"])
def test_a_fit_goes_on_as_if_its_micro_batches_had_been_smaller(
    checkpoint_of: CheckpointOf, tmp_path: Path, cached: bool
) -> None:
    rows = [
        {name: [min(one, 95) for one in ids] for name, ids in row.items()} for row in token_rows(9)
    ]
    settings = {
        "lora_dropout": 0.0,
        "lora_layers_to_transform": [6, 8, TOP],
        "cache_frozen_prefix": cached,
        "num_train_epochs": 2,
        "batch_size": 4,
        "shuffle": False,
    }
    left = {}
    for name, rows_at_once in (("smaller", 2), ("short", None)):
        limit = nothing if rows_at_once else None
        place = tmp_path / name
        with opened(
            checkpoint_of("llama"), place, micro_batch_size=rows_at_once, **settings
        ) as model:
            trainer = model.get_trainer()
            short = limit or (lambda layer, way, rows: (layer, way) == (8, "backward") and rows > 2)
            with device(model, short) as failing, warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                trainer.fit(rows)
            assert len(said) == (rows_at_once is None)
            assert len(failing.failures) == 3 * (rows_at_once is None)  # with four slots, two, one
            left[name] = Seen().end(trainer)
    assert_same(left["short"], left["smaller"])


@pytest.mark.slow
def test_a_later_step_that_needs_more_is_cut_once_more(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    with opened(checkpoint_of("llama"), tmp_path) as model, device(model, nothing) as failing:
        trainer = model.get_trainer()
        announced = list[int]()
        prelude = model.split.prelude

        def look(*arguments: Any, **options: Any) -> Any:
            announced.append(model.memory.announced)
            return prelude(*arguments, **options)

        model.split.prelude = look
        for rows in (4, 4, 2, 2):
            failing.short = at("backward", model, rows=rows)
            count = len(failing.failures)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                Seen().step(trainer, in_rows(6)(wide_batch()), more=True)
            assert len(said) == bool(len(failing.failures) - count)
        assert [one[2:] for one in failing.failures] == [(6, 4), (6, 2), (6, 1), (3, 1)]
        assert trainer.global_step == 4
        # Every pass begins with its leases announced, and with no others: those of a pass given up
        # are forgotten. The first is on lease before the prelude only while the model is not learnt
        # yet.
        assert announced[0] == 2 * TOP and set(announced[1:]) <= {2 * TOP, 2 * TOP + 1}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"slots": 1}, {"rows": 3}], ids=["slots", "rows"])
def test_gradients_of_passes_before_are_put_back(
    checkpoint_of: CheckpointOf, tmp_path: Path, limit: dict[str, int]
) -> None:
    """Two calls of `train_step` make one optimizer step; memory runs out in the second."""
    settings = {"gradient_accumulation_steps": 2, "save_steps": 0}

    def run(
        model: LemaModel, between: Callable[[LemaTrainer], None]
    ) -> tuple[list[Tensor], list[float], Seen]:
        trainer = model.get_trainer()
        torch.manual_seed(DRAWS)
        logits = []
        losses = []
        for number in range(2):
            if number:
                between(trainer)
            made, loss = trainer.train_step(wide_batch())
            logits.append(made)
            losses.append(loss)
        assert trainer.global_step == 1
        return logits, losses, Seen().end(trainer)

    def by_hand(trainer: LemaTrainer) -> None:
        trainer.config.micro_batch_size = limit.get("rows")

    with opened(checkpoint_of("llama"), tmp_path, **settings) as model:
        logits, losses, expected = run(model, by_hand)
    with (
        opened(checkpoint_of("llama"), tmp_path, **settings) as model,
        device(model, nothing) as failing,
    ):

        def run_out(_: LemaTrainer) -> None:
            failing.short = at("backward", model, **limit)

        with pytest.warns(UserWarning, match="ran out"):
            found, found_losses, seen = run(model, run_out)
    assert failing.failures
    assert found_losses == losses
    assert all(torch.equal(one, other) for one, other in zip(found, logits, strict=True))
    assert [len(one) for one in found] == [6, 6]
    assert_same(seen, expected)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("point", ["head", "turn, down", "last backward"])
def test_what_trains_at_the_ends_gets_its_gradient_once(
    checkpoint_of: CheckpointOf, tmp_path: Path, target: str, point: str
) -> None:
    """The head's gradients are summed as they are formed: what was summed is not summed again."""
    settings = {"lora_modules_to_save": [target], "loss_chunk_tokens": 8}
    given = micro_batches(3, padding=True)

    def run(model: LemaModel) -> Seen:
        trainer = model.get_trainer()
        seen = Seen()
        torch.manual_seed(DRAWS)
        for _ in range(2):
            seen.step(trainer, given)
        return seen.end(trainer)

    with opened(checkpoint_of("llama"), tmp_path, **settings) as model, device(model, nothing):
        expected = run(model)
    with (
        opened(checkpoint_of("llama"), tmp_path, **settings) as model,
        device(model, nothing) as failing,
    ):
        calls = 0
        short = at(point, model, slots=2)

        def later(layer: int, way: str, rows: int) -> bool:  # in the second block of a micro-batch
            nonlocal calls
            calls += (layer, way) == POINTS[point]
            return calls > 1 and short(layer, way, rows)

        failing.short = later
        with pytest.warns(UserWarning, match="ran out"):
            found = run(model)
    assert failing.failures
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["forward", "recomputation", "backward", "turn, down", "head"])
@pytest.mark.parametrize("limit", [{"slots": 1}, {"rows": 3}], ids=["slots", "rows"])
def test_nothing_of_a_failed_attempt_is_kept(
    checkpoint_of: CheckpointOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    limit: dict[str, int],
) -> None:
    """Not even until the collector of garbage comes of itself: errors hold what their functions
    had in hand.
    """
    with opened(checkpoint_of("llama"), tmp_path) as model, device(model, nothing) as failing:
        trainer = model.get_trainer()
        short = at(point, model, **limit)
        Seen().step(trainer, in_rows(3)(wide_batch()))  # what is learnt in the first step is learnt
        failing.made.clear()
        attempts: list[list[weakref.ref[Tensor]]] = []

        def fail(layer: int, way: str, rows: int) -> bool:
            if not short(layer, way, rows):
                return False
            attempts.append(
                failing.made[-1:]
                if way in ("forward", "head") and "rows" not in limit
                else failing.made
            )
            failing.made = []
            return True

        def run_prelude(*arguments: Any, **options: Any) -> Any:
            assert all(one() is None for attempt in attempts for one in attempt), (
                "a pass was begun beside another"
            )
            assert model.adapter.activations.arena._step() is None, (
                "the boundaries of another pass are kept"
            )
            return prelude(*arguments, **options)

        prelude = model.split.prelude
        failing.short = fail
        monkeypatch.setattr(model.split, "prelude", run_prelude)
        gc.collect()
        gc.disable()
        try:
            with pytest.warns(UserWarning, match="ran out"):
                Seen().step(trainer, in_rows(6)(wide_batch()))
            alive = [one for attempt in attempts for one in attempt if one() is not None]
        finally:
            gc.enable()
        assert attempts
        assert not alive


@pytest.mark.slow
def test_what_does_not_fit_at_all_is_refused_with_what_would_help(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    settings = {"max_length": 12}
    with (
        opened(checkpoint_of("llama"), tmp_path, **settings) as model,
        device(model, nothing) as failing,
    ):
        trainer = model.get_trainer()
        failing.short = at("backward", model, rows=0)
        with pytest.raises(MemoryLimitError) as caught:
            Seen().step(trainer, in_rows(6)(wide_batch()))
        error = caught.value
        assert error.exit_code == 4
        assert "1 row of 12 tokens at once next to 1 layer slot" in error.what
        assert "Tried to allocate 2.00 GiB" in error.what
        assert error.where == "in the backward of layer 3"
        assert "boundary_activations: host (" in error.how
        assert model.adapter.activations.arena._step() is None
        assert all(one() is None for one in failing.made), (
            "an error holds memory for as long as somebody holds it"
        )
        assert [rows for _, _, rows, slots in failing.failures if slots == 1] == [6, 3, 2, 1]
        assert all(one.grad is None for one in trained(trainer.peft_model).values())
        assert trainer.global_step == trainer.accumulation_step == model.memory.announced == 0
        # Whoever makes room, as a notebook may, goes on from there.
        failing.short = nothing
        Seen().step(trainer, in_rows(6)(wide_batch()))
        assert trainer.global_step == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", [0, 1, 2, 3])
def test_a_model_is_not_said_not_to_stream_where_memory_runs_out(
    checkpoint_of: CheckpointOf, tmp_path: Path, call: int
) -> None:
    """What a model is like is learnt by running it, and errors there are taken for answers."""
    with opened(checkpoint_of("llama"), tmp_path) as model:
        split = model.split
        calls = 0
        layer = split.call_layer
        head = split.head

        def fail(run: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == call + 1:
                    raise torch.OutOfMemoryError(FULL)
                return run(*arguments, **options)

            return wrapped

        split.call_layer = fail(layer)
        split.head = fail(head)
        with pytest.warns(UserWarning, match="ran out before the layers"):
            model.get_trainer().train_step(wide_batch())
        assert split.learned.mark_absent


def test_other_errors_are_not_taken_for_it(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    with opened(checkpoint_of("llama"), tmp_path) as model:
        trainer = model.get_trainer()
        calls = 0

        def fail(*_: Any, **__: Any) -> Tensor:
            nonlocal calls
            calls += 1
            raise RuntimeError("a kernel failed")

        model.split.run_layer = fail
        with pytest.raises(RuntimeError, match="a kernel failed"):
            trainer.train_step(wide_batch())
        assert (calls, model.memory.num_slots) == (1, SLOTS)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError("DEVICE error: out of memory\nKernel errors might be reported later"), True),
        (RuntimeError("LIB_STATUS_ALLOC_FAILED when calling `libCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (MemoryError("out of memory"), False),
        (OSError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


@pytest.mark.slow
@pytest.mark.parametrize("point", ["forward", "turn, up", "head"])
def test_evaluation_cuts_its_own_micro_batches(
    checkpoint_of: CheckpointOf, tmp_path: Path, point: str
) -> None:
    rows = token_rows(11)
    rows = [{name: [min(one, 95) for one in ids] for name, ids in row.items()} for row in rows]
    with opened(checkpoint_of("llama"), tmp_path, batch_size=6, micro_batch_size=2) as model:
        expected = model.get_trainer().evaluate(rows)
        whole: list[Tensor] = []
        model.adapter.evaluate(in_rows(2)(wide_batch()), whole)
    with (
        opened(checkpoint_of("llama"), tmp_path, batch_size=6) as model,
        device(model, nothing) as failing,
    ):
        failing.short = at(point, model, rows=2)
        trainer = model.get_trainer()
        with pytest.warns(
            UserWarning, match="micro-batches of at most 2 rows instead of 6"
        ) as said:
            assert trainer.evaluate(rows) == expected
        assert len(said) == 1
        count = len(failing.failures)
        logits = list[Tensor]()
        model.adapter.evaluate([wide_batch()], logits)
        assert torch.equal(torch.cat(logits), torch.cat(whole))
        assert len(failing.failures) == count
        # Training takes more memory than evaluation, which so tells nothing of it.
        failing.short = nothing
        largest = list[int]()
        run_layer = model.split.run_layer
        model.split.run_layer = lambda index, weights, call, hidden, **options: (
            largest.append(len(hidden)) or run_layer(index, weights, call, hidden, **options)
        )
        trainer.train_step(wide_batch())
        assert max(largest) == 6


@pytest.mark.slow
def test_a_loss_outside_the_trainer_is_helped_and_said_as_well(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    with opened(checkpoint_of("llama"), tmp_path) as model, device(model, nothing) as failing:
        torch.manual_seed(DRAWS)
        expected = model.adapter.loss([wide_batch()])
        failing.short = at("forward", model, slots=3)
        torch.manual_seed(DRAWS)
        with pytest.warns(UserWarning, match="3 layer slots instead of 4"):
            found = model.adapter.loss([wide_batch()])
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_where_processes_share_weights_nothing_is_begun_again(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(checkpoint_of("llama"), tmp_path) as model, device(model, nothing) as failing:
        trainer = model.get_trainer()
        monkeypatch.setattr(type(model.memory), "sharded", True)
        for point in ("forward", "backward"):
            failing.short = at(point, model, slots=1)
            failing.failures.clear()
            with pytest.raises(
                MemoryLimitError, match="with shard_weights a process cannot try again alone"
            ):
                trainer.train_step(wide_batch())
            assert len(failing.failures) == 1
            assert model.memory.num_slots == SLOTS


@pytest.mark.slow
def test_an_optimizer_that_runs_out_of_memory_is_refused(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    class Short(torch.optim.SGD):
        def step(self, *_: Any) -> None:
            raise torch.OutOfMemoryError(FULL)

    with opened(checkpoint_of("llama"), tmp_path) as model:
        trainer = model.get_trainer(Short(model.get_trainable_parameters(), lr=0.1))
        with pytest.raises(MemoryLimitError) as caught:
            trainer.train_step(wide_batch())
    assert caught.value.where == "in the optimizer's step"
    assert caught.value.how


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small"))


@pytest.mark.slow
def test_a_run_from_the_command_line_goes_on(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_layer = Split.run_layer
    failures = 0

    def fail(
        self: Split, index: int, weights: Any, call: Any, hidden: Tensor, **options: Any
    ) -> Tensor:
        nonlocal failures
        made = run_layer(self, index, weights, call, hidden, **options)
        if index == 3 and len(hidden) > 2:
            failures += 1
            raise torch.OutOfMemoryError(FULL)
        return made

    monkeypatch.setattr(Split, "run_layer", fail)
    with pytest.warns(UserWarning, match="micro_batch_size: 2"):
        assert lema("train", config_writer(small, tmp_path)(max_steps=3)) == 0
    assert failures == 3  # with three slots, two, one
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_run_from_the_command_line_that_fits_nowhere_ends_with_4_and_the_plan_s_advice(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(
        self: Split, index: int, weights: Any, call: Any, hidden: Tensor, **options: Any
    ) -> Tensor:
        if isinstance(hidden, FakeTensor):  # by which the plan counts
            return run_layer(self, index, weights, call, hidden, **options)
        raise torch.OutOfMemoryError(FULL)

    run_layer = Split.run_layer

    monkeypatch.setattr(Split, "run_layer", fail)
    assert lema("train", config_writer(small, tmp_path)(gradient_checkpointing=False)) == 4
    _, err = capfd.readouterr()
    assert "Traceback" not in err
    assert re.search(r"fix: .*gradient_checkpointing: true \([\d.]+ .?B less\)", err)
    assert "at the peak" in err


def test_a_model_too_large_to_open_ends_with_4_as_well(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> nn.Module:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr("lema.train.opened.outer.load_outside", fail)
    assert lema("train", config_writer(small, tmp_path)()) == 4
    assert "device" in capfd.readouterr().err
