"""The first minutes on a GPU, rehearsed without one: what is packed, and a run that is cut off
leaves what it knows.
"""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from lema.errors import BackendUnavailable

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
DAY = BENCHMARKS / "gpu_day.sh"


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Iterator[None]:
    """Let the files of `benchmarks/` be imported by their names, as they import each other."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


# What is packed


class Shelf:
    """An index of wheels that hold nothing but what they ask for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._asks: dict[str, Sequence[str]] = {}
        self.fetched: list[str] = []

    def put(self, name: str, *asks: str) -> None:
        self._asks[name] = asks

    def wheel(self, name: str) -> Path:
        file = self._directory / f"{name}-1.0-py3-none-any.whl"
        metadata = "".join(f"Requires-Dist: {ask}\n" for ask in self._asks[name])
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(
                f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\n{metadata}"
            )
        return file

    def fetch(self, requirement: Requirement) -> Path:
        self.fetched.append(str(requirement))
        return self.wheel(requirement.name)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def packed(
    shelf: Shelf, there: dict[str, str], constraints: dict[str, str], extras: Sequence[str] = ()
) -> list[str]:
    import gpu_pack

    gpu_pack.missing_wheels(shelf.wheel("lema-lora"), extras, there, constraints, shelf.fetch)
    return shelf.fetched


def test_what_the_machine_has_in_a_version_that_will_do_stays_out(shelf: Shelf) -> None:
    shelf.put("lema-lora", "torch>=2.8", "transformers>=5.24,<5.25", "Jinja2>=3")
    shelf.put("transformers")
    there = {"torch": "2.11.0", "transformers": "5.17.0", "jinja2": ""}
    assert packed(shelf, there, {"transformers": "5.24.0", "torch": "2.13.0"}) == [
        "transformers==5.24.0"
    ]


def test_what_is_packed_brings_what_it_asks_for_once(shelf: Shelf) -> None:
    shelf.put("lema-lora", "pydantic>=2", "settings")
    shelf.put("settings", "pydantic-core>=1", "pydantic")
    shelf.put("pydantic", "pydantic_core==1.0", "numpy")
    shelf.put("pydantic_core")
    assert packed(shelf, {"numpy": "2.0"}, {}) == ["pydantic>=2", "settings", "pydantic_core==1.0"]


def test_markers_and_extras_are_those_of_the_machine_and_of_what_is_asked_for(shelf: Shelf) -> None:
    shelf.put(
        "lema-lora",
        "old; python_version < '3.12'",
        "new; python_version >= '3.12'",
        "windows; sys_platform == 'win32'",
        "kernels; extra == 'kernels'",
        "tests; extra == 'test'",
        "wide[cli]",
    )
    for name in ("new", "kernels"):
        shelf.put(name)
    shelf.put("wide", "clicks; extra == 'cli'", "maps; extra == 'gui'")
    shelf.put("clicks")
    fetched = packed(shelf, {}, {}, ["kernels"])
    assert [Requirement(text).name for text in fetched] == ["new", "kernels", "wide", "clicks"]


def test_a_constraint_outside_the_range_is_not_taken() -> None:
    import gpu_pack

    assert str(gpu_pack.pinned(Requirement("peft>=1"), {"peft": "0.21.2"})) == "peft>=1"
    assert (
        str(gpu_pack.pinned(Requirement("PyDantic_core>=2"), {"pydantic-core": "2.1"}))
        == "PyDantic_core==2.1"
    )


def test_lists_of_versions_are_read_as_they_are_printed() -> None:
    import gpu_pack

    assert gpu_pack.versions_in("# a comment\nruamel.yaml==0.19.1\n\nJinja2  # any\n") == {
        "ruamel-yaml": "0.19.1",
        "jinja2": "",
    }


