"""A run of phases goes through them in order, and one that was stopped anywhere ends as one that was not."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import NUM_LAYERS, VOCABULARY, Checkpoint
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel, phases
from lema.errors import ConfigError
from lema.metrics import read_metrics
from lema.phaseplan import PhasePlan
from lema.phases import PhaseRun, run_phases

BLOCK, ROWS = 12, 4
STEP = BLOCK * ROWS


def rows(seed: int, count: int = 12) -> list[dict[str, list[int]]]:
    """Return rows that repeat themselves, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        tokens = torch.randint(3, VOCABULARY, (3,), generator=generator).repeat(4).tolist()
        found.append({"input_ids": tokens, "labels": tokens})
    return found


SOURCES = {"one": rows(1), "two": rows(2)}
HALF = [{"name": "one", "rate": 0.5}, {"name": "two", "rate": 0.5}]
FULL = {"trains": "full", "tokens": 4 * STEP, "mixture": HALF, "learning_rate": 3e-3, "name": "whole"}
LORA = {"trains": "lora", "tokens": 4 * STEP, "mixture": HALF, "learning_rate": 2e-2, "name": "adapters"}


def plan_of(*given: dict[str, Any], **settings: Any) -> PhasePlan:
    return PhasePlan(phases=list(given), batch_size=ROWS, block_size=BLOCK, **{"micro_batch_size": 2, **settings})


@pytest.fixture
def config_of(tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]) -> Callable[..., LemaConfig]:
    def make(name: str = "run", **settings: Any) -> LemaConfig:
        fixed = {"device": "cpu", "gradient_checkpointing": True, "save_steps": 1, "max_grad_norm": 1.0}
        return LemaConfig(str(checkpoint_of("llama").streamed), output_dir=tmp_path / name, **{**fixed, **settings})

    return make


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor in a directory's files."""
    files = sorted(directory.glob("*.safetensors"))
    assert files
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def losses(directory: Path, phase: str) -> list[float]:
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl") if row["phase"] == phase and "loss" in row]


def test_weights_then_adapters_both_learn(config_of: Callable[..., LemaConfig]) -> None:
    config, few = config_of(save_steps=0), {"one": rows(1, 2), "two": rows(2, 2)}  # a step sees them all
    whole = {**FULL, "tokens": 12 * STEP, "learning_rate": 5e-4}
    end = run_phases(config, plan_of(whole, {**LORA, "tokens": 12 * STEP}), few, held_out=few)
    place = Path(config.output_dir)
    assert end == place / "adapters" / "checkpoint-12"
    for phase in ("whole", "adapters"):
        found = losses(place, phase)
        assert len(found) == 12 and found[-1] < 0.9 * found[0]
    recorded = read_metrics(place / "metrics.jsonl")
    assert [row["tokens"] for row in recorded if "tokens" in row] == [STEP * (n + 1) for n in range(24)]
    assert [row["phase"] for row in recorded if "eval_loss" in row] == ["whole", "adapters"]
    model = LemaModel.from_pretrained(place)  # the adapter is where every run has it
    assert model.config.model_name_or_path == str(place / "whole" / "model")
    model.close()
    base = AutoModelForCausalLM.from_pretrained(place / "whole" / "model")
    assert base.config.num_hidden_layers == NUM_LAYERS


class Killed(BaseException):
    """Ends a run where a test says."""


