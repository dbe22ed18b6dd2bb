"""The runs that are killed: plain ones, phases, every objective, and each in two processes that
`torchrun` holds.

A process costs no imports, because it is forked; those of `torchrun` are forked by its own agent.
One way starts all of them anew, as the command line does.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

from faults.diskseam import DiskSeam
from faults.forked import Child, fork, note_imports
from faults.shortrun import STEPS, ShortRun, checkpoint_steps, leftovers, of_record, record_of

__all__ = [
    "CHANGES",
    "DIED",
    "PHASES",
    "STANDSTILL",
    "STEPWISE",
    "WAYS",
    "Way",
    "begun",
    "difference",
    "end_all",
    "held_by",
    "imports_of",
]
__all__ += ["is_there", "told_of"]

ROWS = 2
BLOCK = 12
VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_ERROR_FILE": os.devnull}
OF_TIME = ("| train_runtime", "| train_tokens_per_second")  # lines of a card
SUMMARY = re.compile(
    r"^(ended at step \d+) after .*?(: mean loss [^,]*),|^(best evaluation: .*)$", re.MULTILINE
)
STANDSTILL = 900.0  # seconds of a wall clock that a run may take, on a machine that does much else
CHANGES = 0
# marks: how many changes of the disk were seen, and whether the process ended itself by a signal
DIED = 1

# Lines of metrics, evaluations and checkpoints fall on steps of their own.
EPOCHS: Mapping[str, Any] = {
    "num_train_epochs": 2.0,
    "max_steps": None,
    "max_train_samples": 6,
    "logging_steps": 2,
}
BEST: Mapping[str, Any] = {"load_best_model_at_end": True, "eval_data": "eval.jsonl"}
STEPWISE: Mapping[str, Any] = {
    "max_steps": STEPS,
    "eval_data": "eval.jsonl",
    "eval_steps": 2,
    "save_total_limit": 2,
}


@dataclass(frozen=True)
class Way:
    """A run, and how it is started: phases or a plain one, in how many processes, each of which
    begins `anew` or is forked."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    anew: bool = False

    @property
    def phases(self) -> bool:
        """Whether it is a run of phases."""
        return "phases" in self.changes

    @property
    def straight(self) -> str:
        """The name of the run without a kill that it is compared with; who starts the processes
        makes no difference.
        """
        settings = "phases" if self.phases else "-".join(sorted(self.changes))
        return f"straight-{self.changes.get('objective', settings)}-{self.processes}"


def _phase(name: str, trains: str, steps: int, rate: float) -> dict[str, Any]:
    mixture = [{"name": "one", "rate": 1.0}]
    return {
        "name": name,
        "trains": trains,
        "tokens": steps * ROWS * BLOCK,
        "learning_rate": rate,
        "mixture": mixture,
    }


PHASES: Mapping[str, Any] = {
    "phases": [_phase("whole", "full", 2, 1e-2), _phase("adapters", "lora", 3, 1e-2)],
    "train_data": {"one": "rows.jsonl"},
    "eval_data": {"one": "eval.jsonl"},
    "eval_rows": 2,
    "max_steps": None,
    "max_length": BLOCK,
    "save_steps": 2,
    "eval_steps": 1,
    "logging_steps": 2,
    "save_total_limit": 2,
}


def _objective(name: str, processes: int) -> Way:
    about: dict[str, Any] = {
        "objective": name,
        "train_data": "pairs.jsonl",
        "max_length": 48,
        "max_steps": 4,
        "save_total_limit": 2,
    }
    about["lora_dropout"] = 0.0  # as the published losses have it
    return Way(f"{'torchrun, ' if processes > 1 else ''}{name}", about, processes)


PAIRED = ("dpo", "ipo", "orpo", "simpo", "kto")
# By kind, in the order in which chains take them.
WAYS: Mapping[str, tuple[Way, ...]] = {
    "phases": (Way("phases", PHASES),),
    "torchrun": (
        Way("torchrun", STEPWISE, 2),
        Way("torchrun, phases", PHASES, 2),
        Way("torchrun, of epochs", {**EPOCHS, **BEST}, 2),
        Way("torchrun, phases", PHASES, 2),
        Way("torchrun by its command", STEPWISE, 2, anew=True),
    ),
    # Each alone and in two processes by turns, so that few chains have as many objectives as can
    # be.
    "objectives": tuple(
        _objective(name, (number + turn) % 2 + 1)
        for turn in (0, 1)
        for number, name in enumerate(PAIRED)
    ),
    "plain": (Way("plain", STEPWISE), Way("plain, of epochs", {**EPOCHS, **BEST})),
}


