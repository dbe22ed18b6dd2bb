"""The run that faults are done to: eight layers, dropout, six steps, and whether it came to the
end it must come to.
"""

import atexit
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from faults.forked import Ended, Marks, run, warm

__all__ = [
    "STEPS",
    "ShortRun",
    "checkpoint_steps",
    "damaged",
    "last_lines",
    "leftovers",
    "of_record",
    "record_of",
    "short_run",
]

STEPS = 6
WEIGHTS = "adapter_model.safetensors"
LOCK = ".lock"  # stays between runs
# What differs between two processes that do the same: times, and what it cost to read weights anew.
OF_THE_PROCESS = ("time", "tokens_per_second", "train_tokens_per_second", "train_runtime", "memory")
COSTS = ("bytes_", "layers_", "seconds_")


@dataclass(frozen=True)
class ShortRun:
    """A model, rows and a place for the output of runs.

    Attributes:
        place: a directory; `model` and `rows.jsonl` are in it.
        marks: numbers that children leave.
    """

    place: Path
    marks: Marks

    def out(self, name: str) -> Path:
        """Return the output directory of a run."""
        return self.place / name

    def log(self, name: str) -> Path:
        """Return where a run says what it says."""
        return self.place / f"{name}.log"

    def written(self, name: str, **changes: Any) -> Path:
        """Write the settings of a run, whose output goes to the directory of that name; return
        the file.
        """
        given = {
            "model_name_or_path": str(self.place / "model"),
            "train_data": str(self.place / "rows.jsonl"),
            "output_dir": str(self.out(name)),
            "device": "cpu",
            "gradient_checkpointing": True,
            "lora_rank": 4,
            "lora_alpha": 8,
            "lora_dropout": 0.1,
            "lora_target_modules": ["q_proj"],
            "learning_rate": 1e-2,
            "batch_size": 2,
            "max_steps": STEPS,
            "save_steps": 1,
            **changes,
        }
        file = self.place / f"{name}.yaml"
        lines = [
            f"{key}: {json.dumps(value)}\n" for key, value in given.items() if value is not None
        ]
        file.write_text("".join(lines), encoding="utf-8")
        return file

    def command(self, file: Path, *, resume: bool = False) -> int:
        """Run `lema train` in this process, as the command line does; return the exit code."""
        from lema.cli.app import app
        from lema.cli.exitcodes import run as run_command
        from lema.train import events

        events.plot_loss = lambda *_: False  # a picture takes longer than a step
        return run_command(app, ["train", str(file), *(["--resume"] if resume else [])])

    def train(self, name: str, *, resume: bool = False, **changes: Any) -> int:
        """Run `lema train` with these settings in this process; return the exit code."""
        return self.command(self.written(name, **changes), resume=resume)

    def child(self, name: str, *, resume: bool = False, **changes: Any) -> Ended:
        """Run it in a child, to its end."""
        return run(lambda: self.train(name, resume=resume, **changes), self.log(name))

    def straight(self, **changes: Any) -> Path:
        """Run it without a fault, once for the same settings; return its output directory.

        Raises:
            RuntimeError: it failed, and there is nothing to compare with.
        """
        name = f"straight-{_key(changes)}"
        if not self.out(name).exists():
            ended = self.child(name, **changes)
            if ended.code:
                raise RuntimeError(f"the run without a fault ended with {ended.code}: {ended.said}")
        return self.out(name)

    def halted(self, step: int, **changes: Any) -> Path:
        """Kill a run, once for the same settings, as soon as the checkpoint of `step` is saved;
        return its directory.

        Raises:
            RuntimeError: it came to another end.
        """
        name = f"halted-{step}-{_key(changes)}"
        if self.out(name).exists():
            return self.out(name)

        def work() -> int:
            from lema.train.stage import Stage

            save = Stage.save

            def and_die(stage: Stage, *arguments: Any, **options: Any) -> None:
                save(stage, *arguments, **options)
                if stage.progress.done == step:
                    os.kill(os.getpid(), signal.SIGKILL)

            Stage.save = and_die  # type: ignore[method-assign, assignment]
            return self.train(name, **changes)

        ended = run(work, self.log(name))
        if ended.code != -signal.SIGKILL:
            raise RuntimeError(
                f"the run that was to be killed ended with {ended.code}: {ended.said}"
            )
        return self.out(name)

    def copied(self, halted: Path, name: str) -> Path:
        """Begin from a copy of what a halted run left."""
        self.forget(name)
        return shutil.copytree(halted, self.out(name))

    def forget(self, name: str) -> None:
        """Remove what a run left."""
        shutil.rmtree(self.out(name), ignore_errors=True)

    def fault_of(self, name: str, ended: Ended, straight: Path) -> str:
        """Return what is wrong with a run that has come to its end, or nothing."""
        out = self.out(name)
        if ended.code:
            return f"it ended with {ended.code}: {last_lines(ended.said)}"
        if not same_adapter(out, straight):
            return "the adapter is another"
        if record_of(out) != record_of(straight):
            return "the record is another"
        if found := leftovers(out):
            return f"left behind: {', '.join(found)}"
        return ""