def stopping(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the `after`-th thing that a run writes be its last."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > after:
                raise Killed
            return function(*arguments, **options)

        return call

    for kind in (phases.Weights, phases.Adapters):
        for name in ("save", "save_model"):
            monkeypatch.setattr(kind, name, counted(getattr(kind, name)))


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


@pytest.mark.parametrize("name", PLANS)
def test_stopped_after_any_write_it_ends_as_if_it_had_not_been(
    name: str, config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(*PLANS[name])
    expected = run_phases(config_of("straight"), plan, SOURCES)
    writes = sum(1 for _ in Path(config_of("straight").output_dir).rglob("state.json"))
    for after in range(1, writes + 2):
        config = config_of(f"stopped-{after}")
        with monkeypatch.context() as patch:
            stopping(patch, after)
            with suppress(Killed):
                run_phases(config, plan, SOURCES)
        end = run_phases(config, plan, SOURCES, resume=True)
        assert_same(end, expected)
        for phase in plan.phases:
            straight = losses(Path(config_of("straight").output_dir), str(phase.name))
            assert losses(Path(config.output_dir), str(phase.name)) == straight


def test_another_micro_batch_size_goes_on_where_the_first_stopped(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    with monkeypatch.context() as patch:
        stopping(patch, 2)
        with pytest.raises(Killed):
            run_phases(config, plan_of(FULL, LORA), SOURCES)
    end = run_phases(config, plan_of(FULL, LORA, micro_batch_size=1), SOURCES, resume=True)
    expected = run_phases(config_of("straight"), plan_of(FULL, LORA), SOURCES)
    for name, tensor in weights(end).items():
        assert torch.allclose(tensor, weights(expected)[name], atol=1e-3)


def test_a_selection_trains_that_and_nothing_else(
    config_of: Callable[..., LemaConfig], checkpoint_of: Callable[..., Checkpoint]
) -> None:
    part = {"trainable": ["q_proj"], "layers": ["last:2", "head"], "tokens": STEP, "mixture": HALF}
    config, plan = config_of(), plan_of({**part, "learning_rate": 1e-2, "name": "part"})
    run_phases(config, plan, SOURCES)
    before = AutoModelForCausalLM.from_pretrained(checkpoint_of("llama").published).state_dict()
    after = AutoModelForCausalLM.from_pretrained(Path(config.output_dir) / "part" / "model").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    last = {f"model.layers.{NUM_LAYERS - n}.self_attn.q_proj.weight" for n in (1, 2)}
    assert changed == {*last, "model.norm.weight", "lm_head.weight"}


def test_what_cannot_be_run_is_refused(config_of: Callable[..., LemaConfig]) -> None:
    config = config_of()
    with pytest.raises(ConfigError, match="no weight of the model"):
        part = {**FULL, "trains": "selection", "trainable": ["nothing"]}
        run_phases(config, plan_of(part), SOURCES)
    with pytest.raises(ConfigError, match="no module of the layers ends with x_proj"):
        part = {**FULL, "trains": "selection", "trainable": ["q_proj", "x_proj"]}
        run_phases(config, plan_of(part), SOURCES, resume=True)
    with pytest.raises(ConfigError, match="not on the device"):
        run_phases(config_of("host", host_embeddings=True), plan_of(FULL), SOURCES)
    with pytest.raises(ConfigError, match="no data set 'three'"):
        run_phases(config, plan_of({**FULL, "mixture": [{"name": "three", "rate": 1.0}]}), SOURCES, resume=True)
    run_phases(config, plan_of({**FULL, "tokens": STEP}), SOURCES)
    with pytest.raises(ConfigError, match="has been begun there"):
        run_phases(config, plan_of({**FULL, "tokens": STEP}), SOURCES)
    with pytest.raises(ConfigError, match="another plan"):
        run_phases(config, plan_of({**FULL, "tokens": 3 * STEP, "learning_rate": 1.0}), SOURCES, resume=True)


def test_a_phase_that_has_ended_may_not_be_another_afterwards(config_of: Callable[..., LemaConfig]) -> None:
    config = config_of(save_total_limit=1)
    run_phases(config, plan_of({**FULL, "tokens": 3 * STEP}), SOURCES)
    place = Path(config.output_dir) / "whole"
    assert [path.name for path in sorted(place.glob("checkpoint-*"))] == ["checkpoint-3"]
    then = plan_of({**FULL, "tokens": 3 * STEP, "learning_rate": 1e-5}, {**LORA, "tokens": STEP})
    with pytest.raises(ConfigError, match="another plan"):
        run_phases(config, then, SOURCES, resume=True)
    run_phases(config, plan_of({**FULL, "tokens": 3 * STEP}, {**LORA, "tokens": STEP}), SOURCES, resume=True)


def test_where_a_phase_begins(config_of: Callable[..., LemaConfig]) -> None:
    run = PhaseRun(config_of(), plan_of(*PLANS["adapters, merged, adapters on"]), SOURCES)
    assert [run._begins_anew(index) for index in range(3)] == [True, True, False]
    assert [run._leaves_model(index) for index in range(3)] == [True, False, False]
