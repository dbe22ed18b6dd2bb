"""What the settings leave open is planned to fit, on any machine, and changes no number of a
step.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import assert_refused, config_writer, lema
from hollowmodel import large_config, write_hollow
from parity import Outcome, assert_same, draw_b
from publishedclass import publish
from smallrun import write_model
from tiny import write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from lema import LemaConfig, LemaModel
from lema.errors import MemoryLimitError
from lema.plan import Allocation
from lema.plan.cost import Speeds
from lema.plan.machine import profile
from lema.plan.plan import plan_with
from lema.plan.planner import Planner, planner_of
from lema.plan.work.workload import layer_work
from lema.stream.stream import LayerStream

ROWS = 8
LENGTH = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    return write_model(place / "model", num_hidden_layers=8, hidden_size=128, intermediate_size=352)


def two_lines(model: Path, **changes: Any) -> LemaConfig:
    """A run of which little is said."""
    return LemaConfig(
        str(model), device="cpu", **{"batch_size": ROWS, "max_length": LENGTH, **changes}
    )


def on(model: Path, device_memory: int, **changes: Any) -> Planner:
    """Plan on a machine with a device of so many bytes."""
    return planner_of(
        two_lines(model, **changes), replace(profile("t4"), device_memory=device_memory)
    )


def taken(planner: Planner) -> tuple[int, Allocation]:
    needs = planner.needs()
    return sum(needs.device.values()), needs.allocation


def test_the_less_memory_there_is_the_more_is_recomputed_and_then_fewer_rows_at_once(
    model: Path,
) -> None:
    ample, all_kept = taken(on(model, 10**9))
    assert (all_kept.recompute, all_kept.saved_on) == (False, "device")
    for part in (0.5, 0.25):
        planner = on(model, int(part * ample))
        used, allocation = taken(planner)
        assert used <= 0.9 * part * ample
        assert allocation.recompute or allocation.saved_on == "host"
    assert planner.shape.micro_batch.rows < planner.shape.num_rows == ROWS
    with pytest.raises(MemoryLimitError, match="layer slots") as caught:
        on(model, 1_000_000).needs()
    assert caught.value.exit_code == 4 and "free device memory, 1.0 MB" in caught.value.where


@pytest.mark.parametrize("settings", [{"strategy": "resident"}, {"host_memory": 10**9}])
def test_layers_in_host_memory_take_of_what_is_free_where_the_device_computes_there(
    model: Path, settings: dict[str, Any]
) -> None:
    machine = replace(profile("t4"), speeds=Speeds(1e6))
    assert machine.shared
    rest = 30_000_000
    weights = 8 * 800_000
    for free in (rest, rest + weights):
        planner = planner_of(
            two_lines(model, **settings), replace(machine, device_memory=free, host_memory=free)
        )
        needs = planner.needs()
        assert sum(needs.device.values()) + sum(needs.host.values()) <= free
        assert needs.host["cached"] > weights / 2


def test_what_is_set_is_not_chosen(model: Path) -> None:
    kept = on(model, 10**9, gradient_checkpointing=True, micro_batch_size=2, prefetch_depth=1)
    assert kept.shape.micro_batch.rows == 2
    _, allocation = taken(kept)
    assert allocation.recompute and not allocation.saved and allocation.slots == 2
    with pytest.raises(MemoryLimitError):
        on(model, 26_000_000, gradient_checkpointing=False, micro_batch_size=ROWS).needs()


def test_no_layer_is_looked_at_twice_with_the_same_rows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[int, ...]] = []

    def look(split: Any, index: int, stored: Any, call: Any, states: Any, trained: Any) -> Any:
        looked.append((index, *states[0].shape))
        return layer_work(split, index, stored, call, states, trained)

    monkeypatch.setattr("lema.plan.work.workload.layer_work", look)
    planner = on(model, 26_000_000, loss_chunk_tokens=16)
    assert plan_with(planner).room.largest_micro_batch >= planner.shape.micro_batch.rows
    assert len(looked) > 2 and sorted(set(looked)) == sorted(looked)


def test_auto_may_be_written_where_none_means_it(model: Path) -> None:
    names = ("micro_batch_size", "prefetch_depth", "loss_chunk_tokens")
    assert two_lines(model, **dict.fromkeys(names, "auto")) == two_lines(model)


# Many words, so that it is logits that memory runs out of. A step of the run is 512 tokens.
WORDS = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        **WORDS, num_key_value_heads=2, vocab_size=8192, max_position_embeddings=2048
    )
    return write_hollow(tmp_path_factory.mktemp("words") / "model", config)


def test_rows_are_computed_together_where_fewer_logits_make_room(words: Path) -> None:
    """Micro-batches of fewer rows would fit as well, and hand each layer to the device more
    often.
    """
    chosen = on(words, 30_000_000)
    by_hand = on(words, 30_000_000, micro_batch_size=ROWS // 4)
    assert (chosen.shape.micro_batch.rows, chosen.config.loss_chunk_tokens) == (ROWS, 64)
    taken = chosen.needs().seconds
    otherwise = by_hand.needs().seconds
    assert taken is not None and otherwise is not None and taken < 0.3 * otherwise


def test_fewer_logits_make_room_for_what_makes_a_step_faster(words: Path) -> None:
    """All of them fit, and there are no fewer rows that compute as fast: 512 tokens are all that
    a step has.
    """
    machine = replace(profile("t4"), device_memory=68_000_000, launch=0.0)
    settings = {"activation_offloading": False}
    by_hand = planner_of(
        two_lines(words, micro_batch_size=ROWS, loss_chunk_tokens=1024, **settings), machine
    )
    chosen = planner_of(two_lines(words, **settings), machine)
    assert (chosen.shape.micro_batch.rows, chosen.config.loss_chunk_tokens) == (ROWS, 256)
    taken = chosen.needs().seconds
    otherwise = by_hand.needs().seconds
    assert taken is not None and otherwise is not None and taken < 0.95 * otherwise


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_that_is_tied_is_counted_once(tied: bool, tmp_path: Path) -> None:
    checkpoint = write_checkpoint("llama", tmp_path, tied=tied)
    planner = planner_of(LemaConfig(str(checkpoint.streamed), device="cpu"), profile("t4"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint.published)
    assert planner.blueprint.parameters == model.num_parameters()


@pytest.mark.slow
def test_eight_billion_parameters_on_a_card_of_24_gigabytes(tmp_path: Path) -> None:
    eight = write_hollow(tmp_path / "8B", large_config("8B"))
    planner = planner_of(LemaConfig(str(eight), device="cpu"), profile("4090"))
    used, allocation = taken(planner)
    assert used < 24 * 2**30 and allocation.residents


@pytest.mark.exhaustive  # the head is tried in pieces, of which there are many
def test_eight_billion_parameters_with_every_graph_kept_are_refused(tmp_path: Path) -> None:
    eight = write_hollow(tmp_path / "8B", large_config("8B"))
    forced = LemaConfig(str(eight), device="cpu", gradient_checkpointing=False, micro_batch_size=8)
    with pytest.raises(MemoryLimitError, match="device memory cannot hold"):
        planner_of(forced, profile("4090")).needs()


# Runs


def batch() -> dict[str, Tensor]:
    ids = torch.randint(1, 290, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def step(config: LemaConfig) -> tuple[Allocation, LemaConfig, Outcome]:
    with closing(LemaModel(config)) as opened:
        opened.initialize_lora()
        opened.skeleton.train()
        draw_b(opened.skeleton)
        loss = opened.adapter.loss([batch()])
        loss.backward()
        return opened.allocation, opened.config, Outcome.of(opened.skeleton, loss)


def test_a_run_recomputes_what_memory_asks_for_and_its_numbers_stay(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything, _, kept = step(two_lines(model))
    # the system's cache holds the files
    assert not everything.recompute and not everything.residents
    # 50 MB would keep everything
    monkeypatch.setattr("lema.plan.machine.memory_available", lambda: 24_000_000)
    tight, config, outcome = step(two_lines(model))
    assert tight.recompute and len(tight.saved) < 7 and config.micro_batch_size is None
    assert_same(outcome, kept)
    assert config.gradient_checkpointing == "auto"  # the next machine may have more


def test_a_run_that_does_not_fit_ends_before_layers_or_data_are_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("layers were to be read")

    monkeypatch.setattr(LayerStream, "__init__", opened)
    write = config_writer(model, tmp_path)
    config = write(train_data=str(tmp_path / "nowhere.jsonl"), gradient_checkpointing="auto")
    assert_refused(
        capfd, 4, ["device memory", "at least"], "train", config, "--device-memory", "100KB"
    )
    monkeypatch.setattr("lema.plan.machine.memory_available", lambda: 1_000_000)
    assert_refused(capfd, 4, ["free device memory", "at least"], "train", config)


def test_training_begins_with_a_sentence_of_its_plan_or_all_of_it(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_writer(model, tmp_path)(save_steps=0, gradient_checkpointing="auto")
    assert lema("train", config) == 0
    (verdict,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("plan: ")]
    assert verdict.startswith("plan: fits in ") and "rows at once" in verdict
    changes = ("--device-memory", "12MB", "--output-dir", tmp_path / "again")
    assert lema("train", config, *changes) == 0
    (verdict,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("plan: ")]
    assert "of 12.0 MB of device memory" in verdict and "limited by " in verdict
    assert (
        lema(
            "train",
            config,
            "--verbose",
            "--device-memory",
            "12MB",
            "--output-dir",
            tmp_path / "third",
        )
        == 0
    )
    out = capfd.readouterr().out
    assert "layers not recomputed" in out and "plan: " not in out


def test_a_run_goes_on_with_the_rows_at_once_that_it_began_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = config_writer(model, tmp_path)
    begun = write(
        save_steps=1, max_steps=1, gradient_checkpointing="auto", loss_chunk_tokens=32, batch_size=8
    )
    assert lema("train", begun, "--micro-batch-size", "2") == 0
    seen = []
    chosen = LemaModel.initialize_lora
    monkeypatch.setattr(
        LemaModel, "initialize_lora", lambda self: (seen.append(self.config), chosen(self))[1]
    )
    assert (
        lema(
            "train",
            write(save_steps=1, max_steps=2, gradient_checkpointing="auto", batch_size=8),
            "--resume",
        )
        == 0
    )
    assert (seen[0].micro_batch_size, seen[0].loss_chunk_tokens) == (2, 32)


@pytest.mark.filterwarnings("ignore:.*tensors on disk are not used")  # towers
@pytest.mark.parametrize("model_type", ["dots3_note", "gemma4_text"])
def test_memory_is_chosen_for_a_model_whose_layers_have_settings_of_their_own(
    model_type: str, tmp_path: Path
) -> None:
    config = two_lines(publish(model_type, tmp_path / "model"), max_length=16)
    with closing(LemaModel(config)) as opened:
        opened.initialize_lora()
        assert opened.allocation.slots >= 2
