"""The lazy runtime: one transfer for each upload, a cut where a lease ends, the same groups on
every rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from smallrun import adapter_of, batch, settings, write_model
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig
from xladoubles import SEED, FakeXla

import lema_neuron.backend as neuron
from lema import LemaModel
from lema.backend import Backend, BackendOptions
from lema.backend.torchrun import Joined
from lema.errors import BackendUnavailable, ConfigError
from lema.stream.placement import PAGE, ByteRun, LayerBytes, SlotTensor, extent, in_slot, views
from lema.stream.slotlayout import identity_layout
from lema.testing import BackendContract
from lema_neuron.compiles import Compiles
from lema_neuron.probe import Found, choose_runtime
from lema_neuron.runtimes import lazy, runtime_named
from lema_neuron.runtimes.lazybits import change_of_sizes, viewer

TENSOR = [[0, 1, 2, 3], [4, 5, 6, 7]]
DATA = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> FakeXla:
    monkeypatch.setattr(neuron, "choose_runtime", lambda asked, found: "xla")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return FakeXla(monkeypatch)


def opened() -> neuron.NeuronBackend:
    return neuron.NeuronBackend(options=BackendOptions(settings={"neuron_runtime": "xla"}))


class TestContract(BackendContract):
    """All that is promised of a backend, to the last bit: what is lazy about it is that graphs
    are cut.
    """

    @pytest.fixture(autouse=True)
    def fake(self, xla: FakeXla) -> None:
        """Let the CPU stand for the device, its generator too."""
        xla.drawn = {}

    def backend(self) -> Backend:
        return opened()

    def model_config(self) -> PreTrainedConfig:
        sizes: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
        }
        return LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=8)


@pytest.mark.slow
def test_a_graph_is_cut_where_a_lease_ends_and_nowhere_else(xla: FakeXla, tmp_path: Path) -> None:
    llama = write_model(tmp_path / "model")
    config = settings(
        llama, tmp_path / "out", prefetch_depth=1, gradient_checkpointing=True, save_steps=0
    )
    model = LemaModel(config, backend=opened())
    model.initialize_lora()
    trainer = model.get_trainer()
    for _ in range(2):
        before = model.memory.counters
        xla.log[:] = []
        trainer.train_step(batch(1))
        after = model.memory.counters
        leases = after.leases - before.leases
        layers = model.split.num_layers
        assert leases == 2 * layers - 1  # the top layer's lease is held while it turns
        # Where a lease begins and where it ends, where the micro-batches' tensors come, and where
        # the step ends.
        assert xla.log.count("sync") == 2 * leases + 2
        uploaded = xla.log.count("upload") - 1  # the micro-batches' tensors, in one
        assert uploaded <= leases  # one transfer each, but for layers that were still there
        runs = "".join(word[0] for word in xla.log).split("s")
        assert all(run.count("u") <= 3 for run in runs), (
            "layers were uploaded in pieces, or leases not cut"
        )
    found = adapter_of(model.skeleton)
    model.close()
    plain = LemaModel(config)
    plain.initialize_lora()
    trainer = plain.get_trainer()
    for _ in range(2):
        trainer.train_step(batch(1))
    assert all(
        torch.equal(found[name], value) for name, value in adapter_of(plain.skeleton).items()
    )
    plain.close()


def joined(size: int, parts: int) -> Joined:
    replicas: Any = SimpleNamespace(size=size // parts, num_processes=size, rank=0)
    return Joined(replicas, None, lambda: None)


def test_every_rank_names_the_same_groups_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "_num_processes", lambda: 8)
    for rank in range(8):
        fake = FakeXla(monkeypatch, rank, 8)
        comm = lazy.RUNTIME.comm(joined(8, 4))
        assert (comm.rank, comm.size) == (rank % 4, 4)
        comm.all_reduce(torch.ones(2))
        comm.all_gather(torch.ones(4), 0)
        comm.reduce_scatter(torch.ones(4), 0)
        # gradients: over those with the same part only
        lazy.RUNTIME.replicas(joined(8, 4)).sum(torch.ones(2))
        assert [given["groups"] for _, given in fake.xm.calls] == [TENSOR, TENSOR, TENSOR, DATA]
        assert all(given["pin_layout"] is False for _, given in fake.xm.calls)


def test_a_sum_over_replicas_is_in_place_and_one_process_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeXla(monkeypatch)
    monkeypatch.setattr(lazy, "_num_processes", lambda: 2)
    tensor = torch.ones(3)
    lazy.RUNTIME.replicas(joined(2, 1)).sum(tensor)
    assert torch.equal(tensor, torch.full((3,), 2.0))
    fake.xm.calls.clear()
    lazy.RUNTIME.replicas(joined(2, 2)).sum(tensor)
    assert not fake.xm.calls
    alone = joined(1, 1)
    assert lazy.RUNTIME.replicas(alone) is alone.replicas


@pytest.mark.parametrize(
    ("known", "adds_up", "words"),
    [
        (1, True, "process 1 of 1"),
        (4, False, "sum of the numbers from 1 to 4 is 2.0"),
        (4, True, None),
    ],
)
def test_a_runtime_that_does_not_reach_the_others_is_refused(
    known: int, adds_up: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeXla(monkeypatch, 1, known)
    fake.adds_up = adds_up
    monkeypatch.setattr(lazy, "_num_processes", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    if words is None:
        lazy.RUNTIME.open(BackendOptions())
        assert fake.log == ["bits", "sync"]
        return
    with pytest.raises(BackendUnavailable, match=words):
        lazy.RUNTIME.open(BackendOptions())


def test_what_is_prepared_is_added_to_what_the_user_has_set(
    xla: FakeXla, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ["NEURON_CC_FLAGS"] = "--model-type=other -O1"
    os.environ["PJRT_DEVICE"] = "CPU"
    lazy.RUNTIME.prepare()
    assert os.environ["NEURON_CC_FLAGS"].startswith("--model-type=other -O1 ")
    assert os.environ["PJRT_DEVICE"] == "CPU"
    monkeypatch.setitem(sys.modules, "torch_xla.distributed.xla_backend", None)
    with pytest.raises(BackendUnavailable, match="torch_xla cannot be imported"):
        lazy.RUNTIME.prepare()


def test_the_generator_is_seeded_with_torch_and_its_state_is_a_seed(xla: FakeXla) -> None:
    device = opened()
    torch.manual_seed(7)
    device.rng_state()
    assert xla.seed == 7 != SEED
    for seed in (0, 5, (1 << 63) + 5, (1 << 64) - 1):
        xla.seed = seed
        state = device.rng_state()
        xla.seed = 1
        device.set_rng_state(state)
        assert xla.seed == seed
    with pytest.raises(ConfigError, match="16 bytes is not this device's"):
        device.set_rng_state(torch.zeros(16, dtype=torch.uint8))


def test_memory_is_what_the_runtime_says_and_nothing_where_it_does_not(xla: FakeXla) -> None:
    device = opened()
    told = device.memory()
    assert (told.used, told.peak, told.total, told.shared) == (3, 5, 9, False)

    def unimplemented() -> dict[str, int]:
        raise RuntimeError("UNIMPLEMENTED: GetAllocatorStats is not supported")

    xla.memory = unimplemented
    assert device.memory().total == 0


def test_graphs_compiled_after_the_first_steps_are_warned_of() -> None:
    total = 0
    compiles = Compiles(lambda: total)

    def step(graphs: int) -> None:
        nonlocal total
        with compiles.counted():
            total += graphs
        total += 1  # for a number that someone asks for: nothing that a step needs
        compiles.step_ended()

    for graphs in (6, 1, 0):
        step(graphs)
    with pytest.warns(UserWarning, match="step 4 compiled 3 graphs anew"):
        step(3)
    assert compiles.of_steps == [6, 1, 0, 3]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.uint8]
)
def test_bits_under_another_dtype_have_its_shape(dtype: torch.dtype) -> None:
    def operation(
        given: Tensor, *, to: torch.dtype, before: list[int] | None, after: list[int] | None
    ) -> Tensor:
        """As the compiler has it: a last dimension goes where elements are joined."""
        made = (given if before is None else given.reshape(before)).view(to)
        return (
            made.squeeze(-1)
            if before is not None
            else made
            if after is None
            else made.reshape(after)
        )

    view = viewer(operation, {one: one for one in (dtype, torch.uint8)})
    given = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    assert torch.equal(view(given, dtype), given.view(dtype))
    assert torch.equal(view(given.view(dtype), torch.uint8), given)
    assert change_of_sizes([2, 8], 1, 4) == ([2, 2, 4], None) and change_of_sizes([2, 8], 4, 2) == (
        None,
        [2, 16],
    )


def test_layers_that_begin_anywhere_in_a_page_look_the_same_once_moved() -> None:
    def layer(start: int) -> LayerBytes:
        shape = torch.Size((2, 4))
        tensors = tuple(
            SlotTensor(name, start + at, torch.float32, shape) for name, at in (("a", 0), ("b", 32))
        )
        return LayerBytes(tensors, (ByteRun(Path("weights"), start, 64, start),), (), PAGE)

    slot = torch.arange(PAGE // 4, dtype=torch.float32).view(torch.uint8)
    first = layer(128)
    second = layer(512)
    assert extent(first) == (128, 192) and extent(second) == (512, 576)
    from_first, from_second = (
        in_slot(one, identity_layout(*extent(one))) for one in (first, second)
    )
    assert from_first.tensors == from_second.tensors
    for one in (first, second):
        begin, end = extent(one)
        found = views(slot[begin:end], in_slot(one, identity_layout(begin, end)))
        expected = views(slot, one)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_cpu_stands_for_the_device_where_the_user_says_so() -> None:
    found = Found({"torch": "2.9.0", "torch-neuronx": None, "torch-xla": "2.9.0"}, 0)
    told = Found(found.versions, 0, on_cpu=True)
    assert choose_runtime("xla", told) == "xla"
    for asked, one in (
        ("xla", found),
        ("auto", told),
        ("xla", Found({"torch-xla": None}, 0, on_cpu=True)),
    ):
        with pytest.raises(BackendUnavailable):
            choose_runtime(asked, one)


@pytest.mark.slow
def test_nothing_of_it_is_imported_unasked() -> None:
    code = (
        "import sys, lema, lema_neuron.backend, lema_neuron.runtimes.lazy, "
        "lema_neuron.runtimes.native;"
        "print([name for name in sys.modules if name.startswith(('torch_xla', "
        "'torch_neuronx', 'neuronx'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert runtime_named("xla") is lazy.RUNTIME