def test_the_machine_lacks_what_lema_is_known_to_need() -> None:
    """From LEMA's own requirements and the list of what the machine has, without an index."""
    import gpu_pack
    import gpu_software

    there = gpu_pack.versions_in(gpu_pack.THERE.read_text())
    asked = [Requirement(text) for text in gpu_software._requirements()]
    lacking = {
        one.name for one in asked if not one.specifier.contains(there.get(one.name.lower()) or "0")
    }
    unknown = {name for name, version in there.items() if not version}
    assert {"pydantic", "peft"} <= lacking - unknown


# The day


def day(out: Path, *phases: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run phases on the CPU, with small models, and what this process's Python has."""
    chosen = {
        "OUT": str(out),
        "SITE": "none",
        "DEVICE": "cpu",
        "TINY": "1",
        "PYTHON": sys.executable,
        **environment,
    }
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **chosen}
    return subprocess.run(
        ["bash", str(DAY), *phases], capture_output=True, text=True, env=surroundings, check=False
    )


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def python(directory: Path, text: str) -> str:
    """Return a stand-in for Python: a script that gets the benchmark's name and its options."""
    script = directory / "python"
    script.write_text(f"#!/usr/bin/env bash\n{text}\n")
    script.chmod(0o755)
    return str(script)


def test_the_limits_of_all_phases_are_nine_minutes_and_a_phase_gets_what_those_before_left(
    tmp_path: Path,
) -> None:
    done = day(tmp_path / "out", PYTHON=python(tmp_path, "true"))
    assert done.returncode == 0, done.stdout + done.stderr
    begun = [line for line in lines(tmp_path / "out" / "phases.jsonl") if "begun" in line]
    assert [line["phase"] for line in begun] == [
        "machine",
        "align",
        "tests",
        "prove",
        "rows",
        "oss",
        "experts",
    ]
    assert 520 < begun[-1]["limit"] + begun[-1]["begun"] <= 540


def test_a_phase_that_is_cut_off_leaves_its_lines_and_the_next_one_runs(tmp_path: Path) -> None:
    stand_in = python(
        tmp_path,
        'out="${@: -1}"; echo "{\\"row\\": 1}" >>"$out"; case $1 in *card*) exec sleep 60;; esac',
    )
    done = day(tmp_path / "out", "machine=4", "align=60", PYTHON=stand_in)
    assert done.returncode == 1
    assert lines(tmp_path / "out" / "card.jsonl") == [{"row": 1}, {"row": 1}]
    ends = {
        line["phase"]: line for line in lines(tmp_path / "out" / "phases.jsonl") if "exit" in line
    }
    assert (ends["machine"]["exit"], ends["machine"]["cut"]) == (124, True)
    assert "machine: exit 124" in done.stdout


def test_a_phase_that_fails_is_told_and_ends_nothing_else(tmp_path: Path) -> None:
    stand_in = python(tmp_path, "case $1 in *card*) echo broken; exit 3;; esac")
    done = day(tmp_path / "out", "machine", "align", PYTHON=stand_in)
    assert done.returncode == 1
    ends = [
        (line["phase"], line["exit"])
        for line in lines(tmp_path / "out" / "phases.jsonl")
        if "exit" in line
    ]
    assert ends == [("machine", 3), ("align", 0)]
    assert "broken" in (tmp_path / "out" / "day.log").read_text()


@pytest.mark.parametrize(
    ("phases", "environment", "said"),
    [
        (["machine"], {"SITE": "site", "WHEELS": "nowhere"}, "python benchmarks/gpu_pack.py"),
        (["breakfast"], {}, "there is no phase breakfast"),
        (["rows=400", "oss=400"], {}, "more than 540"),
        (["machine"], {"CARD": "11"}, "cards of 80 and of 24 GB"),
    ],
    ids=["no wheels", "no such phase", "too long", "no such card"],
)
def test_what_cannot_begin_says_what_to_do(
    phases: list[str], environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = day(tmp_path / "out", *phases, **environment)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "out" / "phases.jsonl").exists()


def test_a_card_and_the_places_of_weights_are_measured_with_torch_alone(tmp_path: Path) -> None:
    done = day(tmp_path / "out", "machine", "align")
    assert done.returncode == 0, done.stdout + done.stderr
    known = lines(tmp_path / "out" / "card.jsonl")
    assert {"packages", "card", "host memory", "linear", "grouped_mm"} <= {
        line["what"] for line in known
    }
    assert {line["past_16"] for line in known if line["what"] == "linear"} == {0, 8, 2}


