"""The frozen layers at the bottom are run once per batch, not once per epoch, and no number
changes.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from asloaded import ORIGINAL, ROPES
from smallrun import adapter_of, opened, run_fit, same, settings, token_rows, write_model
from torch import Tensor
from transformers import TrainerCallback

from lema import LemaConfig
from lema.engine.frozen_prefix import NUM_BUFFERS, PrefixCache
from lema.errors import ConfigError, DiskError
from lema.storage.spillfile import whole_blocks
from lema_cpu import CpuBackend

NUM_LAYERS = 6
LOWEST = 4
# leases of a step: all layers up, and down to the lowest that trains
FULL = 2 * NUM_LAYERS - 1 - LOWEST
SPARED = FULL - LOWEST


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), num_hidden_layers=NUM_LAYERS)


def upper(model: Path, output_dir: Path, **changes: Any) -> LemaConfig:
    """Return settings of a run that adapts the upper layers only."""
    base: dict[str, Any] = {
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_layers_to_transform": list(range(LOWEST, NUM_LAYERS)),
        "shuffle": False,
        "num_train_epochs": 3.0,
        "batch_size": 4,
        "micro_batch_size": 3,
        "lora_dropout": 0.1,
    }
    return settings(model, output_dir, **base | changes)


class Leases(TrainerCallback):
    """Notes how many leases each step took, and which layers were read in it."""

    def __init__(self) -> None:
        self.by_step: list[int] = []
        self.read: list[set[int]] = [set()]

    def watch(self, stream: Any) -> None:
        self.stream = stream
        self.before = stream.counters.leases
        submit = stream._reader.submit

        def noting(layer: Any, *arguments: Any, **options: Any) -> Any:
            self.read[-1].add(
                next(number for number, one in enumerate(stream.layers) if one is layer)
            )
            return submit(layer, *arguments, **options)

        stream._reader.submit = noting

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.by_step.append(self.stream.counters.leases - self.before)
        self.before = self.stream.counters.leases
        self.read.append(set())


def watched(config: LemaConfig, rows: Any) -> tuple[dict[str, Tensor], Leases]:
    leases = Leases()
    with opened(config) as model:
        leases.watch(model.memory)
        model.get_trainer(callbacks=[leases]).fit(rows)
        assert model.adapter.prefix is None
        return adapter_of(model.skeleton), leases


def test_one_layer_at_a_time_is_on_lease(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer, whose weights the model's own code needs once, is given back when it is
    done.
    """
    open_leases = list[set[int]]()
    with opened(upper(llama, tmp_path, cache_frozen_prefix=True)) as model:
        stream = model.memory
        lease = stream.lease

        def counted(layer: int) -> Any:
            open_leases.append({*stream._leases.by_layer} - {layer})
            return lease(layer)

        monkeypatch.setattr(stream, "lease", counted)
        model.get_trainer().fit(token_rows(4))
    assert len(open_leases) > NUM_LAYERS
    assert not any(open_leases)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": False},
        {"boundary_activations": "disk"},
        {"gradient_accumulation_steps": 2},
        {"batch_size": 1, "shuffle": True, "gradient_accumulation_steps": 3},
    ],
    ids=["kept", "disk", "accumulated", "shuffled"],
)
def test_later_epochs_leave_the_layers_below_out_and_the_adapter_is_the_same(
    llama: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    rows = token_rows(9)
    without, all_leases = watched(upper(llama, tmp_path / "without", **changes), rows)
    with_cache, leases = watched(
        upper(llama, tmp_path / "with", cache_frozen_prefix=True, **changes), rows
    )
    assert same(with_cache, without)
    assert set(all_leases.by_step) == {FULL}
    batches = -(-9 // changes.get("batch_size", 4))
    # steps until every batch was seen
    first = -(-batches // changes.get("gradient_accumulation_steps", 1))
    assert leases.by_step == [FULL] * first + [SPARED] * (len(all_leases.by_step) - first)
    assert len(leases.by_step) > first
    # What the first epoch's last step reads ahead is for a step that is spared the lower layers.
    assert all(layer >= LOWEST for read in leases.read[first:] for layer in read)
    assert {layer for read in leases.read[:first] for layer in read} == set(range(NUM_LAYERS))


def test_nothing_is_run_backward_below_the_lowest_adapter(llama: Path, tmp_path: Path) -> None:
    for recompute in (True, False):
        config = upper(
            llama, tmp_path / str(recompute), gradient_checkpointing=recompute, num_train_epochs=1.0
        )
        assert set(watched(config, token_rows(8))[1].by_step) == {FULL}


def test_an_evaluation_in_between_changes_nothing(llama: Path, tmp_path: Path) -> None:
    rows = token_rows(8)
    held_back = token_rows(3, seed=5)
    config = upper(llama, tmp_path / "with", cache_frozen_prefix=True, eval_steps=1)
    _, found = run_fit(config, rows, held_back)
    _, expected = run_fit(upper(llama, tmp_path / "without"), rows)
    assert same(found, expected)


def test_a_batch_that_never_comes_again_is_not_kept(llama: Path, tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    config = upper(
        llama,
        tmp_path / "out",
        cache_frozen_prefix=True,
        num_train_epochs=1.0,
        offload_dir=str(aside),
    )
    run_fit(config, token_rows(8))
    assert not aside.exists()


def test_layers_that_draw_at_random_are_refused(tmp_path: Path) -> None:
    base = write_model(tmp_path / "model", "gpt2", resid_pdrop=0.1)
    changes = {"lora_target_modules": ["c_attn"], "lora_layers_to_transform": [7]}
    config = upper(base, tmp_path / "out", cache_frozen_prefix=True, **changes)
    with pytest.raises(ConfigError, match="use random numbers") as caught:
        run_fit(config, token_rows(8))
    assert caught.value.where == "cache_frozen_prefix"


@pytest.mark.parametrize(
    "changes", [{"lora_layers_to_transform": None}, {"lora_layers_to_transform": [0, 5]}]
)
def test_a_model_that_trains_from_the_bottom_has_nothing_to_spare(
    llama: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = upper(llama, tmp_path / "out", cache_frozen_prefix=True, **changes)
    with pytest.raises(
        ConfigError, match="gradients reach the lowest layer, so there is no layer below it to skip"
    ):
        run_fit(config, token_rows(8))


def test_gradients_that_reach_the_embeddings_are_noticed(llama: Path, tmp_path: Path) -> None:
    config = upper(
        llama, tmp_path / "out", cache_frozen_prefix=True, lora_trainable_token_indices=[3]
    )
    with pytest.raises(ConfigError, match="gradients reach layer 0"):
        run_fit(config, token_rows(8))


def test_batches_that_do_not_repeat_are_refused() -> None:
    with pytest.raises(ConfigError, match="set shuffle: false or batch_size: 1"):
        LemaConfig("model", cache_frozen_prefix=True)


def batch(length: int, seed: int = 0) -> Mapping[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 99, (2, length), generator=draw)
    return {"input_ids": ids, "labels": ids}


def cache(directory: Path, num_tokens: int = 4000) -> PrefixCache:
    return PrefixCache(CpuBackend(), 3, directory, num_tokens)


def test_what_is_fetched_is_what_was_kept_and_labels_make_no_difference(tmp_path: Path) -> None:
    kept = cache(tmp_path)
    batches = [batch(length, seed) for seed, length in enumerate((5, 300, 9, 2, 700, 40, 40, 3))]
    hidden = [torch.randn(2, one["input_ids"].shape[1], 8).transpose(0, 1) for one in batches]
    for one, state in zip(batches, hidden, strict=True):
        assert not kept.holds([one])
        kept.keep([one], [state], [{}], lowest=3, drawn=False, handed_on=False, stateful=False)
    assert kept.holds(batches)
    for _ in range(2):
        found = kept.fetch([{**one, "labels": one["labels"] + 1} for one in batches])
        assert all(torch.equal(state, wanted) for state, wanted in zip(found, hidden, strict=True))
        assert all(
            state.stride() == wanted.stride() for state, wanted in zip(found, hidden, strict=True)
        )
    assert kept._store.staging.allocated_bytes <= NUM_BUFFERS * whole_blocks(
        max(state.nbytes for state in hidden)
    )
    assert not kept.holds([{**batches[0], "attention_mask": torch.ones(2, 5)}])
    assert not kept.holds([batch(5, seed=99)])
    assert not list(tmp_path.iterdir())
    kept.close()


def test_what_modules_before_the_layers_keep_makes_a_difference(tmp_path: Path) -> None:
    kept = cache(tmp_path)
    one = batch(9)
    for table in ({"inv_freq": 1}, {"inv_freq": 2}):
        state = torch.full((2, 9, 8), float(table["inv_freq"]))
        kept.keep([one], [state], [table], lowest=3, drawn=False, handed_on=False, stateful=False)
        assert kept.fits([one], [table])
        assert torch.equal(kept.fetch([one])[0], state)
    assert not kept.fits([one], [{"inv_freq": 1}])
    with pytest.raises(
        ConfigError, match="the layers below the adapters keep something from call to call"
    ):
        kept.keep([one], [state], [table], lowest=3, drawn=False, handed_on=False, stateful=True)
    kept.close()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_table_that_goes_by_longer_rows_is_that_of_the_epoch(
    kind: str, tmp_path: Path
) -> None:
    longest = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    rope = {
        "rope_parameters": {"rope_type": kind, **ROPES[kind]},
        "max_position_embeddings": longest,
    }
    model = write_model(tmp_path / "model", num_hidden_layers=NUM_LAYERS, **rope)
    # The first row comes with its own table in the first epoch, and with the second row's table
    # later.
    rows = [row for length in (20, 40, 12, 30) for row in token_rows(1, length=length)]
    changes = {"batch_size": 1, "micro_batch_size": 1, "lora_dropout": 0.0, "num_train_epochs": 4.0}
    without, _ = watched(upper(model, tmp_path / "without", **changes), rows)
    with_cache, leases = watched(
        upper(model, tmp_path / "with", cache_frozen_prefix=True, **changes), rows
    )
    assert same(with_cache, without)
    assert leases.by_step[:4] == [FULL] * 4
    assert leases.by_step[-4:] == [SPARED] * 4
    if kind == "dynamic":
        assert leases.by_step[4] == FULL


def test_the_space_for_all_batches_is_asked_for_at_the_first(tmp_path: Path) -> None:
    kept = cache(tmp_path, num_tokens=1 << 50)
    with pytest.raises(
        DiskError, match="bytes are needed for the output of frozen layers"
    ) as caught:
        kept.keep(
            [batch(5)],
            [torch.zeros(2, 5, 8)],
            [{}],
            lowest=3,
            drawn=False,
            handed_on=False,
            stateful=False,
        )
    assert "cache_frozen_prefix: false" in caught.value.how
    kept.close()


def test_a_write_that_fails_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    kept = cache(tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    kept.keep(
        [batch(5)],
        [torch.zeros(2, 5, 8)],
        [{}],
        lowest=3,
        drawn=False,
        handed_on=False,
        stateful=False,
    )
    with pytest.raises(DiskError, match="writing failed for the output of frozen layers"):
        kept.fetch([batch(5)])
    kept.close()


def test_more_than_a_hidden_state_cannot_be_kept(tmp_path: Path) -> None:
    kept = cache(tmp_path)
    with pytest.raises(
        ConfigError, match="the layers below the adapters pass on more than the hidden state"
    ):
        kept.keep(
            [batch(5)],
            [torch.zeros(2, 5, 8)],
            [{}],
            lowest=3,
            drawn=False,
            handed_on=True,
            stateful=False,
        )
    kept.close()
