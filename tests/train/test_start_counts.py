"""What a run does before its first step, counted: nothing of the weights is read twice, nothing
is looked at twice.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from clirun import config_writer

from lema import LemaConfig, LemaModel
from lema.model.split import Split
from lema.plan import measure
from lema.plan.planner import timed
from lema.stream import reader
from lema.train.run import train
from lema.train.trainer import LemaTrainer

PAGE = 4096
Read = tuple[str, int, int]  # a file, and the bytes of it


class Begun(Exception):
    """The first step would begin now."""


@pytest.fixture
def write_config(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    return config_writer(llama, tmp_path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Every read of weights, in order."""
    found: list[Read] = []
    read_all = reader.read_all

    def noted(descriptor: int, views: list[memoryview], begin: int, nbytes: int) -> None:
        found.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), begin, begin + nbytes))
        read_all(descriptor, views, begin, nbytes)

    monkeypatch.setattr(reader, "read_all", noted)
    return found


def until_the_first_step(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: Any, **__: Any) -> None:
        raise Begun

    monkeypatch.setattr(LemaTrainer, "accumulate", begin)
    with pytest.raises(Begun):
        train(LemaConfig.from_yaml(config))


def read_twice(reads: list[Read]) -> list[tuple[str, int]]:
    """Return the pages of each file that were read more than once, but for those that two reads
    share at their ends.
    """
    # whole ones
    pages = Counter(
        (file, page) for file, begin, end in reads for page in range(-(-begin // PAGE), end // PAGE)
    )
    return [page for page, times in pages.items() if times > 1]


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="needs /proc to tell which file a descriptor is of"
)
def test_before_the_first_step_only_what_is_outside_the_layers_is_read_and_once(
    write_config: Any, reads: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(device_memory=None)
    until_the_first_step(config, monkeypatch)
    first = list(reads)
    model = LemaModel(LemaConfig.from_yaml(config))
    layers = f"{model.split.layers_name}."
    stored = sum(one.nbytes for name, one in model.gbi.items() if not name.startswith(layers))
    model.close()
    assert read_twice(first) == []
    assert stored <= sum(end - begin for _, begin, end in first) <= stored + 2 * PAGE * len(first)


@pytest.mark.parametrize("head", ["device", "stream"])
def test_planning_and_timing_look_once_at_what_layers_return(
    write_config: Any, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt = list[Split]()
    learn = Split._learn

    def counted(split: Split, *given: Any) -> None:
        learnt.append(split)
        learn(split, *given)

    monkeypatch.setattr(Split, "_learn", counted)
    model = LemaModel(LemaConfig.from_yaml(write_config(device_memory="20MB", head=head)))
    try:
        model.initialize_lora()
        planner = timed(model.planner)
    finally:
        model.close()
    assert planner.timings is not None, "a limit of memory has a run timed"
    assert len(learnt) == 1


def test_each_file_of_weights_has_its_header_read_once(
    write_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lema.storage import header

    opened: Counter[str] = Counter()
    parse = header.parse_json

    def counted(file: Path, raw: bytes) -> Any:
        opened[str(file)] += Path(file).suffix == ".safetensors"
        return parse(file, raw)

    monkeypatch.setattr(header, "parse_json", counted)
    until_the_first_step(write_config(), monkeypatch)
    assert opened and set(opened.values()) <= {0, 1}
    assert sum(opened.values()) >= 1


@pytest.mark.parametrize("num_read", [1, 2])
@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="needs /proc to tell which file a descriptor is of"
)
def test_the_layer_that_shows_how_fast_the_disk_is_is_timed_from_memory(
    write_config: Any, num_read: int, reads: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_speed = measure.read_speed
    monkeypatch.setattr(measure, "ENOUGH", 60.0)  # and then as many layers as are taken

    def some(layers: Iterator[Any], buffers: Any) -> float:
        return read_speed(islice(layers, num_read), buffers)

    monkeypatch.setattr(measure, "read_speed", some)
    monkeypatch.setattr(
        measure, "_phases", lambda visit, *_, **__: [0.0 for _ in islice(visit(), 2)]
    )
    model = LemaModel(LemaConfig.from_yaml(write_config(device_memory="20MB")))
    try:
        model.initialize_lora()
        reads.clear()
        planner = timed(model.planner)
        layer = planner.blueprint.layers[0]
    finally:
        model.close()
    assert planner.timings is not None
    assert read_twice(reads) == []
    read = sum(end - begin for _, begin, end in reads)
    assert num_read * sum(run.nbytes for run in layer.runs) <= read < (num_read + 1) * layer.nbytes


IMPORTS = """
import json, sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

opened = Counter()

def seen(event, given):
    if event == "open" and isinstance(given[0], str) and given[0].endswith(".py"):
        opened[given[0]] += 1

sys.addaudithook(seen)
from lema import LemaConfig
from lema.cli.libraries import import_libraries

import_libraries(SimpleNamespace(obj="main"), LemaConfig("model", output_dir="out", lora_rank=2), trusted=False)
import transformers
from transformers.utils.import_utils import _LazyModule, define_import_structure

folder = Path(transformers.__file__).parent / "models"
looked = {Path(file): times for file, times in opened.items() if folder in Path(file).parents}
twice = {file.relative_to(folder).parts[0] for file, times in looked.items() if times > 1}
own = _LazyModule("transformers.models", transformers.models.__file__, define_import_structure(str(folder)))
same = [
    getattr(own, name) == getattr(transformers.models, name)
    for name in ("_class_to_module", "_object_missing_backend", "_modules")
]
imported = {name.split(".")[2] for name in sys.modules if name.startswith("transformers.models.")}
print(json.dumps([len(looked), sorted(twice - imported), same]))
"""


def test_transformers_looks_once_into_the_files_of_its_models_and_knows_them_all() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    looked, twice, same = json.loads(done.stdout)
    assert looked > 500
    assert twice == [], "those that are imported are looked into by their own package"
    assert all(same)


def test_a_verb_of_the_core_imports_no_verbs_of_packages() -> None:
    code = (
        "import sys\nfrom lema.cli import app\nsys.argv[1:] = ['train', '--help']\ntry:\n    "
        "app.main()\nfinally:\n"
    )
    code += "    assert not any(name.startswith('lema_tools') for name in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: lema train" in done.stdout
    whole = subprocess.run(
        [sys.executable, "-m", "lema", "--help"], capture_output=True, text=True, check=True
    )
    assert "profile" in whole.stdout
