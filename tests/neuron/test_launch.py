"""The configs for Trainium, by the commands in their headers, with processes on the CPU in the
place of NeuronCores.
"""

import re
import shlex
import signal
import time
from pathlib import Path

import psutil
import pytest
from forked import command, run_forked
from peft import PeftModel
from processes import run_processes, started_processes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.train.metrics import read_metrics
from lema_tools.demo.run import write_files

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("neuron_*.yaml"))
FEW = (
    "max_steps=3",
    "batch_size=4",
    "eval_split=4",
    "learning_rate=1e-2",
    "warmup_ratio=0",
    "adam_epsilon=1e-2",
)
OTHERWISE = {  # the third runs as it stands, in half precision
    "neuron_trn1_2xlarge": ("dtype=float32",),
    # sequences of any length are shared
    "neuron_trn1_32xlarge": (
        "dtype=float32",
        "pad_to_multiple_of=null",
    ),
}
# torchrun starts what is left; these find what it would have set
FORKED = ("neuron_trn1_32xlarge", "neuron_trn2")
ALONE = ("device=cpu", "tensor_parallel_size=1", "sequence_parallel=false")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a demo that was not run."""
    monkeypatch.chdir(tmp_path)
    Path("lema-demo").mkdir()
    write_files(Path("lema-demo"))
    return tmp_path


def emulated(config: Path) -> tuple[int, list[str]]:
    """How many processes the header starts without a device, and what it gives each."""
    lines = [line.lstrip("# ") for line in config.read_text().splitlines() if line.startswith("#")]
    commands = [shlex.split(line) for line in lines if line.startswith("torchrun ")]
    assert len(commands) == 2
    for words in commands:
        assert words[1] == "--nproc_per_node" and words[3:7] == [
            "-m",
            "lema",
            "train",
            f"configs/{config.name}",
        ]
    real, found = commands
    assert len(real) == 7 and found[7:9] == ["--set", "neuron_runtime=emulated"]
    return int(found[2]), ["-m", "lema", "train", str(config), *found[7:]]


def options(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_command_without_a_device_trains_what_one_process_trains(
    config: Path, place: Path
) -> None:
    count, arguments = emulated(config)
    exact = OTHERWISE.get(config.stem, ())
    arguments += options(*FEW, *exact, "output_dir=shared")
    if config.stem in FORKED:
        assert arguments[:2] == ["-m", "lema"]
        run_forked(command, [arguments[2:], place], count, place, 240)
    else:
        done = run_processes(arguments, count)
        assert done.returncode == 0, done.stderr[-3000:]
    base = AutoModelForCausalLM.from_pretrained("lema-demo/model")
    adapted = PeftModel.from_pretrained(base, "shared")
    assert any(bool(one.any()) for name, one in adapted.named_parameters() if ".lora_B." in name)
    if not exact:
        return
    assert run(app, ["train", str(config), *options(*FEW, *exact, *ALONE, "output_dir=alone")]) == 0
    for key in ("loss", "eval_loss", "grad_norm"):
        shared, alone = (
            [row[key] for row in read_metrics(place / name / "metrics.jsonl") if key in row]
            for name in ("shared", "alone")
        )
        assert alone and shared == pytest.approx(alone, rel=1e-4), key
    one, other = (
        load_file(place / name / "adapter_model.safetensors") for name in ("alone", "shared")
    )
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert float((tensor - other[name]).abs().max() / tensor.abs().max()) < 1e-4, name


@pytest.mark.exhaustive  # every fault that kills is done to forked processes as well
def test_when_one_process_is_killed_all_end(place: Path) -> None:
    config = next(path for path in CONFIGS if path.stem == "neuron_trn1_2xlarge")
    count, arguments = emulated(config)
    steps = options("max_steps=100000", "batch_size=4", "dtype=float32", "output_dir=shared")
    metrics = place / "shared" / "metrics.jsonl"
    with started_processes([*arguments, *steps], count) as started:
        # the test's own limit ends this
        while not (metrics.is_file() and metrics.read_text().count("\n") > 1):
            assert started.poll() is None, started.communicate()[1][-3000:]
            time.sleep(0.1)
        workers = [
            one for one in psutil.Process(started.pid).children(recursive=True) if one.is_running()
        ]
        (last,) = [one for one in workers if one.environ().get("RANK") == "1"]
        last.send_signal(signal.SIGKILL)
        _, errors = started.communicate(timeout=60)
    assert started.returncode != 0
    assert not psutil.wait_procs(workers, timeout=10)[1], "a process is left"
    assert re.search(r"exitcode\s*: -9", errors)
