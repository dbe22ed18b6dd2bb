"""A run of phases goes through them in order, and one that was stopped anywhere ends as one that
was not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from phaseruns import (
    FULL,
    HALF,
    LORA,
    ROWS,
    SOURCES,
    STEP,
    Killed,
    assert_same,
    count_writes,
    logged,
    plan_of,
    rows,
    weights,
)
from tiny import NUM_LAYERS, Checkpoint
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.errors import ConfigError
from lema.model.split import Split
from lema.train.metrics import read_metrics
from lema.train.phases.paths import PhasePaths
from lema.train.phases.run import run_phases
from lema.train.phases.stage import mixture_of


def losses(directory: Path, phase: str) -> list[float]:
    return logged(directory, "loss", phase)


@pytest.mark.slow
def test_weights_then_adapters_both_learn(config_of: Callable[..., LemaConfig]) -> None:
    config = config_of(save_steps=0)
    few = {"one": rows(1, 2), "two": rows(2, 2)}  # a step sees them all
    whole = {**FULL, "tokens": 12 * STEP, "learning_rate": 5e-4}
    end = run_phases(config, plan_of(whole, {**LORA, "tokens": 12 * STEP}), few, held_out=few)
    place = Path(config.output_dir)
    assert end == place / "adapters" / "checkpoint-12"
    for phase in ("whole", "adapters"):
        found = losses(place, phase)
        assert len(found) == 12 and found[-1] < 0.9 * found[0]
    recorded = read_metrics(place / "metrics.jsonl")
    assert [row["tokens"] for row in recorded if "loss" in row] == [
        STEP * (n + 1) for n in range(24)
    ]
    assert [row["phase"] for row in recorded if "eval_loss" in row] == ["whole", "adapters"]
    model = LemaModel.from_pretrained(place)  # the adapter is where every run has it
    assert model.config.model_name_or_path == str(place / "whole" / "model")
    model.close()
    base = AutoModelForCausalLM.from_pretrained(place / "whole" / "model")
    assert base.config.num_hidden_layers == NUM_LAYERS


def event(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a line says that does not depend on the clock."""
    keys = (
        "type",
        "event",
        "phase",
        "step",
        "step_in_phase",
        "tokens",
        "num_tokens",
        "loss",
        "eval_loss",
    )
    return tuple(row.get(key) for key in keys)


PLANS = {
    "weights, adapters": [FULL, LORA],
    "weights, weights on, adapters": [
        {**FULL, "tokens": 2 * STEP},
        {**FULL, "tokens": 2 * STEP, "optimizer": "carry", "name": "whole-2"},
        {**LORA, "tokens": 2 * STEP},
    ],
    "adapters, merged, adapters on": [
        {**LORA, "tokens": 2 * STEP, "name": "first"},
        {**LORA, "tokens": 2 * STEP, "merge": True, "name": "second"},
        {**LORA, "tokens": 2 * STEP, "optimizer": "carry", "name": "third"},
    ],
}