# What a run needs


def test_a_missing_package_is_named_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_software

    assert gpu_software.what_is_missing("cpu") == []
    there = gpu_software._version
    monkeypatch.setattr(
        gpu_software, "_version", lambda name: None if name == "pydantic" else there(name)
    )
    line, how = gpu_software.what_is_missing("cpu")
    assert line.startswith("pydantic is absent;")
    assert "pip install 'pydantic>=" in line
    assert "gpu_pack.py" in how


def test_another_version_is_told_and_no_reason_to_measure_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu_software

    assert gpu_software.untested_versions() == []
    there = gpu_software._version
    monkeypatch.setattr(
        gpu_software, "_version", lambda name: "5.16.0" if name == "transformers" else there(name)
    )
    assert gpu_software.what_is_missing("cpu") == []
    (line,) = gpu_software.untested_versions()
    assert line.startswith("transformers 5.16.0;")


def test_where_lema_cannot_be_imported_the_message_says_how_to_install_it() -> None:
    """Of a Python that has the standard library alone, as the machine's own may be for all that
    is known.
    """
    script = BENCHMARKS / "gpu.py"
    done = subprocess.run(
        [sys.executable, "-E", "-S", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "lema is not installed: pip install" in done.stderr
    assert "benchmarks/gpu_pack.py" in done.stderr


def test_a_device_that_is_not_there_is_told_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu_software

    from lema_accelerator import backend

    def absent(_: str) -> torch.device:
        raise BackendUnavailable("there is no such device", where="device: cuda", how="put one in")

    monkeypatch.setattr(backend, "choose_device", absent)
    (line,) = gpu_software.what_is_missing("cuda")
    assert "there is no such device" in line


# Layers that are the bytes of the first


def test_every_layer_of_a_repeated_checkpoint_is_the_first_and_host_memory_has_it_once(
    tmp_path: Path,
) -> None:
    """In a process of its own, because it changes for good how this one opens models."""
    script = tmp_path / "script.py"
    script.write_text(REPEATED)
    surroundings = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path]),
    }
    command = [sys.executable, str(script), str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["places"] == 1, "layers lie at different places of the file"
    assert found["memories"] == 1, "layers have host memory of their own"
    assert found["finite"]
    assert found["blocks"] < found["bytes"] - 10 * found["layer"], (
        "other layers are on the disk too"
    )


REPEATED = """
import json, sys, torch
from dataclasses import replace
from pathlib import Path
from gpu_experts import _small
from gpu_host import keep_host_weights
from gpu_repeated import repeat_layers, write_repeated
from lema import LemaConfig, LemaModel
from lema.backend import load
from lema_tools.models.checkpoints import named

directory = Path(sys.argv[1])
checkpoint = named("gpt-oss-120b")
sizes = {**checkpoint.sizes, **_small("gpt_oss"), "num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 256}
nbytes = write_repeated(replace(checkpoint, sizes=sizes), directory)
repeat_layers()
backend = load("cpu")
keep_host_weights(backend)
model = LemaModel(LemaConfig(str(directory), device="cpu", strategy="resident", save_steps=0), backend=backend)
model.initialize_lora()
records = [record for name, record in model.gbi.items() if name.endswith("q_proj.weight")]
memory = model.memory
loss = model.get_trainer().accumulate([{"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}]).loss
print(json.dumps({
    "places": len({record.offset for record in records}),
    "memories": len({tensor.data_ptr() for tensor in memory._host.values()}),
    "finite": bool(torch.isfinite(torch.as_tensor(float(loss)))),
    "bytes": nbytes,
    "layer": sum(record.nbytes for name, record in model.gbi.items() if ".layers.0." in name),
    "blocks": sum(file.stat().st_blocks for file in directory.iterdir()) * 512,
}))
"""
