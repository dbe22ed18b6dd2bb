"""Before the first step a run of phases says what it will be, and that is what it is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import assert_refused, lema
from hollowmodel import write_hollow
from rich.console import Console
from tiny import VOCABULARY, Checkpoint
from transformers import LlamaConfig

from lema import LemaConfig
from lema.data.mixture import Mixture
from lema.errors import ConfigError, DataError, MemoryLimitError, ModelError
from lema.plan import needs as planned
from lema.plan.machine import profile
from lema.stream.reader import LayerReader
from lema.train import LemaTrainer
from lema.train.full.training import FullTraining
from lema.train.metrics import METRICS_NAME, read_metrics
from lema.train.phases.plan import PhasePlan
from lema.train.phases.report import PhaseReport, phase_report, report_rows, show_report
from lema.train.phases.run import run_phases
from lema.train.phases.twophase import LoRATrainerConfig

BLOCK = 12
ROWS = 4
STEP = BLOCK * ROWS
MIX = [{"name": "one", "rate": 0.75}, {"name": "two", "rate": 0.25}]
FULL = {
    "trains": "full",
    "tokens": 2 * STEP + 5,
    "mixture": MIX,
    "learning_rate": 1e-3,
    "name": "whole",
}
ONE = [{"name": "one", "rate": 1.0}]
LORA = {"trains": "lora", "tokens": STEP, "mixture": ONE, "learning_rate": 1e-2, "name": "adapters"}


def rows(seed: int, count: int = 12, length: int = BLOCK) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for _ in range(count)
    ]
    return [{"input_ids": row, "labels": row} for row in drawn]


SOURCES = {"one": rows(1), "two": rows(2)}


def plan_of(*phases: dict[str, Any], **settings: Any) -> PhasePlan:
    fixed = {"batch_size": ROWS, "max_length": BLOCK, "micro_batch_size": 2}
    return PhasePlan(phases=list(phases), **{**fixed, **settings})


@pytest.fixture
def config_of(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]
) -> Callable[..., LemaConfig]:
    def make(**settings: Any) -> LemaConfig:
        fixed = {
            "device": "cpu",
            "gradient_checkpointing": True,
            "save_steps": 0,
            "max_grad_norm": 1.0,
        }
        fixed |= {"logging_steps": 1, "output_dir": tmp_path / "run"}
        return LemaConfig(str(checkpoint_of("llama").streamed), **{**fixed, **settings})

    return make


@pytest.mark.slow
def test_the_finding_adapters_that_end_inside_their_warm_up_is_told(tmp_path: Path) -> None:
    """A published configuration: 19168 steps, 191 of warm-up, and the 95 of the adapters all
    within it.
    """
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
    }
    model = write_hollow(
        tmp_path / "model", LlamaConfig(**sizes, vocab_size=96, max_position_embeddings=512)
    )
    step = 512 * 512
    mix = [[{"name": "web", "rate": 0.75}, {"name": "chat", "rate": 0.25}]]
    given = {
        "pre_lora_tokens": [19073 * step],
        "post_lora_tokens": [95 * step],
        "schedule": "wsd",
        "decay_pct": 0.01,
    }
    both = {"pre_lora_datasets": mix, "post_lora_datasets": mix, "per_device_batch_size": 8}
    plan = LoRATrainerConfig(**given, **both, schedule_spans="run").plan()
    report = phase_report(LemaConfig(str(model), device="cpu"), plan)
    whole, adapters = report.phases
    assert (report.steps, whole.steps, adapters.steps) == (19168, 19073, 95)
    assert (adapters.first_step, adapters.last_step) == (19074, 19168)
    assert (adapters.rates["first"], adapters.rates["last"]) == pytest.approx(
        (3e-6, 1.5e-4), rel=0.02
    )
    assert adapters.rates["peak"] == adapters.rates["last"]  # it still rises
    assert (whole.rates["first"], whole.rates["peak"]) == pytest.approx((3e-6, 3e-4))
    assert whole.rates["last"] == pytest.approx(1.5e-4, rel=0.02)
    assert any(
        "ends inside its warm-up: 95 steps, and 191 of warm-up" in warning
        for warning in report.warnings
    )
    assert adapters.tokens == 95 * step == sum(adapters.tokens_per_source.values())
    assert adapters.tokens_per_source["web"] == pytest.approx(0.75 * 95 * step, rel=1e-3)
    assert "ends inside its warm-up" in "\n".join("\t".join(row) for row in report_rows(report))


@pytest.mark.slow
def test_a_run_is_what_was_reported(config_of: Callable[..., LemaConfig]) -> None:
    config = config_of()
    plan = plan_of(FULL, LORA)
    report = phase_report(config, plan)
    end = run_phases(config, plan, SOURCES)
    place = Path(config.output_dir)
    whole, adapters = report.phases
    assert (whole.first_step, whole.last_step, whole.leftover) == (1, 2, 5)
    assert (adapters.first_step, adapters.last_step) == (3, 3)
    assert end.name == f"checkpoint-{adapters.steps}"
    mixture = Mixture(plan.phases[0].mixture, SOURCES, plan.seed, BLOCK, stage=0)
    drawn = [mixture.sample(index).source for index in range(2 * ROWS)]
    assert whole.tokens_per_source == {name: BLOCK * drawn.count(name) for name in ("one", "two")}
    assert whole.trainable == whole.parameters == numbers_in(place / "whole" / "model")
    assert adapters.trainable == numbers_in(end, "adapter_model.safetensors")
    assert adapters.parameters == whole.parameters
    for entry, kept in ((whole, place / "whole"), (adapters, place / "adapters")):
        written = sum(
            file.stat().st_size
            for file in kept.rglob("*.*")
            if file.suffix in (".safetensors", ".pt")
        )
        assert entry.memory.disk == pytest.approx(written, rel=0.1)
    assert report.hours is None and report.speeds == "unknown"


def numbers_in(directory: Path, pattern: str = "*.safetensors") -> int:
    from safetensors.torch import load_file

    found = [tensor for file in directory.glob(pattern) for tensor in load_file(file).values()]
    assert found
    return sum(tensor.numel() for tensor in found)


def test_a_selection_counts_what_it_selects(config_of: Callable[..., LemaConfig]) -> None:
    part = {
        "trainable": ["q_proj"],
        "layers": ["last:2"],
        "tokens": STEP,
        "mixture": MIX,
        "learning_rate": 1e-3,
    }
    (entry,) = phase_report(config_of(), plan_of(part)).phases
    assert (entry.trains, entry.trainable) == ("selection", 2 * 32 * 32)
    assert entry.memory.parts["host"]["moments"] == 8 * entry.trainable


def test_names_that_no_module_bears_are_told_once(config_of: Callable[..., LemaConfig]) -> None:
    asked = {**LORA, "lora_target_modules": ["q_proj", "v_porj"]}
    config = config_of()
    plan = plan_of(asked, {**asked, "name": "again"})
    for measured in (True, False):  # a plan; and a run, whose phases tell it when they begin
        said = phase_report(config, plan, machine=profile("cpu"), measure=measured).warnings
        assert (
            len([one for one in said if "lora_target_modules: no module is named v_porj" in one])
            == measured
        )


@pytest.mark.slow
def test_no_weight_is_read(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(LayerReader, "submit", read)
    assert phase_report(config_of(), plan_of(FULL, LORA)).steps == 3


def test_what_later_phases_would_fail_with_is_said_before_the_first(
    config_of: Callable[..., LemaConfig],
) -> None:
    config = config_of()
    with pytest.raises(ConfigError, match="no data set 'three'"):
        run_phases(
            config, plan_of(FULL, {**LORA, "mixture": [{"name": "three", "rate": 1.0}]}), SOURCES
        )
    with pytest.raises(DataError, match="is empty"):
        run_phases(
            config,
            plan_of({**FULL, "mixture": ONE}, {**LORA, "mixture": MIX}),
            {**SOURCES, "two": []},
        )
    assert not Path(config.output_dir).exists()
    with pytest.raises(ConfigError, match="no weight of the model"):
        phase_report(
            config,
            plan_of(FULL, {**FULL, "name": "part", "trains": "selection", "trainable": ["none"]}),
        )


@pytest.mark.slow
def test_a_phase_that_does_not_fit_is_refused_by_name(config_of: Callable[..., LemaConfig]) -> None:
    with pytest.raises(MemoryLimitError) as raised:
        phase_report(config_of(host_memory="600KB"), plan_of(LORA, {**FULL, "merge": True}))
    assert "phase whole" in raised.value.where and raised.value.exit_code == 4
    with pytest.raises(MemoryLimitError, match="device memory") as raised:
        phase_report(config_of(device_memory="100KB"), plan_of(FULL))
    assert raised.value.where == "phase whole: device_memory"


@pytest.mark.slow
def test_hours_come_from_a_profile_and_cost_what_they_cost(
    config_of: Callable[..., LemaConfig],
) -> None:
    plan = plan_of(FULL, LORA)
    report = phase_report(config_of(), plan, machine=profile("4090"), price=2.0)
    assert report.speeds == "profile" and report.machine == "4090" and not report.shared
    hours = [phase.hours for phase in report.phases]
    assert report.hours == pytest.approx(sum(hours)) and report.cost == pytest.approx(
        2 * report.hours
    )  # type: ignore[arg-type,operator]
    twice = phase_report(
        config_of(), plan_of({**FULL, "tokens": 4 * STEP}), machine=profile("4090")
    )
    assert twice.phases[0].hours == pytest.approx(2 * hours[0])  # type: ignore[operator]
    assert report.phases[0].moved.downloaded == 2 * 4 * in_layers(report)
    assert json.loads(json.dumps(report.to_dict()))["cost"] == report.cost


def in_layers(report: PhaseReport) -> int:
    """Parameters of the first phase's layers: what is on the device of gradients is those of two
    of them.
    """
    return report.phases[0].memory.parts["device"]["gradients"] // 8 * 12


def test_processes_share_rows_and_each_has_its_optimizer(
    config_of: Callable[..., LemaConfig],
) -> None:
    one, two = (
        phase_report(config_of(), plan_of(FULL), processes=count).phases[0] for count in (1, 2)
    )
    assert two.memory.parts["host"]["moments"] == 2 * one.memory.parts["host"]["moments"]
    assert two.memory.parts["device"]["boundaries"] == one.memory.parts["device"]["boundaries"] // 2
    assert (two.steps, two.tokens) == (one.steps, one.tokens)


def test_a_model_whose_costs_depend_on_values_is_reported_without_them(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def depends(*_: Any, **__: Any) -> None:
        raise ModelError(
            "this model's computation depends on values, so the memory of its texts is not known"
        )

    monkeypatch.setattr(planned, "measure", depends)
    report = phase_report(config_of(), plan_of(FULL, LORA), machine=profile("4090"))
    assert report.hours is None and report.warnings[-1].startswith(
        "this model's computation depends on values, so the memory of its texts is not known"
    )
    assert report.phases[0].memory.parts["device"]["working"] == 0 < report.phases[0].memory.host


# Showing


@pytest.mark.slow
def test_it_is_legible_at_a_hundred_columns_and_parted_by_tabs_where_it_is_piped(
    config_of: Callable[..., LemaConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    report = phase_report(
        config_of(),
        plan_of(
            FULL, {**LORA, "lr_scheduler_type": "wsd", "warmup_steps": 9, "schedule_steps": 40}
        ),
    )
    show_report(report, Console(highlight=False))
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0) == report.verdict
    assert [line.split("\t") for line in lines] == [
        [part for part in row if part] for row in report_rows(report)
    ]
    terminal = Console(force_terminal=True, width=100, color_system=None)
    with terminal.capture() as captured:
        show_report(report, terminal)
    told = captured.get().splitlines()
    assert told.pop(0) == report.verdict  # as long as it is
    assert all(len(line) <= 100 for line in told if not line.startswith("note: "))
    for word in (
        "every weight",
        "adapters",
        "learning rate",
        "tokens of two",
        "host memory",
        "in all",
    ):
        assert any(word in line for line in told)
    assert any(line.startswith("note: ") and "ends inside its warm-up" in line for line in told)
    show_report(report, Console(quiet=True))
    assert capsys.readouterr().out == ""


def rows_seen(kind: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have a trainer note the rows of each micro-batch."""
    seen = list[int]()
    accumulate = kind.accumulate

    def noted(self: Any, micro_batches: Any, *arguments: Any, **options: Any) -> Any:
        seen.extend(len(one["input_ids"]) for one in micro_batches)
        return accumulate(self, micro_batches, *arguments, **options)

    monkeypatch.setattr(kind, "accumulate", noted)
    return seen


