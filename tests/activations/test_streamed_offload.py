"""A streamed model whose graphs wait off the device: every number as without, no weight moved,
nothing left over.
"""

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from latedevice import LateDevice
from parity import ALPHA, RANK, SEED, Outcome, assert_same, draw_b, streamed_model, streamed_step
from smallrun import run_fit, same, settings, token_rows, write_model
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lema import LemaConfig, LemaModel
from lema.activations.pieces import Piece
from lema.activations.protocols import StayReason
from lema.activations.stepstore import SavedGraphs
from lema.backend import Backend
from lema.engine.recompute import Graph
from lema.errors import DiskError
from lema.plan.work.meter import Tally
from lema.stream.ring import DeviceSlot
from lema_cpu import CpuBackend

CheckpointOf = Callable[..., Checkpoint]
OutcomeOf = Callable[..., Outcome]

MODES = [True, "legacy", "disk"]
every_mode = pytest.mark.parametrize("mode", MODES)


@contextmanager
def model_on(
    backend: Backend, checkpoint: Checkpoint, directory: Path, **settings: Any
) -> Iterator[LemaModel]:
    drawn = {"lora_rank": RANK, "lora_alpha": ALPHA, "seed": SEED, "lora_target_parameters": []}
    settings = {"device": "cpu", "device_memory": None, "save_steps": 0} | drawn | settings
    model = LemaModel(
        LemaConfig(str(checkpoint.streamed), offload_dir=directory, **settings), backend=backend
    )
    try:
        model.initialize_lora()
        model.lora_manager.train()
        draw_b(model.lora_manager)
        yield model
    finally:
        model.close()


def graphs_of(model: LemaModel) -> SavedGraphs:
    assert model.adapter.activations.graphs is not None
    return model.adapter.activations.graphs


# The numbers


@pytest.mark.sampled(1)
@every_mode
@pytest.mark.parametrize(("name", "dropout"), [("llama", 0.0), ("mixtral", 0.0), ("gpt2", 0.1)])
def test_a_step_is_the_whole_models_with_its_graphs_away(
    checkpoint_of: CheckpointOf,
    outcome_of: OutcomeOf,
    tmp_path: Path,
    mode: Any,
    name: str,
    dropout: float,
) -> None:
    checkpoint = checkpoint_of(name, False, dropout)
    expected = outcome_of(name, False, dropout, 4, True)
    options = {"lora_dropout": dropout, "activation_offloading": mode}
    with model_on(CpuBackend(poison=True), checkpoint, tmp_path, **options) as model:
        for step in range(1, 4):
            assert_same(streamed_step(model, micro_batches(4, padding=True)), expected)
            graphs = graphs_of(model)
            assert graphs.counters.copies_out >= step * 4 * (NUM_LAYERS - 1)
            assert graphs.live_bytes == 0
        assert not list(tmp_path.iterdir())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", [*MODES, "hidden_states"])
def test_with_recomputation_the_layers_inputs_wait_instead(
    checkpoint_of: CheckpointOf, outcome_of: OutcomeOf, tmp_path: Path, mode: Any
) -> None:
    checkpoint = checkpoint_of("gpt2", False, 0.1)
    expected = outcome_of("gpt2", False, 0.1, 4, True)
    options = {"gradient_checkpointing": True, "lora_dropout": 0.1, "activation_offloading": mode}
    for backend in (CpuBackend(poison=True), LateDevice()):
        with model_on(backend, checkpoint, tmp_path, **options) as model:
            for _ in range(2):
                assert_same(streamed_step(model, micro_batches(4, padding=True)), expected)
            assert model.adapter.activations.graphs is None
            assert model.adapter.activations.arena.tier == ("disk" if mode == "disk" else "host")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [None, 2, 3])
@every_mode
def test_a_step_is_the_whole_models_however_late_copies_come(
    checkpoint_of: CheckpointOf, outcome_of: OutcomeOf, tmp_path: Path, mode: Any, seed: int | None
) -> None:
    expected = outcome_of("llama", False, 0.0, 4, True)
    with model_on(
        LateDevice(seed), checkpoint_of("llama"), tmp_path, activation_offloading=mode
    ) as model:
        for _ in range(3):  # later steps in the memory of the first
            assert_same(streamed_step(model, micro_batches(4, padding=True)), expected)


