"""The benchmark for a GPU, without one: it runs from end to end in a tiny form, and says so
rather than guess.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURED = {"status": "measured", "capped": True, "layers": 32, "of_layers": 32, "strategy": None}


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Iterator[None]:
    """Let the files of `benchmarks/` be imported by their names, as they import each other."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def table() -> ModuleType:
    import gpu_table

    return gpu_table


@pytest.fixture
def model() -> ModuleType:
    import gpu_model

    return gpu_model


# From end to end


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One tiny run, its rows and the peers that are not installed here."""
    directory = tmp_path_factory.mktemp("gpu")
    out = directory / "gpu.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(out),
    ]
    options = [
        "--models",
        "8B",
        "--only",
        "8B/lema@4",
        "*/roundpipe@8",
        "--micro-batches",
        "1",
        "4",
        "--rounds",
        "1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    limits = ["--directory", str(directory), "--seconds", "240"]
    done = subprocess.run(
        [*command, *options, *limits], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in directory.iterdir()] == ["gpu.json"], "the models are gone"
    found: dict[str, Any] = json.loads(out.read_text())
    found["printed"] = done.stdout
    return found


def row_of(results: dict[str, Any], arm: str, micro_batches: int) -> dict[str, Any]:
    rows = [
        row for row in results["rows"] if (row["arm"], row["micro_batches"]) == (arm, micro_batches)
    ]
    assert rows, f"no row of {arm}"
    return rows[0]


@pytest.mark.exhaustive  # arms in processes of their own, each with a limit of time
def test_an_arm_is_measured_in_turn_with_peft_and_has_its_loss(results: dict[str, Any]) -> None:
    for count in (1, 4):
        ours = row_of(results, "lema", count)
        peft = row_of(results, "peft", count)
        assert ours["status"] == peft["status"] == "measured"
        assert ours["losses"] == pytest.approx(peft["losses"], rel=1e-5)
        assert ours["ratio"] == pytest.approx(peft["seconds"] / ours["seconds"])


@pytest.mark.exhaustive  # arms in processes of their own, each with a limit of time
def test_what_is_planned_and_moved_stands_in_the_row(results: dict[str, Any]) -> None:
    row = row_of(results, "lema", 4)
    assert row["planned_bytes"] == sum(row["planned"].values()) <= 5 << 20  # the tiny cap
    assert row["bytes_read"] == 0  # resident
    assert row["of_limit"] == pytest.approx(row["limit_seconds"] / row["seconds"])


@pytest.mark.exhaustive  # arms in processes of their own, each with a limit of time
def test_what_is_not_installed_is_a_row(results: dict[str, Any]) -> None:
    assert row_of(results, "roundpipe", 4)["status"] == "not installed"


@pytest.mark.exhaustive  # arms in processes of their own, each with a limit of time
def test_a_run_without_a_gpu_meets_no_target(results: dict[str, Any], table: ModuleType) -> None:
    assert {one["verdict"] for one in table.verdict(results)} == {"not measured"}
    assert "MISSED" not in results["printed"]


@pytest.mark.exhaustive  # arms in processes of their own, each with a limit of time
def test_lema_on_the_device_has_the_numbers_of_the_cpu_backend(results: dict[str, Any]) -> None:
    for dtype in ("float32", "bfloat16"):  # the device is the CPU here: bitwise
        assert results["parity"][dtype]["device"]["gradients"] == 0
        assert results["parity"][dtype]["here"]["gradients"] == 0


@pytest.mark.exhaustive  # arms in processes of their own, each with a limit of time
def test_the_row_to_send_is_that_of_lema_prove(results: dict[str, Any]) -> None:
    assert results["certificate"]["holds"] and results["certificate"]["bitwise"]
    (line,) = (
        line
        for line in results["printed"].splitlines()
        if line.startswith("| cpu | holds, bitwise")
    )
    assert "lema prove --device cpu" in line


# The time


class Clock:
    """Time that passes when something is waited for, and in no other way."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Slow:
    """A child that takes so long for each thing; it is left when what it was given is over, as
    the real one is.
    """

    seconds = 0.0
    clock = Clock()
    device_memory = 80 * 10**9
    started: ClassVar[list[Any]] = []  # the job of each
    busy: ClassVar[list[str]] = []  # the arm that took each step

    def __init__(self, job: Any) -> None:
        self.started.append(job)
        self.job = job
        self.ended = False
        self.micro_batches = None
        self.host_peak = 0

    def ready(self, seconds: float) -> dict[str, Any]:
        return self.ask("ready", seconds)

    def limit(self, cap: int | None) -> None:
        self.job = replace(self.job, cap=cap)

    def prepare(self, micro_batches: int, seconds: float) -> dict[str, Any]:
        self.micro_batches = micro_batches
        return self.ask("prepare", seconds)

    def ask(self, what: str, seconds: float, **_: Any) -> dict[str, Any]:
        import gpu_process

        self.clock.now += min(self.seconds, seconds)
        if self.seconds > seconds:
            self.ended = True
            raise gpu_process.Failed(f"no answer in {seconds:.0f} s")
        if what == "link":
            return {"device_memory": self.device_memory, "shared": False}
        if what == "step":
            self.busy.append(self.job.arm)
        step = {"seconds": 1.0, "loss": 1.0, "host": {}, "allocated": 1, "reserved": 1}
        return {"capped": True, "flops_per_second": 1e12, **(step if what == "step" else {})}

    def close(self) -> None:
        self.ended = True


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a whole call measures, and how long it says it took, where everything takes so
    many seconds.
    """
    import gpu
    import gpu_call
    import gpu_rounds

    def measure(seconds: float) -> tuple[dict[str, Any], float]:
        clock = Slow.clock = Clock()
        Slow.seconds = seconds
        Slow.started.clear()
        Slow.busy.clear()
        monkeypatch.setattr(gpu_call, "time", clock)
        monkeypatch.setattr(gpu_rounds, "time", clock)
        monkeypatch.setattr(gpu_call, "Child", Slow)
        monkeypatch.setattr(gpu_call, "installed", lambda _: True)

        def prove(command: list[str], timeout: float, **_: Any) -> Any:
            clock.now += min(seconds, timeout)
            if seconds > timeout:
                raise subprocess.TimeoutExpired(command, timeout)
            return SimpleNamespace(stdout="", stderr="it writes no certificate")

        stand_in = SimpleNamespace(run=prove, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(gpu_call, "subprocess", stand_in)
        out = tmp_path / f"{seconds}.json"
        arguments = [
            "gpu.py",
            "--device",
            "cpu",
            "--tiny",
            "--out",
            str(out),
            "--directory",
            str(tmp_path),
        ]
        monkeypatch.setattr(sys, "argv", arguments)
        call = gpu_call.Call(gpu._arguments())
        try:
            call.run()
        finally:
            call.close()
        return call.results, clock.now

    return measure


@pytest.mark.parametrize("seconds", [1.0, 7.0, 40.0, 1e9])
def test_a_call_ends_in_ten_minutes_however_long_anything_takes(
    measured: Any, seconds: float
) -> None:
    results, took = measured(seconds)
    assert took <= 540
    rows = {
        (one["model"], one["arm"], one["cap_gib"], one["strategy"], one["micro_batches"])
        for one in results["rows"]
    }
    import gpu_plan

    told = {(one.model, one.arm, one.cap_gib, one.strategy) for one in gpu_plan.PLAN}
    assert told <= {row[:4] for row in rows}, (
        "each run of the plan has a row, if only that it was not reached"
    )


def test_what_comes_first_is_the_first_table(measured: Any) -> None:
    """Where everything takes some seconds, the rows of the first target are measured before the
    time is over.
    """
    results, _ = measured(7.0)
    assert "lema prove: it writes no certificate" in results["errors"]
    done = [
        (one["model"], one["arm"], one["micro_batches"])
        for one in results["rows"]
        if one["status"] == "measured"
    ]
    assert ("8B", "lema", 16) in done and ("8B", "peft", 16) in done
    assert any(one["status"] == "not reached" for one in results["rows"])


def test_lema_has_one_process_for_all_caps_of_a_model(measured: Any) -> None:
    """It reads and locks the weights once. Another model ends it."""
    results, _ = measured(1.0)
    models = [(job.arm, Path(job.model).name) for job in Slow.started]
    before = models[: models.index(("lema", "32B"))]
    assert before.count(("lema", "8B")) == 1
    lema = [
        row
        for row in results["rows"]
        if (row["model"], row["arm"], row["strategy"]) == ("8B", "lema", "resident")
    ]
    assert {row["cap_gib"] for row in lema if row["status"] == "measured"} == {4, 8, 24}


def test_where_the_device_holds_not_both_peft_is_measured_first_and_alone(
    measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "device_memory", 20 * 10**9)  # less than the largest cap
    results, _ = measured(1.0)
    rows = {
        (row["model"], row["arm"], row["cap_gib"], row["micro_batches"]): row
        for row in results["rows"]
    }
    ours = rows["8B", "lema", 4, 16]
    assert (ours["status"], ours["in_turn"], ours["ratio"]) == ("measured", False, 1.0)
    first = Slow.busy.index("lema")
    assert Slow.busy[:first] and set(Slow.busy[:first]) == {"peft"}
    later = (
        Slow.busy[first : first + Slow.busy[first:].index("peft")]
        if "peft" in Slow.busy[first:]
        else Slow.busy
    )
    assert later.count("lema") >= 3, "they took turns"


# The verdict


def row(model: str, arm: str, cap: int | None, count: int, **more: Any) -> dict[str, Any]:
    about = {
        "model": model,
        "arm": arm,
        "cap_gib": cap,
        "micro_batches": count,
        "tokens_per_second": 100.0,
    }
    return {**MEASURED, **about, **more}


def verdicts(table: ModuleType, *rows: dict[str, Any], **more: Any) -> dict[str, str]:
    return {
        one["target"]: one["verdict"] for one in table.verdict({"real": True, "rows": rows, **more})
    }


def test_nothing_measured_meets_nothing(table: ModuleType) -> None:
    assert set(verdicts(table).values()) == {"not measured"}


@pytest.mark.parametrize(("ratio", "verdict"), [(0.95, "met"), (0.85, "MISSED")])
def test_speed_is_judged_by_the_ratio(table: ModuleType, ratio: float, verdict: str) -> None:
    found = verdicts(table, row("8B", "lema", 4, 16, ratio=ratio))
    assert next(value for target, value in found.items() if target.startswith("8B")) == verdict


@pytest.mark.parametrize(
    "fault",
    [
        {"capped": False},
        {"layers": 30},
        {"status": "failed"},
        {"strategy": "streaming"},
        {"loss_off": 0.01},
        {"ratio": None},
    ],
    ids=str,
)
def test_a_row_that_is_not_whole_meets_nothing(table: ModuleType, fault: dict[str, Any]) -> None:
    found = verdicts(table, row("8B", "lema", 4, 16, **{"ratio": 2.0, **fault}))
    assert (
        next(value for target, value in found.items() if target.startswith("8B")) == "not measured"
    )


def test_a_peer_is_compared_at_the_same_cap_and_count(table: ModuleType) -> None:
    target = "ahead of fsdp2 at 4 micro-batches, same cap"
    peer = row("8B", "fsdp2", 8, 4, ratio=0.5)
    assert verdicts(table, peer, row("8B", "lema", 24, 4, ratio=0.9))[target] == "not measured"
    assert verdicts(table, peer, row("8B", "lema", 8, 4, ratio=0.9))[target] == "met"
    assert verdicts(table, peer, row("8B", "lema", 8, 4, ratio=0.4))[target] == "MISSED"
    other = [row("32B", "fsdp2", 24, 4, ratio=0.8), row("32B", "lema", 24, 4, ratio=0.7)]
    assert verdicts(table, peer, row("8B", "lema", 8, 4, ratio=0.9), *other)[target] == "MISSED"


def test_the_worst_peak_is_judged(table: ModuleType) -> None:
    target = "peak device memory within 5% of the plan"
    rows = [row("8B", "lema", 8, 4, off=0.01), row("8B", "lema", 8, 1, off=-0.06)]
    assert verdicts(table, rows[0])[target] == "met"
    assert verdicts(table, *rows)[target] == "MISSED"


def test_the_row_of_a_proof_says_what_it_found(table: ModuleType) -> None:
    certificate = {
        "holds": True,
        "bitwise": False,
        "tolerance": 1e-5,
        "gradients_of_first_step": {"count": 168, "relative": 3.2e-7},
        "memory": {"streamed": {"peak": 90_000_000}, "whole": {"peak": 400_000_000}},
        "machine": {"device": "cuda"},
        "versions": {"torch": "2.13.0"},
        "date": "2026-11-24",
        "command": "lema prove --device cuda",
    }
    line = table.proof_row(certificate, {"link": {"device": "A card"}})
    assert line.startswith(
        "| A card | holds, within 1e-05 | 168 gradients, apart by 3.2e-07 of their norm |"
    )
    assert line.endswith(
        "| 90 MB streamed and 400 MB whole | torch 2.13.0 | 2026-11-24 | `lema prove "
        "--device cuda` |"
    )
    assert "DOES NOT HOLD" in table.proof_row({**certificate, "holds": False}, {})


# The weights


def test_weights_are_random_and_as_their_header_says(model: ModuleType, tmp_path: Path) -> None:
    shape = model.TINY["8B"]
    written = model.write_random(
        tmp_path / "model", shape, [model.Place(tmp_path, 10**9)], threads=2
    )
    assert (written.shape, written.full_layers) == (shape, shape.layers)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    drawn = []
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "model" / file, "pt") as tensors:
            tensor = tensors.get_tensor(name).float()
        if tensor.dim() == 1:
            assert bool((tensor == 1).all())
        else:
            assert tensor.std() == pytest.approx(0.02, rel=0.1)
            drawn.append(tensor.flatten()[:64])
    assert len({tuple(one.tolist()) for one in drawn}) == len(drawn), "two tensors are alike"


def test_files_spread_over_places_and_layers_without_room_are_told(
    model: ModuleType, tmp_path: Path
) -> None:
    shape = model.TINY["8B"]
    first = tmp_path / "first"
    second = tmp_path / "second"
    outside = 2 * shape.vocabulary * shape.hidden * 2 + shape.hidden * 2
    room = [outside + 2 * shape.layer_bytes, shape.layer_bytes + 1]
    places = [model.Place(first, room[0]), model.Place(second, room[1])]
    written = model.write_random(tmp_path / "model", shape, places, threads=1)
    assert (written.shape.layers, written.full_layers) == (3, shape.layers)
    assert len(list((first / "model").iterdir())) == 3
    assert len(list((second / "model").iterdir())) == 1
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert len(whole.model.layers) == 3
    assert whole.dtype == torch.bfloat16


def test_no_room_for_a_layer_is_an_error(model: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no room"):
        model.write_random(tmp_path / "model", model.TINY["8B"], [model.Place(tmp_path, 1000)])


# Host memory


def test_locking_tensor_by_tensor_needs_powers_of_two(model: ModuleType) -> None:
    import gpu_plan

    shape = model.MODELS["32B"]
    assert (
        gpu_plan.host_bytes(gpu_plan.Run("32B", "fsdp2", 24, (4,)), shape)
        > 1.5 * shape.weight_bytes
    )
    assert (
        gpu_plan.host_bytes(gpu_plan.Run("32B", "lema", 24, (4,), "resident"), shape)
        < 1.3 * shape.weight_bytes
    )
    assert gpu_plan.host_bytes(gpu_plan.Run("8B", "lema", 24, (4,), "streaming"), shape) == 0