@pytest.mark.slow
def test_weights_compute_as_many_rows_at_once_as_are_planned_as_if_that_were_set(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    phase = {**FULL, "tokens": 2 * 16 * 4 * BLOCK}

    def plan(*more: dict[str, Any], **settings: Any) -> PhasePlan:
        fixed = {"batch_size": 16, "max_length": 4 * BLOCK, "micro_batch_size": "auto"}
        return plan_of(phase, *more, **{**fixed, **settings})

    sources = {name: rows(seed, 40, 4 * BLOCK) for seed, name in enumerate(SOURCES)}
    whole = phase_report(config_of(device_memory="1GB"), plan()).phases[0]
    limit = f"{whole.memory.device - whole.memory.parts['device']['working'] * 5 // 8}B"
    # each phase has a limit of its own
    beside = plan({**phase, "name": "less", "device_memory": limit})
    first, second = phase_report(config_of(device_memory="1GB"), beside).phases
    planned = second.at_once
    assert planned < first.at_once == whole.at_once == 16
    seen = rows_seen(FullTraining, monkeypatch)
    left_open, by_hand = (
        config_of(device_memory=limit, save_steps=1, output_dir=tmp_path / name) for name in "ab"
    )
    run_phases(left_open, plan(), sources)
    assert sum(seen) == 2 * 16 and max(seen) == planned
    run_phases(by_hand, plan(micro_batch_size=planned), sources)
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name / METRICS_NAME) if "loss" in row]
        for name in "ab"
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    seen.clear()
    shutil.rmtree(tmp_path / "a" / "whole" / "checkpoint-2")
    (tmp_path / "a" / "latest.json").unlink()
    run_phases(left_open.model_copy(update={"device_memory": "1GB"}), plan(), sources, resume=True)
    assert sum(seen) == 16 and max(seen) == planned