@pytest.mark.sampled(1)
@every_mode
def test_a_device_that_computes_in_host_memory_is_no_exception(
    checkpoint_of: CheckpointOf, outcome_of: OutcomeOf, tmp_path: Path, mode: Any
) -> None:
    expected = outcome_of("llama", False, 0.0, 4, True)
    with model_on(
        CpuBackend(), checkpoint_of("llama"), tmp_path, activation_offloading=mode
    ) as model:
        if mode == "disk":
            assert model.adapter
        else:
            with pytest.warns(
                UserWarning,
                match="saves no memory on a device that computes in host memory: `disk`",
            ):
                assert model.adapter
        for _ in range(2):
            assert_same(streamed_step(model, micro_batches(4, padding=True)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_run_leaves_the_same_adapter_with_any_mode(tmp_path: Path, recompute: bool) -> None:
    base = write_model(tmp_path / "model")
    rows = token_rows(16)
    options: dict[str, Any] = {
        "gradient_checkpointing": recompute,
        "gradient_accumulation_steps": 2,
        "micro_batch_size": 2,
        "lora_dropout": 0.1,
    }
    expected = run_fit(settings(base, tmp_path / "off", **options), rows, token_rows(3))[1]
    for mode in MODES:
        config = settings(base, tmp_path / str(mode), activation_offloading=mode, **options)
        assert same(run_fit(config, rows, token_rows(3))[1], expected)


@pytest.mark.slow
def test_a_run_goes_on_with_another_mode(tmp_path: Path) -> None:
    base = write_model(tmp_path / "model")
    rows = token_rows(16)
    options: dict[str, Any] = {
        "gradient_checkpointing": False,
        "lora_dropout": 0.1,
        "lr_scheduler_type": "constant",
    }
    expected = run_fit(settings(base, tmp_path / "off", max_steps=4, **options), rows)[1]
    options["save_steps"] = 2
    half = run_fit(
        settings(base, tmp_path / "on", max_steps=2, activation_offloading=True, **options), rows
    )[1]
    config = settings(base, tmp_path / "on", max_steps=4, activation_offloading="disk", **options)
    assert same(run_fit(config, rows, resume=True)[1], expected)
    assert not same(half, expected), "this test cannot tell runs apart"


@pytest.mark.slow
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "unlike"])
def test_compiled_layers_have_their_graphs_away_too(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    # what it makes is bitwise what runs without it
    monkeypatch.setattr("lema.model.layers.compiled.COMPILER", "aot_eager")
    torch.compiler.reset()
    batches = micro_batches(3, lengths=(12, 12, 12) if alike else (12, 9, 14))
    outcomes = []
    for mode in (False, True):
        options = {"torch_compile": True, "activation_offloading": mode}
        with model_on(LateDevice(), checkpoint_of("llama"), tmp_path, **options) as model:
            streamed_step(model, batches)
            outcomes.append(streamed_step(model, batches))
    assert_same(outcomes[1], outcomes[0])
    assert graphs_of(model).tier == "host"
    assert model.split.compiled.compilations >= 1
    torch.compiler.reset()


# What moves


class Watched(LateDevice):
    """Notes the memory of everything that is downloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[int, int]] = []
        self.look: Callable[[Tensor], None] = lambda _: None

    def download(self, source: Tensor, target: Tensor) -> Any:
        self.look(source)
        return super().download(source, target)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_no_byte_of_a_weight_is_moved(
    checkpoint_of: CheckpointOf, tmp_path: Path, name: str
) -> None:
    backend = Watched()
    seen = 0
    with model_on(backend, checkpoint_of(name), tmp_path, activation_offloading=True) as model:
        own = {
            one.untyped_storage()._cdata: name
            for name, one in [*model.skeleton.named_parameters(), *model.skeleton.named_buffers()]
            if not one.is_meta
        }

        def look(source: Tensor) -> None:
            nonlocal seen
            seen += 1
            assert source.untyped_storage()._cdata not in own, own[source.untyped_storage()._cdata]
            for lease in model.memory._leases.by_layer.values():
                start = lease.slot.data_ptr()
                assert not start <= source.data_ptr() < start + len(lease.slot), (
                    "a weight in its slot was moved"
                )

        backend.look = look
        streamed_step(model, micro_batches(3, padding=True))
        assert seen == graphs_of(model).counters.copies_out > 0


def test_casts_of_weights_are_no_activations(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    """Autocast casts adapters in every forward: what they were cast from is there, and they are
    cast again.
    """
    checkpoint = checkpoint_of("llama", dtype="bfloat16")
    batches = micro_batches(3, padding=True)
    outcomes = []
    for mode in (False, True):
        with model_on(LateDevice(), checkpoint, tmp_path, activation_offloading=mode) as model:
            outcomes.append(streamed_step(model, batches))
    assert_same(outcomes[1], outcomes[0])
    kept = graphs_of(model).counters.kept
    moved = graphs_of(model).counters.moved
    targets = len(checkpoint.architecture.targets)
    # of A's and B's, those that a gradient goes through
    assert kept[StayReason.CAST] >= 3 * (NUM_LAYERS - 1) * targets
    assert moved > 0


@pytest.mark.slow
def test_graphs_that_wait_hold_no_slot_and_little_else(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots: list[StorageWeakRef] = []
    lease = DeviceSlot.lease

    def noting(place: DeviceSlot) -> Tensor:
        slots.append(StorageWeakRef((slot := lease(place)).untyped_storage()))
        return slot

    monkeypatch.setattr(DeviceSlot, "lease", noting)
    left = {}
    batches = micro_batches(2, lengths=(60, 60))
    for mode in (False, True):
        with counted(checkpoint_of("llama").streamed, tmp_path, mode, batches) as (model, tally):
            slots.clear()
            loss = model.adapter.loss(batches)
            assert len(slots) >= NUM_LAYERS - 1
            assert all(slot.expired() for slot in slots)
            left[mode] = tally.live
            loss.backward()
    assert left[True] < 0.1 * left[False]


@contextmanager
def counted(
    base: Path, directory: Path, mode: Any, batches: Any
) -> Iterator[tuple[LemaModel, Tally]]:
    """Open a model after two steps; of what is made from there on, what lies in no host buffer
    is counted.
    """
    buffers: list[Tensor] = []

    class Device(CpuBackend):
        def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
            buffers.append(super().host_buffer(nbytes, memory))
            return buffers[-1]

    options = {"lora_rank": 1, "lora_target_modules": ["q_proj"], "gradient_checkpointing": False}
    config = settings(base, directory, activation_offloading=mode, **options)
    with closing(LemaModel(config, backend=Device(poison=True))) as model:
        model.initialize_lora()
        model.lora_manager.train()
        for _ in range(2):  # by then the ring has all its buffers
            streamed_step(model, batches)
        with Tally() as tally:
            tally.leave_out([*model.skeleton.parameters(), *model.skeleton.buffers(), *buffers])
            num_buffers = len(buffers)
            yield model, tally
            assert len(buffers) == num_buffers, "a step takes other buffers than those before it"


@pytest.mark.slow
def test_what_a_step_takes_on_the_device_does_not_grow_with_depth(tmp_path: Path) -> None:
    ids = torch.randint(1, 300, (4, 120), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "labels": ids}] * 2
    peaks = dict[Any, list[int]]()
    for depth in (6, 12):
        base = write_model(tmp_path / f"{depth}", num_hidden_layers=depth)
        for mode in (False, True, "disk"):
            with counted(base, tmp_path / "out", mode, batches) as (model, tally):
                streamed_step(model, batches)
                peaks.setdefault(mode, []).append(tally.peak)
    one = 4 * 120 * 32 * 4  # bytes of a hidden state
    grown = {mode: deep - shallow for mode, (shallow, deep) in peaks.items()}
    assert grown[False] > 6 * 2 * 10 * one
    assert abs(grown[True]) < one
    assert abs(grown["disk"]) < one


def test_an_evaluation_moves_nothing(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    with model_on(
        LateDevice(), checkpoint_of("llama"), tmp_path, activation_offloading=True
    ) as model:
        model.adapter.evaluate(micro_batches(2))
        assert graphs_of(model).counters.seen == 0
        streamed_step(model, micro_batches(2))
        before = graphs_of(model).counters.to_dict()
        model.adapter.evaluate(micro_batches(2))
        assert graphs_of(model).counters.to_dict() == before


def test_in_a_step_the_training_thread_waits_for_no_copy(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    backend = LateDevice()
    with model_on(backend, checkpoint_of("llama"), tmp_path, activation_offloading=True) as model:
        streamed_step(model, micro_batches(4))
        before = backend.synchronized
        backend.queues.waiting_threads.clear()
        for _ in range(3):
            backend.queues.run_all()
            streamed_step(model, micro_batches(4))
        assert backend.synchronized == before
        assert threading.current_thread() not in backend.queues.waiting_threads


def test_copies_of_the_next_graph_begin_while_one_is_differentiated(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every graph but the first, what its backward looks at first is on its way before the
    backward begins.
    """
    late: list[bool] = []
    memory = Piece.memory
    fetch = Piece.fetch

    def asked(piece: Piece) -> Tensor:
        late.append(not piece.here)
        return memory(piece)

    monkeypatch.setattr(Piece, "memory", asked)
    with model_on(
        LateDevice(), checkpoint_of("llama"), tmp_path, activation_offloading=True
    ) as model:
        streamed_step(model, micro_batches(3))
    assert fetch is Piece.fetch
    assert len(late) > 100
    assert not any(late)


# What goes wrong


@pytest.mark.parametrize("mode", [False, *MODES])
def test_a_step_that_is_given_up_is_gone_at_once(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """Operations keep what they made, and autograd's hooks are given that: nothing may hold
    itself.
    """
    graphs: list[weakref.ref[Graph]] = []
    init = Graph.__init__

    def noting(graph: Graph, *arguments: Any, **options: Any) -> None:
        graphs.append(weakref.ref(graph))
        init(graph, *arguments, **options)

    monkeypatch.setattr(Graph, "__init__", noting)
    with model_on(
        CpuBackend(poison=True), checkpoint_of("llama"), tmp_path, activation_offloading=mode
    ) as model:
        gc.disable()  # nothing waits for the collector
        try:
            loss = model.adapter.loss(micro_batches(2))
            assert len([graph for graph in graphs if graph() is not None]) == 2 * (NUM_LAYERS - 1)
            del loss
            assert all(graph() is None for graph in graphs)
        finally:
            gc.enable()


@pytest.mark.slow
@every_mode
def test_two_steps_at_once_and_one_that_is_given_up(
    checkpoint_of: CheckpointOf, outcome_of: OutcomeOf, tmp_path: Path, mode: Any
) -> None:
    expected = outcome_of("llama", False, 0.0, 4, True)
    batches = micro_batches(4, padding=True)
    with model_on(
        LateDevice(), checkpoint_of("llama"), tmp_path, activation_offloading=mode
    ) as model:
        one, other, never = (model.adapter.loss(batches) for _ in range(3))
        assert torch.equal(one, expected.loss)
        waiting = graphs_of(model).live_bytes
        del never
        assert graphs_of(model).live_bytes == pytest.approx(2 / 3 * waiting)
        other.backward()
        model.skeleton.zero_grad()
        torch.manual_seed(11)
        one.backward()
        found = Outcome.of(model.lora_manager, one)
        assert all(
            torch.equal(found.gradients[name], expected.gradients[name])
            for name in expected.gradients
        )
        del one, other
        assert graphs_of(model).live_bytes == 0
        assert_same(streamed_step(model, batches), expected)


def test_a_disk_that_is_full_stops_the_step_and_the_next_is_whole(
    checkpoint_of: CheckpointOf,
    outcome_of: OutcomeOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = outcome_of("llama", False, 0.0, 4, True)
    batches = micro_batches(4, padding=True)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with model_on(
        LateDevice(), checkpoint_of("llama"), tmp_path, activation_offloading="disk"
    ) as model:
        streamed_step(model, batches)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(DiskError, match="writing failed for activations") as caught:
                streamed_step(model, batches)
            assert "gradient_checkpointing: true" in caught.value.how
        del caught
        model.memory.cancel()
        model.skeleton.zero_grad()
        assert_same(streamed_step(model, batches), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["smaller", "spent"])
def test_layers_that_some_memory_was_spent_on_may_have_their_graphs_away(
    checkpoint_of: CheckpointOf, outcome_of: OutcomeOf, tmp_path: Path, name: str
) -> None:
    """Some layers recomputed, the graphs of others kept elsewhere: what an allocation may say,
    an engine does.
    """
    expected = outcome_of("llama", False, 0.0, 4, True)
    batches = micro_batches(4, padding=True)
    spent = {
        "saved": frozenset({2, 3, 7}),
        "saved_on": "host",
        "boundaries": "disk" if name == "spent" else "device",
    }
    options = {"gradient_checkpointing": True, "offload_dir": tmp_path}
    with streamed_model(checkpoint_of("llama"), spent=spent, **options) as model:
        draw_b(model.lora_manager)
        for _ in range(2):
            assert_same(streamed_step(model, batches), expected)
        assert graphs_of(model).counters.copies_out > 0
        assert model.adapter.activations.arena.memory_bytes > 0
