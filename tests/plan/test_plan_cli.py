"""`lema plan`: a table, lines, JSON or a picture; of any machine, before there is anything to
run on it.
"""

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import blockfp8
import pytest
from clirun import assert_refused, config_writer, lema, write_rows
from hollowmodel import large_config, write_hollow
from rich.console import Console
from smallrun import SENTENCES, write_model
from transformers import MixtralConfig, Qwen2MoeConfig

from lema import LemaConfig
from lema.cli.app import app
from lema.cli.tables import rows, show_plan
from lema.convert.prepare import prepare
from lema.errors import MemoryLimitError
from lema.plan import Plan, make_plan
from lema.plan.machine import PROFILES, profile
from lema.plan.plan import plan_with
from lema.plan.planner import Planner, machine_state_of, planner_of
from lema.plan.work.step import by_arithmetic, step_shape
from lema.plan.work.workload import measure
from lema.stream.reader import LayerReader


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hollow(tmp_path_factory.mktemp("models") / "8B", large_config("8B"))


@cache
def _known(model: Path, length: int, rows: int) -> Planner:
    base: dict[str, Any] = {"device": "cpu", "gradient_checkpointing": True, "batch_size": rows}
    return planner_of(LemaConfig(str(model), max_length=length, **base), profile("4090"))


def planned(model: Path, machine: str = "4090", **changes: Any) -> Plan:
    """Plan, with a model that is looked at once for all tests."""
    settings = {"batch_size": 8, "micro_batch_size": 1, "max_length": 1024, **changes}
    known = _known(model, settings["max_length"], settings["micro_batch_size"])
    found = profile(machine)
    config = LemaConfig(**known.config.model_dump() | settings)
    assert known.workload is not None
    timings = by_arithmetic(
        known.workload, known.blueprint.layers, found, known.blueprint.model.dtype.itemsize
    )
    shape = step_shape(config, None)
    site = machine_state_of(config, found)
    return plan_with(
        replace(known, config=config, timings=timings, shape=shape, machine_state=site)
    )


def test_embeddings_that_are_not_loaded_are_told(eight: Path) -> None:
    """The input's are a table of 1.05 GB; a step of 8,192 tokens reads that many rows of 8 KiB."""
    planner = planner_of(LemaConfig(str(eight), max_length=1024), profile("4090"))
    needs = planner.needs()
    assert needs.device["outside"] == pytest.approx(1.05e9, rel=0.01)  # the head's alone
    assert needs.demand.row_bytes == 8192 * 8192
    assert "embeddings: rows from disk, 8.2 kB a token" in " ".join(plan_with(planner).notes)


@pytest.mark.slow
def test_a_plan_adds_up(eight: Path) -> None:
    plan = planned(eight, gradient_accumulation_steps=4)
    assert plan.tokens == 8 * 4 * 1024
    assert sum(plan.memory.device.values()) == plan.step.device_peak
    assert plan.memory.disk["model"] == pytest.approx(16.06e9, rel=0.01)
    assert (
        plan.step.bottleneck == "compute"
        and plan.room.crossover is not None
        and plan.tokens > plan.room.crossover
    )
    assert plan.tokens_per_second == pytest.approx(plan.tokens / plan.step.seconds)
    assert plan.step.seconds <= 1.05 * max(plan.step.compute, plan.step.link, plan.step.disk)


@pytest.mark.slow
def test_too_few_tokens_are_told_and_what_would_help(eight: Path) -> None:
    # else every layer stays, and nothing is to be hidden
    plan = planned(eight, batch_size=1, device_memory=None)
    assert plan.room.crossover is not None and plan.tokens < plan.room.crossover
    assert plan.step.bottleneck == "disk" and plan.step.stall_disk > 0
    assert plan.room.gigabyte_on_device > 0 and plan.room.gigabyte_in_host > 0
    richer = planned(eight, batch_size=1, device_memory=None, host_memory="14GB")
    assert len(richer.allocation.host_cached) > 20
    assert richer.step.seconds < plan.step.seconds