# Seventeen is prime to the writes of a step, so that saving, notes and events take turns to be the
# last.
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name",
    [
        name if name == "weights, adapters" else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in PLANS
    ],
)
def test_stopped_after_any_write_it_ends_as_if_it_had_not_been(
    name: str, stride: int, config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(*PLANS[name])
    with monkeypatch.context() as patch:
        writes = count_writes(patch)
        expected = run_phases(config_of("straight"), plan, SOURCES)
        total = writes()
    straight = read_metrics(Path(config_of("straight").output_dir) / "metrics.jsonl")
    for after in range(2, total, stride):
        config = config_of(f"stopped-{after}")
        with monkeypatch.context() as patch:
            count_writes(patch, after)
            with pytest.raises(Killed):
                run_phases(config, plan, SOURCES)
        assert_same(run_phases(config, plan, SOURCES, resume=True), expected)
        found = read_metrics(Path(config.output_dir) / "metrics.jsonl")
        assert [event(row) for row in found] == [event(row) for row in straight]


@pytest.mark.exhaustive
def test_another_micro_batch_size_goes_on_where_the_first_stopped(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    with monkeypatch.context() as patch:
        count_writes(patch, 9)
        with pytest.raises(Killed):
            run_phases(config, plan_of(FULL, LORA), SOURCES)
    end = run_phases(config, plan_of(FULL, LORA, micro_batch_size=1), SOURCES, resume=True)
    expected = run_phases(config_of("straight"), plan_of(FULL, LORA), SOURCES)
    for name, tensor in weights(end).items():
        assert torch.allclose(tensor, weights(expected)[name], atol=1e-3)


@pytest.mark.parametrize("trains", [FULL, LORA], ids=["weights", "adapters"])
def test_rows_of_a_step_are_put_together_by_length_and_cut_to_the_longest_of_a_micro_batch(
    trains: dict[str, Any], config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        name: [short(row, number) for number, row in enumerate(given)]
        for name, given in SOURCES.items()
    }
    plan = plan_of({**trains, "tokens": 2 * STEP})
    shapes: list[tuple[int, ...]] = []
    run_layer = Split.run_layer

    def noted(self: Split, index: int, weights: Any, call: Any, hidden: Any, **options: Any) -> Any:
        if index == NUM_LAYERS - 1:  # which is not recomputed
            shapes.append(tuple(hidden.shape[:2]))
        return run_layer(self, index, weights, call, hidden, **options)

    monkeypatch.setattr(Split, "run_layer", noted)
    run_phases(config_of(save_steps=0), plan, sources)
    mixture = mixture_of(plan, 0, sources)
    expected = list[tuple[int, ...]]()
    for step in range(2):
        drawn = [mixture.sample(index) for index in range(step * ROWS, (step + 1) * ROWS)]
        lengths = sorted(
            (len(sources[one.source][one.row]["input_ids"]) for one in drawn), reverse=True
        )
        expected += [(2, lengths[0]), (2, lengths[2])]
    assert shapes == expected and len(set(shapes)) > 2


def short(row: dict[str, list[int]], number: int) -> dict[str, list[int]]:
    return {name: tokens[: 3 + number % 10] for name, tokens in row.items()}


def test_a_selection_trains_that_and_nothing_else(
    config_of: Callable[..., LemaConfig], checkpoint_of: Callable[..., Checkpoint]
) -> None:
    part = {"trainable": ["q_proj"], "layers": ["last:2", "head"], "tokens": STEP, "mixture": HALF}
    config = config_of()
    plan = plan_of({**part, "learning_rate": 1e-2, "name": "part"})
    run_phases(config, plan, SOURCES)
    before = AutoModelForCausalLM.from_pretrained(checkpoint_of("llama").published).state_dict()
    after = AutoModelForCausalLM.from_pretrained(
        Path(config.output_dir) / "part" / "model"
    ).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    last = {f"model.layers.{NUM_LAYERS - n}.self_attn.q_proj.weight" for n in (1, 2)}
    assert changed == {*last, "model.norm.weight", "lm_head.weight"}


@pytest.mark.slow
def test_what_cannot_be_run_is_refused(config_of: Callable[..., LemaConfig]) -> None:
    config = config_of()
    with pytest.raises(ConfigError, match="no weight of the model"):
        part = {**FULL, "trains": "selection", "trainable": ["nothing"]}
        run_phases(config, plan_of(part), SOURCES)
    with pytest.raises(ConfigError, match="no module of the layers ends with x_proj"):
        part = {**FULL, "trains": "selection", "trainable": ["q_proj", "x_proj"]}
        run_phases(config, plan_of(part), SOURCES, resume=True)
    with pytest.raises(ConfigError, match="cannot stay off the device: they train"):
        run_phases(config_of("host", embeddings="host"), plan_of(FULL), SOURCES)
    with pytest.raises(ConfigError, match="no data set 'three'"):
        run_phases(
            config,
            plan_of({**FULL, "mixture": [{"name": "three", "rate": 1.0}]}),
            SOURCES,
            resume=True,
        )
    run_phases(config, plan_of({**FULL, "tokens": STEP}), SOURCES)
    with pytest.raises(ConfigError, match="has already begun there"):
        run_phases(config, plan_of({**FULL, "tokens": STEP}), SOURCES)
    with pytest.raises(ConfigError, match="another plan"):
        run_phases(
            config,
            plan_of({**FULL, "tokens": 3 * STEP, "learning_rate": 1.0}),
            SOURCES,
            resume=True,
        )


@pytest.mark.slow
def test_a_phase_that_has_ended_may_not_be_another_afterwards(
    config_of: Callable[..., LemaConfig],
) -> None:
    config = config_of(save_total_limit=2)
    run_phases(config, plan_of({**FULL, "tokens": 3 * STEP}), SOURCES)
    place = Path(config.output_dir) / "whole"
    assert [path.name for path in sorted(place.glob("checkpoint-*"))] == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    then = plan_of({**FULL, "tokens": 3 * STEP, "learning_rate": 1e-5}, {**LORA, "tokens": STEP})
    with pytest.raises(ConfigError, match="another plan"):
        run_phases(config, then, SOURCES, resume=True)
    run_phases(
        config,
        plan_of({**FULL, "tokens": 3 * STEP}, {**LORA, "tokens": STEP}),
        SOURCES,
        resume=True,
    )


def test_where_a_phase_begins(tmp_path: Path) -> None:
    places = PhasePaths(tmp_path, plan_of(*PLANS["adapters, merged, adapters on"]))
    assert [places.has_own_base(index) for index in range(3)] == [True, True, False]
    assert [places.leaves_model(index) for index in range(3)] == [True, False, False]