def test_rows_at_once_are_as_many_as_fit_and_a_run_goes_on_with_them(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `micro_batch_size`, adapters compute as many rows at once as the plan says, and
    stay with that.
    """
    plan = PhasePlan(
        phases=[{**LORA, "tokens": 4 * 16 * 4 * BLOCK}], batch_size=16, max_length=4 * BLOCK
    )
    sources = {name: rows(seed, 40, 4 * BLOCK) for seed, name in enumerate(SOURCES)}
    ample = phase_report(config_of(device_memory="1GB"), plan).phases[0]
    limit = f"{ample.memory.device // 2}B"
    planned = phase_report(config_of(device_memory=limit), plan).phases[0].at_once
    assert planned < ample.at_once == 16
    seen = rows_seen(LemaTrainer, monkeypatch)
    config = config_of(device_memory=limit, save_steps=1, save_total_limit=None)
    run_phases(config, plan, sources)
    assert sum(seen) == 4 * 16 and max(seen) == planned
    done = Path(config.output_dir) / "adapters"
    seen[:] = []
    for gone in ("checkpoint-4", "checkpoint-3", "checkpoint-2"):
        shutil.rmtree(done / gone)
    (Path(config.output_dir) / "latest.json").unlink()
    run_phases(config.model_copy(update={"device_memory": "1GB"}), plan, sources, resume=True)
    assert sum(seen) == 3 * 16 and max(seen) == planned


@pytest.fixture
def file(tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(1)))
    one = "mixture: [{name: rows, rate: 1.0}]"
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: {checkpoint_of('llama').streamed}\n"
        f"device: cpu\noutput_dir: {tmp_path / 'out'}\nsave_steps: "
        "0\ngradient_checkpointing: true\n"
        f"train_data: {{rows: {tmp_path / 'rows.jsonl'}}}\nbatch_size: {ROWS}\nmax_length: "
        f"{BLOCK}\nphases:\n"
        f"  - {{name: whole, trains: full, tokens: {2 * STEP}, learning_rate: 1e-3, {one}}}\n"
        f"  - {{name: adapters, trains: lora, tokens: {STEP}, learning_rate: 1e-2, {one}}}\n"
    )
    return tmp_path / "run.yaml"


@pytest.mark.slow
def test_the_plan_verb_reports_on_a_file_of_phases(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lema("plan", file, "--profile", "cpu", "--price", "3", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert [phase["name"] for phase in told["phases"]] == ["whole", "adapters"] and told[
        "steps"
    ] == 3
    assert told["cost"] == pytest.approx(3 * told["hours"]) and told["speeds"] == "profile"
    assert lema("plan", file, "--set", f"batch_size={ROWS // 2}") == 0  # this machine is measured
    lines = [line.split("\t") for line in capfd.readouterr().out.splitlines()]
    assert ["in all", "steps", "6"] in lines
    assert any(
        line[:2] == ["in all", "takes"] and line[2].endswith("as measured") for line in lines
    )
    assert not (file.parent / "out").exists()
    assert_refused(
        capfd, 2, ["--plot"], "plan", file, "--profile", "cpu", "--plot", file.parent / "plan.png"
    )
    assert_refused(
        capfd, 4, ["phase whole", "host_memory"], "plan", file, "--set", "host_memory=100KB"
    )


@pytest.mark.slow
def test_training_says_it_first_and_refuses_what_cannot_fit(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(
        capfd, 4, ["phase whole", "host_memory"], "train", file, "--set", "host_memory=100KB"
    )
    assert not list(file.parent.glob("out/*/checkpoint-*"))
    # no rows: refused once it is read
    broken = (
        "--set",
        f"train_data={json.dumps({'rows': str(file)})}",
    )
    assert_refused(
        capfd,
        4,
        ["phase whole", "host_memory"],
        "train",
        file,
        *broken,
        "--set",
        "host_memory=100KB",
    )
    assert lema("train", file, *broken) == 3
    capfd.readouterr()
    assert lema("train", file) == 0
    told = capfd.readouterr().out
    assert told.startswith("plan: fits, in ") and told.index("plan: fits") < told.index(
        "rows: 12 rows"
    )
    assert "; phase adapters takes " in told and f", {ROWS} rows at once; 3 steps in all\n" in told
    assert "tokens of rows" not in told
    assert lema("train", file, "--verbose", "--set", f"output_dir={file.parent / 'again'}") == 0
    told = capfd.readouterr().out
    assert (
        told.index("whole\tsteps\t1 to 2")
        < told.index("adapters\tsteps\t3 to 3")
        < told.index("the last phase")
    )
    assert "adapters\ttokens of rows\t48" in told