@cache
def short_run() -> ShortRun:
    """Make the model and the rows, and import what a run needs, once in this process.

    Raises:
        RuntimeError: the model cannot be made, or not be trained.
    """
    made = ShortRun(Path(tempfile.mkdtemp(prefix="lema-faults-")), Marks())
    atexit.register(shutil.rmtree, made.place, ignore_errors=True)
    for name in ("smallrun", "lema.cli.app", "lema.train.run"):
        import_module(name)  # here, because each of the children would do it
    ended = run(lambda: _make(made.place), made.log("make"))
    if ended.code:
        raise RuntimeError(f"the model could not be made: {ended.said}")
    _ready(made)
    return made


def _key(changes: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:12]


def _make(place: Path) -> int:
    from smallrun import SENTENCES, token_rows, write_model

    write_model(place / "model")
    for file, count, seed in (("rows.jsonl", 40, 1), ("eval.jsonl", 4, 2)):
        lines = [json.dumps(row) + "\n" for row in token_rows(count, seed, length=6)]
        (place / file).write_text("".join(lines), encoding="utf-8")
    pairs = [{"prompt": one[:24], "chosen": one[24:], "rejected": one[30:]} for one in SENTENCES]
    (place / "pairs.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8"
    )
    return 0


def _ready(made: ShortRun) -> None:
    """Import here all that a run needs."""
    import torch

    torch.set_num_threads(1)
    options: dict[str, Any] = {"eval_data": str(made.place / "eval.jsonl"), "eval_steps": 2}
    ended = warm(lambda: made.train("warm", **options), made.log("warm"))
    if ended.code:
        raise RuntimeError(f"the first run ended with {ended.code}: {ended.said}")
    from transformers import conversion_mapping

    # a table that is made once in a process
    conversion_mapping.get_checkpoint_conversion_mapping("")
    made.forget("warm")


def same_adapter(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same bytes."""
    file = one / WEIGHTS
    return file.is_file() and file.read_bytes() == (other / WEIGHTS).read_bytes()


def of_record(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a line of metrics says of the run."""
    return {
        name: one
        for name, one in row.items()
        if name not in OF_THE_PROCESS and not name.startswith(COSTS)
    }


def record_of(out: Path) -> list[dict[str, Any]]:
    """Return every line of metrics.jsonl, as it is there, but for what is of the process."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [of_record(json.loads(line)) for line in lines]


def leftovers(out: Path) -> list[str]:
    """Return the names of what a run should have removed."""
    return sorted(
        str(path.relative_to(out))
        for path in out.rglob("*")
        if path.name.startswith(".") and path.name != LOCK
    )


def checkpoint_steps(out: Path) -> list[int]:
    """Return the steps of the checkpoints of a run, the oldest first."""
    names = [path.name.removeprefix("checkpoint-") for path in out.glob("checkpoint-*")]
    return sorted(int(name) for name in names if name.isdigit())


def damaged(out: Path) -> str:
    """Say which checkpoint is not what was saved; nothing where each is."""
    from lema.errors import LemaError
    from lema.storage.manifest import check_manifest

    for step in checkpoint_steps(out):
        try:
            check_manifest(out / f"checkpoint-{step}")
        except LemaError as error:
            return f"the checkpoint of step {step} is damaged: {error.what}"
    return ""


def last_lines(said: str, count: int = 4) -> str:
    """Return the end of what a child said, in one line."""
    return " / ".join(line.strip() for line in said.splitlines()[-count:])