@pytest.mark.slow
def test_the_largest_step_and_micro_batch_fit_and_the_next_do_not(eight: Path) -> None:
    config = {"device_memory": "8GB", "max_length": 512, "batch_size": 4}
    plan = planned(eight, **config)
    assert (
        planned(eight, **config | {"batch_size": plan.room.largest_step // 512}).step.device_peak
        <= 8e9
    )
    with pytest.raises(MemoryLimitError):
        planned(eight, **config | {"batch_size": plan.room.largest_step // 512 + 1})
    largest = plan.room.largest_micro_batch
    assert largest >= 4
    found = planned(eight, **config | {"micro_batch_size": largest, "batch_size": largest})
    assert found.step.device_peak <= 8e9
    with pytest.raises(MemoryLimitError):
        planned(eight, **config | {"micro_batch_size": largest + 1, "batch_size": largest + 1})


def test_as_many_adapters_fit_as_one_that_has_their_ranks(
    eight: Path,
) -> None:
    settings: dict[str, Any] = {"device": "cpu", "device_memory": "8GB", "max_length": 512}
    settings |= {"micro_batch_size": 1, "gradient_checkpointing": True, "prefetch_depth": 1}
    settings |= {"loss_chunk_tokens": 256, "head": "device"}

    def of_rank(rank: int) -> Plan:
        return make_plan(LemaConfig(str(eight), lora_rank=rank, **settings), profile("4090"))[0]

    plan = of_rank(16)
    most = plan.room.adapters
    assert 2 < most < 100
    assert plan.room.adapter_bytes == plan.memory.device["adapters"]
    # activations of an adapter grow with its rank, too, so a large one is more than many small
    assert of_rank(16 * (most - 1)).fits
    with pytest.raises(MemoryLimitError):
        of_rank(16 * (most + 1))
    (line,) = (row for row in rows(plan) if row[1].startswith("adapters like this"))
    assert line[0] == "limits"
    assert line[2] == str(most)


@pytest.mark.slow
def test_more_memory_gives_more_room_and_no_slower_a_step(eight: Path) -> None:
    plans = [
        planned(eight, device_memory=f"{size}GB", host_memory="3GB", batch_size=2)
        for size in (7, 8, 12, 20)
    ]
    for less, more in pairwise(plans):
        assert less.room.largest_micro_batch <= more.room.largest_micro_batch
        assert less.room.largest_step <= more.room.largest_step
        assert less.step.seconds >= more.step.seconds
    assert plans[0].room.largest_step < plans[-1].room.largest_step
    # What a GB saves is what it is found to save when it is given.
    richer = planned(eight, device_memory="8GB", host_memory="3GB", batch_size=2)
    saved = plans[0].step.seconds - richer.step.seconds
    assert plans[0].room.gigabyte_on_device == pytest.approx(saved) and saved > 0
    richer = planned(eight, device_memory="7GB", host_memory="4GB", batch_size=2)
    saved = plans[0].step.seconds - richer.step.seconds
    assert plans[0].room.gigabyte_in_host == pytest.approx(saved) and saved > 0


@pytest.mark.slow
def test_no_weight_is_read(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(LayerReader, "submit", read)
    before = bytes_read_by_this_process()
    make_plan(LemaConfig(str(eight), device="cpu", batch_size=1), profile("t4"))
    assert (
        bytes_read_by_this_process() - before < 10e6 < (eight / "model.safetensors").stat().st_size
    )


def bytes_read_by_this_process() -> int:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


@pytest.mark.slow
def test_limits_are_kept_and_memory_is_spent(eight: Path) -> None:
    tight = planned(eight, device_memory="7GB")
    ample = planned(eight, device_memory="20GB")
    assert tight.step.device_peak <= 7e9 and ample.step.device_peak <= 20e9
    assert ample.step.seconds < tight.step.seconds
    assert ample.allocation.saved or ample.allocation.residents


def test_what_preparing_would_save_is_said(tmp_path: Path) -> None:
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, **experts
    )

    def notes(directory: Path, **weights: str) -> str:
        base: dict[str, Any] = weights | {
            "device": "cpu",
            "batch_size": 1,
            "micro_batch_size": 1,
            "max_length": 16,
        }
        return " ".join(make_plan(LemaConfig(str(directory), **base), profile("4090"))[0].notes)

    quantized = blockfp8.write(config, tmp_path / "fp8")
    plain = blockfp8.write_whole(quantized, tmp_path / "plain")
    prepared = prepare(plain, tmp_path / "prepared.safetensors").path
    # An expert's up projection and the next one's gate projection follow each other in the file and
    # in the tensor.
    assert f"put together from {2 * (4 * 3 - 3)} pieces, 0 B moved on the host" in notes(plain)
    assert "dequantised" in notes(quantized) and "dequantised" not in notes(plain)
    assert "lema prepare" not in notes(plain, gbi_path=str(prepared))


@pytest.mark.parametrize("tokens", [4, 512])
def test_experts_are_told(tmp_path: Path, tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    """How many of them a step reaches if routers choose all alike, which is how many colours of
    so many are drawn.
    """
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 96, "num_attention_heads": 2}
    experts = {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
    }
    config = Qwen2MoeConfig(
        **sizes, **experts, num_key_value_heads=2, shared_expert_intermediate_size=48
    )
    model = write_hollow(tmp_path / "model", config)
    settings: dict[str, Any] = {"batch_size": 1, "max_length": tokens, "lora_rank": 2}
    plan, planner = make_plan(LemaConfig(str(model), device="cpu", **settings), profile("4090"))
    told = plan.experts
    assert told is not None
    assert (told.layers, told.count, told.active, told.together) == (2, 16, 4, 16)
    missed = (1 - 4 / 16) ** tokens
    assert told.reached == pytest.approx(16 * (1 - missed))
    assert told.parts["experts"] == 2 * 2 * 16 * 3 * 32 * 64
    assert told.parts["routers"] == 2 * 2 * 16 * 64
    assert told.parts["shared experts"] == 2 * 2 * (3 * 64 * 48 + 64)  # with its gate
    assert told.parts["attention and norms"] == 2 * 2 * (4 * 64 * 64 + 3 * 64 + 2 * 64)
    assert sum(told.parts.values()) - told.parts["adapters of experts"] == sum(
        tensor.nbytes for layer in planner.blueprint.layers for tensor in layer.tensors
    )
    trained = {
        name: one.numel()
        for name, one in planner.blueprint.model.named_parameters()
        if one.requires_grad
    }
    of_experts_alone = sum(count for name, count in trained.items() if ".experts." in name)
    # with its gradient and two moments
    assert told.parts["adapters of experts"] == of_experts_alone * 16
    assert plan.to_dict()["experts"]["reached"] == told.reached
    said = (
        "each token has 4 of 16, and 16 are leased together; if routers choose all alike, "
        "which is assumed, a step"
    )
    assert any(said in note for note in plan.notes)
    show_plan(plan, Console())
    assert said in capsys.readouterr().out


def test_a_model_without_experts_has_none_to_tell_of(eight: Path) -> None:
    assert planned(eight).experts is None


@pytest.mark.slow
def test_every_profile_has_a_plan(eight: Path) -> None:
    for name in PROFILES:
        plan = planned(eight, name)
        assert plan.step.seconds > 0 and plan.machine.name == name
        assert plan.notes if PROFILES[name].note else True


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"host_memory": "12GB"}, {"boundary_activations": "host"}], ids=str
)
def test_where_the_device_is_the_host_each_part_counts_once(
    eight: Path, changes: dict[str, Any]
) -> None:
    plan = planned(eight, "cpu", **changes)
    assert sum(plan.memory.device.values()) == plan.step.device_peak
    once = {
        **plan.memory.host,
        **{f"device {part}": size for part, size in plan.memory.device.items()},
    }
    assert plan.memory.host["ring"] == once.pop("device slots")  # the ring is the slots
    assert plan.host_peak == sum(once.values())
    assert plan.memory.host["cached"] or "host_memory" not in changes


def test_how_much_larger_a_step_may_be_is_found_out_where_it_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For it two more micro-batches are run without values, of one row and of two."""
    config = config_writer(write_model(tmp_path / "model"), tmp_path)(batch_size=4)
    ran = list[int]()

    def counted(*arguments: Any) -> Any:
        ran.append(arguments[2].rows)
        return measure(*arguments)

    monkeypatch.setattr("lema.plan.needs.measure", counted)
    largest = "limits\tlargest micro_batch_size"
    for options, shown in ((), ""), (("--verbose",), largest), (("--json",), '"room"'):
        ran.clear()
        assert lema("plan", config, "--profile", "t4", *options) == 0
        assert shown in capsys.readouterr().out
        assert ran == [4, *([1, 2] if options else [])]


def test_an_epoch_has_the_rows_that_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that are held back, too long, left out or beyond the most asked for do not count, nor
    do their tokens.
    """
    write = config_writer(write_model(tmp_path / "model"), tmp_path)
    texts = [{"text": sentence} for sentence in SENTENCES[:12]]
    rows = [*texts, {"text": " ".join(SENTENCES)}, {**texts[0], "train": False}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    given = {
        "train_data": str(data),
        "overlong": "drop",
        "max_length": 32,
        "max_steps": None,
        "batch_size": 2,
    }
    found = {}
    for name, more in {
        "all": {},
        "split": {"eval_split": 4},
        "both": {"eval_split": 4, "max_train_samples": 5},
    }.items():
        config = write(**given, **more)
        assert lema("plan", config, "--profile", "t4", "--json") == 0
        found[name] = json.loads(capsys.readouterr().out)["epoch"]
        assert (
            lema("train", config, "--set", "max_steps=1", "--set", f"output_dir={tmp_path / name}")
            == 0
        )
        told = capsys.readouterr().out
        assert (
            f"training data: {found[name]['rows']} rows, {found[name]['tokens']} tokens, " in told
        )
    assert [found[name]["rows"] for name in ("all", "split", "both")] == [12, 8, 5]
    assert [found[name]["run_steps"] for name in ("all", "split", "both")] == [6, 4, 3]


@pytest.mark.slow
def test_an_epoch_is_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = config_writer(write_model(tmp_path / "model"), tmp_path)
    assert lema("plan", write(max_length=64), "--profile", "cpu", "--price", "2.5", "--json") == 0
    epoch = json.loads(capsys.readouterr().out)["epoch"]
    assert epoch["rows"] == 8 and epoch["steps"] == 2
    assert epoch["cost"] == pytest.approx(2.5 * epoch["hours"])
    assert epoch["run_steps"] == 2  # two steps are what max_steps asks for


@pytest.mark.slow
def test_this_machine_is_measured_where_no_profile_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write = config_writer(write_model(tmp_path / "model"), tmp_path)
    assert lema("plan", write(max_length=64, train_data=None), "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["measured"] and plan["machine"]["name"] == "cpu"
    assert plan["machine"]["speeds"]["disk"] > 0 and plan["machine"]["speeds"]["link"] is None
    assert plan["step"]["compute"] > 0 and plan["memory"]["host"]["process"] > 10e6
    assert plan["host_peak"] > plan["device_peak"]


@pytest.mark.slow
def test_lines_are_tab_parted_and_a_terminal_gets_a_table(
    eight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(eight)
    show_plan(plan, Console(highlight=False), verbose=True)
    verdict, *lines = capsys.readouterr().out.splitlines()
    assert verdict == plan.verdict
    assert [tuple(line.split("\t")) for line in lines] == list(rows(plan))
    show_plan(plan, Console(highlight=False))
    assert 5 <= len(capsys.readouterr().out.splitlines()) < len(lines) / 2
    console = Console(force_terminal=True, width=120, color_system=None)
    with console.capture() as captured:
        show_plan(plan, console)
    table = captured.get()
    assert "tokens per second" in table and "\t" not in table
    assert "tokens of full rows" in table  # whose time is told
    assert any("in all" in line and " of " in line for line in table.splitlines())


@pytest.mark.slow
def test_a_picture_is_drawn(eight: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model_name_or_path: {eight}\ndevice: cpu\ngradient_checkpointing: true\nbatch_size: 2\n"
    )
    assert lema("plan", config, "--profile", "t4", "--plot", tmp_path / "plan.png") == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive  # the head is tried in pieces
def test_refusals(eight: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model_name_or_path: {eight}\ndevice: cpu\ngradient_checkpointing: true\nbatch_size: 1\n"
    )
    assert_refused(capfd, 2, ["h100", "t4", "measured"], "plan", config, "--profile", "h100")
    assert_refused(
        capfd,
        4,
        ["device_memory", "allow"],
        "plan",
        config,
        "--profile",
        "t4",
        "--set",
        "device_memory=1GB",
    )
    assert lema("plan", config, "--profile", "t4", "--price", "-1") == 2
    assert_refused(
        capfd,
        2,
        ["--plot", ".png"],
        "plan",
        config,
        "--profile",
        "t4",
        "--plot",
        tmp_path / "plan.what",
    )


@pytest.mark.slow
def test_a_plan_that_does_not_fit_says_so_first_and_ends_with_the_code_of_memory(
    eight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"model_name_or_path: {eight}\ndevice: cpu\nmax_length: 1024\n")
    unlimited = ("--set", "device_memory=null", "--gradient-checkpointing", "false")
    assert lema("plan", config, "--profile", "4090", *unlimited) == 4
    assert capsys.readouterr().out.startswith("does not fit: it needs ")
    assert lema("plan", config, "--profile", "4090") == 0
    assert capsys.readouterr().out.startswith("fits, with ")


@pytest.mark.slow
def test_the_verdict_says_what_packing_would_give(tmp_path: Path) -> None:
    """Where reading is what takes the time, an epoch takes as long as it has steps."""
    base: dict[str, Any] = {
        "train_data": str(tmp_path / "rows.jsonl"),
        "max_length": 96,
        "batch_size": 2,
    }
    base["device_memory"] = None  # so that every layer streams
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat"}\n' * 40)
    base |= {"device": "cpu", "model_name_or_path": str(write_model(tmp_path / "model"))}
    slow = replace(profile("t4"), speeds=replace(profile("t4").speeds, disk=1e4))
    apart, _ = make_plan(LemaConfig(**base), slow)
    packed, _ = make_plan(LemaConfig(**base, packing=True), slow)
    assert apart.epoch is not None and packed.epoch is not None
    assert packed.epoch.packed_hours is None and packed.epoch.steps < apart.epoch.steps / 2
    assert apart.epoch.packed_hours == pytest.approx(packed.epoch.hours, rel=0.5)
    times = f"{apart.epoch.hours / apart.epoch.packed_hours:.2g}"
    assert f"packing: true would take about {times} times less" in apart.verdict
    assert "packing" not in packed.verdict


@pytest.mark.slow
def test_the_verdict_says_what_limits_a_step_and_how_many_tokens_would_hide_it(eight: Path) -> None:
    few, many = (planned(eight, batch_size=rows, device_memory=None) for rows in (1, 32))
    assert few.step.bottleneck == "disk"
    assert "limited by the disk: 1.0k tokens a step, and reading is hidden from" in few.verdict
    assert many.verdict.endswith("limited by computing")


def test_the_verb_is_listed() -> None:
    assert "plan" in {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback
    }
