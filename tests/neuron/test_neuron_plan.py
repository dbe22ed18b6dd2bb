"""A plan for processes that hold the model together: each one's part, told by one process that
is alone.
"""

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dividedwork import SHAPE
from hollowmodel import write_hollow
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from lema import LemaConfig, LemaModel
from lema.backend import Exchange
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.errors import ConfigError
from lema.plan import Allocation
from lema.plan.allocate import allocated
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.cost import Demand, LayerCost, Speeds
from lema.plan.machine import profile
from lema.plan.memory import device_parts
from lema.plan.planner import planner_of
from lema.plan.work.step import by_arithmetic
from lema_neuron.divide import Division
from lema_neuron.standin import StandIn
from lema_neuron.vocabulary import words_of
from lema_neuron.watch import Watch

GB = 10**9
WIDE = {**SHAPE, "hidden_size": 512, "intermediate_size": 1408, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hollow(
        tmp_path_factory.mktemp("hollow") / "model", LlamaConfig(**WIDE), torch.bfloat16
    )


def planned(base: Path, **settings: Any) -> tuple[dict[str, int], Allocation, Blueprint]:
    """What a core has in its memory, by part."""
    device = {"device": "neuron", "max_length": 64, "batch_size": 4, "gradient_checkpointing": True}
    planner = planner_of(LemaConfig(str(base), **{**device, **settings}), profile("trn1"))
    demand = planner.demand()
    allocation = planner.allocation(demand)
    return device_parts(demand, allocation), allocation, planner.blueprint


def weights(parts: dict[str, int]) -> int:
    return parts["slots"] + parts["residents"]


@pytest.mark.slow
def test_a_core_holds_its_part_of_the_layers_and_of_the_words(base: Path) -> None:
    (one, _, whole), (four, _, part) = planned(base), planned(base, tensor_parallel_size=4)
    hidden = 512
    inner = 1408
    kv = 2 * 64
    # bytes of what each of four has a quarter of
    cut = 2 * 8 * (2 * hidden * hidden + 3 * hidden * inner)
    keys = 2 * 8 * 2 * kv * hidden  # and of what has two heads: half, in one copy of two
    norms = weights(one) - cut - keys
    assert 0 < norms < 0.01 * cut
    assert weights(four) == pytest.approx(cut / 4 + keys / 2 + norms, rel=0.02)
    words = 2 * hidden * 2
    norm = 2 * hidden
    pages = 6 * 4096  # bytes of a word in embeddings and head; two of a tensor
    assert 0 <= one["outside"] - (SHAPE["vocab_size"] * words + norm) < pages
    assert 0 <= four["outside"] - (-(-SHAPE["vocab_size"] // 4) * words + norm) < pages
    assert four["adapters"] < 0.7 * one["adapters"]
    assert (part.adapter_parameters, part.stored_bytes) == (
        whole.adapter_parameters,
        whole.stored_bytes,
    )


@pytest.mark.parametrize(
    ("settings", "embeddings", "head", "why"),
    [
        ({"lora_target_modules": ["q_proj", "lm_head"]}, 17, 67, "it has an adapter, or trains"),
        ({"lora_modules_to_save": ["embed_tokens"]}, 67, 67, "trains, and is outside the layers"),
        ({"head": "device"}, 17, 67, ""),
        ({"embeddings": "device"}, 67, 17, ""),
        ({"embeddings": "disk"}, 0, 17, ""),
    ],
    ids=["adapted", "trained", "head", "table", "rows"],
)
def test_what_trains_is_adapted_or_asked_for_is_whole_on_every_core(
    base: Path, settings: dict[str, Any], embeddings: int, head: int, why: str
) -> None:
    blueprint = draw_up(
        LemaConfig(str(base), device="neuron", **settings), parallel=Division(StandIn(0, 4))
    )
    words = 512 * 2
    pages = 3 * 4096
    assert 0 <= blueprint.outside_bytes - ((embeddings + head) * words + words) < pages
    assert why in "".join(blueprint.head.notes) and bool(why) == bool(blueprint.head.notes)
    ends = blueprint.model.get_input_embeddings(), blueprint.model.get_output_embeddings()
    assert [words_of(one) is not None for one in ends] == [embeddings == 17, head == 17]


@pytest.mark.slow
def test_what_waits_between_layers_is_divided_where_tokens_are(base: Path) -> None:
    whole, shared = (
        planned(base, tensor_parallel_size=4, sequence_parallel=one)[0] for one in (False, True)
    )
    assert shared["boundaries"] <= whole["boundaries"] / 3.9
    assert weights(shared) == weights(whole)


@pytest.mark.slow
def test_layers_stay_on_the_device_unasked_as_far_as_its_memory_goes(base: Path) -> None:
    _, allocation, _ = planned(base, tensor_parallel_size=2)
    assert len(allocation.residents) + allocation.slots == 8
    _, allocation, _ = planned(base, tensor_parallel_size=2, device_memory="30MB")
    assert len(allocation.residents) + allocation.slots < 8


@pytest.mark.parametrize("sequence", [False, True], ids=["tokens", "sequence"])
@pytest.mark.parametrize("size", [2, 4])
def test_what_a_layer_its_words_and_its_gradients_exchange_is_what_rings_send(
    base: Path, size: int, sequence: bool
) -> None:
    settings: dict[str, Any] = {
        "max_length": 64,
        "batch_size": 4,
        "lora_rank": 4,
        "gradient_checkpointing": True,
    }
    settings |= {"tensor_parallel_size": size, "sequence_parallel": sequence}
    config = LemaConfig(
        str(base), device="neuron", lora_target_modules=["q_proj", "down_proj"], **settings
    )
    planner = planner_of(config, profile("trn1"))
    work = planner.workload
    tokens = 4 * 64
    hidden = 512
    assert work is not None and planner.timings is not None
    state = tokens * hidden
    # A ring of T processes sends of n bytes (T - 1) / T n to scatter a sum, as many to gather, and
    # both in a sum. Layers are in bfloat16. Of a block, the output is summed in fp32; of
    # down_proj's adapter, what A makes.
    ring = (size - 1) / size
    ends = 2 * state * 4
    entries = 2 * state * 2
    inner = tokens * 4 * 4
    forward, again, backward = work.works[0].exchanges
    if sequence:
        assert forward == again == backward == Exchange(5, int(ring * (ends + entries + inner)))
    else:
        assert forward == again == Exchange(3, int(2 * ring * (ends + inner)))
        assert backward == Exchange(2, int(2 * ring * entries))
    words = int(2 * ring * state * 2)
    statistics = (size - 1) * tokens * 3 * 4
    assert work.entered == Exchange(1, words)
    assert work.head.exchange == Exchange(
        2 + sequence, words + statistics + int(ring * state * 2) * sequence
    )
    # A of q_proj, [4, hidden]; B of down_proj has seen its tokens alone
    factors = 4 * hidden * (1 + sequence)
    assert work.works[0].reduced == Exchange(1, int(2 * ring * factors * 4))
    # In the seconds each collective counts.
    machine = planner.machine_state.machine
    silent = by_arithmetic(
        work, planner.blueprint.layers, replace(machine, exchange=math.inf, latency=0.0), 2
    )
    waits = [
        each.nbytes / machine.exchange + each.count * machine.latency
        for each in (forward, again, backward)
    ]
    (alone,), (layer,) = silent.layers, planner.timings.layers
    found = (
        layer.forward - alone.forward,
        layer.recompute - alone.recompute,
        layer.backward - alone.backward,
    )
    assert found == pytest.approx(waits) and min(waits) > 1e-4
    assert planner.timings.head - silent.head == pytest.approx(
        machine.exchanging(work.head.exchange)
    )
    assert planner.timings.prelude == machine.exchanging(work.entered) > silent.prelude == 0
    assert planner.timings.optimizer == pytest.approx(
        machine.latency + 8 * (2 * ring * factors * 4) / machine.exchange
    )


@pytest.mark.parametrize("sequence", [False, True], ids=["tokens", "sequence"])
def test_a_layer_that_is_another_than_those_below_is_planned_where_it_is_the_last(
    base: Path, sequence: bool
) -> None:
    settings = {
        "tensor_parallel_size": 2,
        "sequence_parallel": sequence,
        "lora_layers_to_transform": [7],
    }
    config = LemaConfig(str(base), device="neuron", max_length=16, batch_size=2, **settings)
    assert planner_of(config, profile("trn1")).workload.kinds == (0,) * 7 + (1,)  # type: ignore[union-attr]


LAYERS = Demand(tuple(LayerCost(GB, GB, GB) for _ in range(20)), outside_bytes=GB)


@pytest.mark.parametrize(
    ("kept", "changes", "stay"),
    [
        (0.0, {"device_memory": None}, 0),
        (0.0, {}, 10),  # nine tenths of what is free
        (0.75, {}, 8),  # of 16 GB 12, less one outside and three slots
        (0.75, {"device_memory": "6GB"}, 2),  # what is asked for counts
        (0.2, {}, 0),  # not even streaming fits: it is tried all the same
    ],
)
def test_unasked_only_so_much_of_the_device_is_filled(
    kept: float, changes: dict[str, Any], stay: int
) -> None:
    config = LemaConfig("model", device="cpu", gradient_checkpointing=True, **changes)
    found = allocated(
        config, LAYERS, Speeds(1.0, 10.0), 16 * GB, 64 * GB, 64 * GB, resident_fraction=kept
    )
    assert (len(found.residents), found.slots, found.saved, found.boundaries) == (
        stay,
        3,
        frozenset(),
        "device",
    )


def test_where_the_device_is_the_host_its_processes_share_what_is_free() -> None:
    config = LemaConfig("model", device="cpu", gradient_checkpointing=True)
    shared = Demand(LAYERS.layers, outside_bytes=GB, shared=True, processes=2)
    found = allocated(
        config, shared, Speeds(1.0), 64 * GB, 64 * GB, 32 * GB, resident_fraction=0.75
    )
    assert len(found.residents) == 8


def test_more_processes_than_one_machine_has_do_not_share_its_memory(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(config: LemaConfig, demand: Demand, *rest: Any, **options: Any) -> Any:
        seen.append(demand.processes)
        return allocated(config, demand, *rest, **options)

    monkeypatch.setattr("lema.plan.needs.allocated", look)
    config = LemaConfig(str(base), device="cpu")
    for local in ("4", "2"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with closing(LemaModel(config)) as model:
            backend = Beside(model.backend, 4)
            planner = model.opened
            blueprint = replace(planner.blueprint, parallel=backend.parallel)
            replace(planner, blueprint=blueprint, backend=backend).needs()  # type: ignore[arg-type]
    assert seen == [4, 2]


class Beside:
    """A backend as one of several processes that hold the model together sees it."""

    def __init__(self, backend: Any, size: int) -> None:
        self._backend = backend
        self.parallel = StandIn(0, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_a_number_of_processes_that_does_not_divide_the_model_is_refused_by_the_plan(
    base: Path,
) -> None:
    with pytest.raises(ConfigError, match="q_proj"):
        planned(base, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="whole layers"):
        planned(base, tensor_parallel_size=2, device="cpu")


@pytest.mark.slow
def test_this_machine_is_measured_for_one_of_several_processes(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    settings = {
        "device": "neuron",
        "neuron_runtime": "emulated",
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
    }
    settings |= {
        "model_name_or_path": str(base),
        "max_length": 32,
        "pad_to_multiple_of": 16,
        "batch_size": 2,
    }
    file.write_text(json.dumps(settings))
    assert run(app, ["plan", str(file), "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["measured"] and plan["micro_batch"]["length"] == 32
    assert plan["step"]["seconds"] > 0


def test_collectives_of_a_plan_have_the_shapes_of_the_groups() -> None:
    alone = StandIn(1, 4)
    one = torch.arange(24.0).view(2, 12)
    assert torch.equal(alone.all_reduce(one), one) and alone.all_reduce(one) is not one
    assert alone.all_gather(one, 1).shape == (2, 48)
    assert torch.equal(alone.reduce_scatter(one, 1), one[:, 3:6])
    assert torch.equal(alone.broadcast(one, 2), one)
    part = alone.split([[0, 2], [1, 3]])
    assert (part.rank, part.size) == (0, 2)


class Deaf:
    """A group in which nobody answers."""

    rank = 0
    size = 2

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} reached the others")


def test_what_has_no_values_goes_to_no_other_process() -> None:
    watch = Watch()
    watched = watch.around(Deaf())
    with FakeTensorMode():
        fake = torch.ones(2, 4)
    for one in (fake, torch.ones(2, 4, device="meta")):
        assert watched.all_reduce(one).shape == (2, 4)
        assert watched.all_gather(one, 0).shape == (4, 4)
        assert watched.reduce_scatter(one, 1).shape == (2, 2)
    with pytest.raises(AssertionError, match="reached the others"):
        watched.all_reduce(torch.ones(2, 4))
    watch.close()