def begun(made: ShortRun, way: Way, name: str, *, resume: bool, at: int = -1) -> Child:
    """Start the run of that name; the first process kills itself at change number `at` of its disk,
    unless it is below
    0. What is seen of its disk is in `made.marks`; nothing, where processes begin anew. One that
      ends leaves a file of
    what it has imported, at `imports_of`."""
    given = {key: _placed(made.place, value) for key, value in way.changes.items()}
    file = made.written(name, **given)
    made.marks.clear()
    if way.processes == 1:
        return fork(lambda: _trained(made, file, name, resume, at), made.log(name))
    return fork(
        lambda: (_by_command if way.anew else _by_agent)(made, way, file, name, resume, at),
        made.log(name),
    )


def imports_of(made: ShortRun, name: str) -> Path:
    """Return where a run notes what it has imported."""
    return made.place / f"{name}.modules"


def _placed(place: Path, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _placed(place, one) for key, one in value.items()}
    return str(place / value) if isinstance(value, str) and value.endswith(".jsonl") else value


def _trained(made: ShortRun, file: Path, name: str, resume: bool, at: int) -> int:
    """Run it in this process, which counts the changes of its disk."""
    first = os.environ.get("RANK", "0") == "0"

    def look(kind: str, path: Path, done: float) -> None:
        if made.marks[CHANGES] == at:
            made.marks[DIED] = 1
            os.kill(os.getpid(), signal.SIGKILL)
        made.marks[CHANGES] += 1

    if first:
        DiskSeam(made.out(name), look).install()
    code = made.command(file, resume=resume)
    if first:
        note_imports(imports_of(made, name))
    return code


def _by_agent(made: ShortRun, way: Way, file: Path, name: str, resume: bool, at: int) -> int:
    """Have torchrun's agent fork the processes, from this one."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def worker() -> None:
        if code := _trained(made, file, name, resume, at):
            raise SystemExit(code)

    os.environ.update(VARIABLES)
    (logs := made.place / "elastic").mkdir(exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=way.processes,
        run_id=f"{name}-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
    )
    elastic_launch(config, worker)()
    return 0


def _by_command(made: ShortRun, way: Way, file: Path, name: str, resume: bool, at: int) -> int:
    """Become `torchrun`, which starts Python for each process."""
    os.environ.update(VARIABLES)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={way.processes}"]
    run = ["-m", "lema", "train", str(file), *(["--resume"] if resume else [])]
    os.execv(sys.executable, [sys.executable, *launch, *run])


def held_by(child: Child) -> list[psutil.Process]:
    """Return the processes that train, of `torchrun`'s child in the order in which they were
    started.
    """
    try:
        return sorted(psutil.Process(child.pid).children(recursive=True), key=lambda one: one.pid)
    except psutil.NoSuchProcess:
        return []


def end_all(child: Child) -> bool:
    """Kill a process and all that it has started; return whether it was there."""
    if not child.send(signal.SIGSTOP):  # so that it starts no further one
        return False
    started = held_by(child)
    child.send(signal.SIGKILL)
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    child.wait()
    while any(map(_runs, started)):
        time.sleep(0.001)
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_there(way: Way, out: Path) -> bool:
    """Whether there is something to go on from."""
    return out.is_dir() if way.phases else bool(checkpoint_steps(out))


def told_of(out: Path, said: str) -> dict[str, Any]:
    """Return all that a run that has ended leaves, and what it said at its end, but for times."""
    told: dict[str, Any] = {"metrics": record_of(out), "left behind": leftovers(out)}
    told["said"] = [match.groups() for match in SUMMARY.finditer(said)]
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".safetensors":
            told[name] = sha256(path.read_bytes()).hexdigest()
        elif path.name == "trainer_state.json":
            told[name] = [
                of_record(row)
                for row in json.loads(path.read_text(encoding="utf-8"))["log_history"]
            ]
        elif path.name in ("latest.json", "best.json"):
            told[name] = json.loads(path.read_text(encoding="utf-8"))
        elif path.name == "README.md":
            lines = path.read_text(encoding="utf-8").replace(out.name, "").splitlines()
            told[name] = [line for line in lines if not line.startswith(OF_TIME)]
        elif path.name not in (
            "loss.png",
            ".lock",
        ):  # a picture is drawn where processes begin anew
            told[name] = "there"
    return told


def difference(told: Mapping[str, Any], straight: Mapping[str, Any]) -> str:
    """Say in what two ends differ; empty: in nothing."""
    found = []
    for name in sorted(straight.keys() | told.keys()):
        mine, theirs = (one.get(name, "not there") for one in (told, straight))
        if mine != theirs and isinstance(mine, list) and isinstance(theirs, list):
            missing, more = (
                [row for row in one if row not in other]
                for one, other in ((theirs, mine), (mine, theirs))
            )
            found.append(
                f"{name} has {len(mine)} lines for {len(theirs)}, missing {missing}, more {more}"
            )
        elif mine != theirs:
            found.append(f"{name} is {mine}, not {theirs}")
    return "; ".join(found)
